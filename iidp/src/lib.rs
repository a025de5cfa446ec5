//! iidp.
#![forbid(unsafe_code)]

pub mod communicator;
mod error;
pub mod optimizer;

pub use communicator::{Communicator, LocalCommunicator};
pub use error::{Error, Loss};
pub use optimizer::{AdamWConfig, OptimizerConfig};
