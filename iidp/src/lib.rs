//! iidp.
#![forbid(unsafe_code)]

pub mod communicator;
mod error;

pub use communicator::{Communicator, LocalCommunicator};
pub use error::{Error, Loss};
