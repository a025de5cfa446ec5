//! Which hybrid-parallel configuration, on which devices, at what price.
#![forbid(unsafe_code)]

mod error;
mod pareto;

pub use error::Error;
pub use pareto::{FrontPoint, Objective, ParetoFront, Selection};
