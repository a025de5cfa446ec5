//! Time that a thread has run, on a machine that may be busy with other things.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::fs;
use std::time::Instant;

/// Measures the processor time of the thread that made it. Waiting for a processor does not count, so
/// other programs disturb it through shared caches and memory only. Linux tells it to a few
/// milliseconds; elsewhere it is the time on the wall.
#[derive(Debug)]
pub struct ThreadClock {
    ran: Option<u64>,
    start: Instant,
}

impl ThreadClock {
    pub fn start() -> Self {
        Self {
            ran: nanos_run(),
            start: Instant::now(),
        }
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        match (self.ran, nanos_run()) {
            (Some(before), Some(now)) => (now - before) as f64 / 1e9,
            _ => self.start.elapsed().as_secs_f64(),
        }
    }
}

/// Nanoseconds for which the thread has run: the first number of its scheduler statistics.
fn nanos_run() -> Option<u64> {
    let statistics = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    statistics.split(' ').next()?.parse().ok()
}
