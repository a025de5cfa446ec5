//! An ordered map for keys whose distribution keeps changing.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

mod builder;
mod error;
mod key;
pub mod map;
#[allow(
    unsafe_code,
    reason = "the structure itself; each block has its SAFETY argument"
)]
mod raw;

pub use builder::DytisBuilder;
pub use error::Error;
pub use key::{Key, TotalF64};
pub use map::DytisMap;
pub use raw::stats::Stats;
