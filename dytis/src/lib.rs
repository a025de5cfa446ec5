//! An ordered map for keys whose distribution keeps changing.
#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

mod builder;
#[cfg(feature = "concurrent")]
pub mod concurrent;
#[cfg(feature = "std")]
pub mod dynamics;
mod error;
mod key;
pub mod map;
#[allow(
    unsafe_code,
    reason = "the structure itself; each block has its SAFETY argument"
)]
mod raw;
#[cfg(feature = "concurrent")]
mod sync;

pub use builder::DytisBuilder;
#[cfg(feature = "concurrent")]
pub use concurrent::ConcurrentDytisMap;
pub use error::Error;
pub use key::{Key, TotalF64};
pub use map::DytisMap;
pub use raw::stats::Stats;
