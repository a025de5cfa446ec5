//! JABAS's profiles and its configuration problem, solved exactly.
//!
//! JABAS (joint adaptive batching and automatic scaling, `EuroSys` 2025) trains with data parallelism on mixed GPUs: every
//! GPU runs the same local batch, fast ones in several *virtual workers* at a time and with more accumulation steps. Its
//! profiler writes a folder with, per local batch and server, the times of an iteration with 1, 2, ... virtual workers,
//! the most virtual workers that fit, all-reduce curves inside and between servers, and the sizes of the gradient
//! buckets. [`JabasProfile`] reads that folder and predicts iteration times as JABAS's model does;
//! [`JabasProfile::solve`] finds, for a global batch, the local batch, servers, virtual workers and accumulation steps of
//! greatest throughput.

mod profile;
mod solve;

pub use profile::{JabasProfile, Server};
pub use solve::{JabasOptions, JabasPlan, UnitPlan};
