//! What a step gives back.

use std::time::Duration;

use serde::Serialize;

/// Result of [`Executor::step`](super::Executor::step).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepOutput {
    /// Number of the step, from zero.
    pub step: u64,
    /// Mean loss over the samples of the global batch, before the update.
    pub loss: f64,
    /// Samples in the global batch.
    pub samples: usize,
    /// Mean loss of each micro-batch, in the order of the global batch.
    pub micro_batch_losses: Vec<f64>,
    /// L2 norm of the global batch's gradient, before clipping.
    pub gradient_norm: f64,
    /// Whether the gradient was scaled down to the clip norm.
    pub clipped: bool,
    /// Where the time went.
    pub timings: StepTimings,
}

/// Where the time of a step went.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct StepTimings {
    /// From the call to its return.
    pub total: Duration,
    /// One entry per rank of this process, by rank.
    pub ranks: Vec<RankTimings>,
}

impl StepTimings {
    /// The step as a timeline in Chrome's trace format (a JSON array of complete events, times in microseconds), to be
    /// opened in `chrome://tracing` or Perfetto: one process per rank; in it line 0 for the rank's own work, line 1 for the
    /// all-reduces of buckets, and then a line per micro-batch that is under way at a time.
    ///
    /// # Examples
    ///
    /// ```
    /// let events = iidp::StepTimings::default().chrome_trace();
    /// assert_eq!(events.to_string(), "[]");
    /// ```
    pub fn chrome_trace(&self) -> serde_json::Value {
        let mut events = Vec::new();
        for rank in &self.ranks {
            let mut event = |name: String, line: usize, start: Duration, duration: Duration| {
                events.push(serde_json::json!({
                    "name": name,
                    "ph": "X",
                    "pid": rank.rank,
                    "tid": line,
                    "ts": (rank.begin + start).as_secs_f64() * 1e6,
                    "dur": duration.as_secs_f64() * 1e6,
                }));
            };
            event(
                "wait for ranks".to_owned(),
                0,
                rank.communicate_start,
                rank.communicate,
            );
            event("update".to_owned(), 0, rank.update_start, rank.update);
            for one in &rank.buckets {
                event(
                    format!("all-reduce {}", one.bucket),
                    1,
                    one.start,
                    one.duration,
                );
            }
            // The micro-batches of a worker follow each other, or go through their backward passes together: each gets the first free line.
            let mut lines: Vec<(usize, Duration)> = Vec::new();
            for one in &rank.micro_batches {
                let free =
                    |(worker, end): &(usize, Duration)| *worker == one.worker && *end <= one.start;
                let line = lines.iter().position(free).unwrap_or_else(|| {
                    lines.push((one.worker, Duration::ZERO));
                    lines.len() - 1
                });
                lines[line].1 = one.start + one.duration;
                let name = format!("micro-batch {} (worker {})", one.micro_batch, one.worker);
                event(name, line + 2, one.start, one.duration);
            }
        }
        events.into()
    }
}

/// Where one rank's time went in a step.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct RankTimings {
    /// The rank.
    pub rank: usize,
    /// From the call of the step until the rank began with it.
    pub begin: Duration,
    /// From the beginning until the last micro-batch was computed.
    pub compute: Duration,
    /// In the accumulation passes (part of them beside the compute of other micro-batches).
    pub accumulate: Duration,
    /// From the end of the last accumulation until all ranks agreed on the step: all-reduces that were not hidden behind
    /// compute, waiting for later ranks, the observers' collectives.
    pub communicate: Duration,
    /// When that began, since the rank began the step.
    pub communicate_start: Duration,
    /// In the optimizer.
    pub update: Duration,
    /// When the update began, since the rank began the step.
    pub update_start: Duration,
    /// Each bucket's all-reduce, in the order in which they were done.
    pub buckets: Vec<BucketTiming>,
    /// Each micro-batch of the rank, in the order of the global batch.
    pub micro_batches: Vec<MicroBatchTiming>,
}

/// When one micro-batch was computed.
#[derive(Debug, Clone, Copy, Serialize)]
#[non_exhaustive]
pub struct MicroBatchTiming {
    /// Position in the global batch.
    pub micro_batch: usize,
    /// Which virtual worker of the rank.
    pub worker: usize,
    /// Since the rank began the step.
    pub start: Duration,
    /// Forward and backward, with the rest that an emulated speed asks for.
    pub duration: Duration,
}

/// When one bucket was reduced.
#[derive(Debug, Clone, Copy, Serialize)]
#[non_exhaustive]
pub struct BucketTiming {
    /// Index of the bucket.
    pub bucket: usize,
    /// Since the rank began the step.
    pub start: Duration,
    /// In its all-reduce, waiting for later ranks included.
    pub duration: Duration,
}
