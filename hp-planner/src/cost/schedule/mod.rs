//! Pipeline schedules as task graphs, simulated exactly.
//!
//! A [`Pipeline`] has `devices` pipeline ranks, each holding `chunks` parts of the model. The parts in the order in which
//! a micro-batch passes them are *virtual stages*; a [`Schedule`] says on which device each of them lives and in which
//! order a device runs its passes:
//!
//! | schedule | layout | order |
//! |---|---|---|
//! | `GPipe` | virtual stage `v` on device `v` | all forward, then all backward (Huang et al. 2019) |
//! | 1F1B | the same | warm-up of `devices - 1 - d` forwards, then one forward, one backward (Narayanan et al. 2021, section 2.2) |
//! | interleaved 1F1B | `v` on device `v mod devices` | 1F1B over groups of `devices` micro-batches per chunk (section 2.3) |
//! | ZB-H1, ZB-2P | as 1F1B | backward split into input and weight gradient, weight gradients fill gaps (Qi et al. 2024, section 2) |
//! | ZB-V | down the devices and back up | the same with two chunks (section 6) |
//!
//! The first three run in a fixed order. The zero-bubble ones are scheduled greedily under a limit of activations held
//! (Qi et al. 2024, section 3.1): whenever a device is free it runs the first ready pass of input gradient, forward,
//! weight gradient. The same rules as a fixed order with each weight gradient directly after its input gradient are
//! tried too and the shorter result is kept, so that splitting the backward pass never loses against 1F1B.

mod engine;
mod order;
mod trace;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Infeasible, Result};
use crate::training::Schedule;

/// Times of one micro-batch in one virtual stage, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ChunkTimes {
    /// Forward pass.
    pub forward: f64,
    /// Backward pass for the gradient of the input.
    pub backward: f64,
    /// Backward pass for the gradient of the weights; schedules that do not split the backward pass run it with `backward`.
    pub weight: f64,
}

impl ChunkTimes {
    /// All three passes.
    pub fn total(&self) -> f64 {
        self.forward + self.backward + self.weight
    }
}

/// A pipeline to be scheduled: what each virtual stage takes, and what lies between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Pipeline {
    devices: usize,
    chunks: usize,
    micro_batches: usize,
    work: Vec<ChunkTimes>,
    transfer: Vec<f64>,
}

/// Kind of pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward; only the gradient of the input where the schedule splits it.
    Backward,
    /// Gradient of the weights, in schedules that split the backward pass.
    Weight,
}

/// One pass of one micro-batch on one device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Pipeline rank.
    pub device: usize,
    /// Virtual stage.
    pub stage: usize,
    /// Micro-batch.
    pub micro_batch: usize,
    /// Kind.
    pub pass: Pass,
    /// Start in seconds after the first task of the pipeline.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
}

/// A simulated schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// All tasks, device by device in the order in which they run.
    pub tasks: Vec<Task>,
    /// What the schedule takes.
    pub summary: PipelineTime,
}

/// What a schedule takes.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineTime {
    /// Seconds from the first start to the last end.
    pub makespan: f64,
    /// Seconds per iteration when iterations follow each other: the longest time any device is between its own first
    /// start and last end. It is the makespan except for zero-bubble schedules, whose iterations interlock.
    pub period: f64,
    /// Micro-batch chunks whose activations each device holds at its fullest moment, from the start of the forward pass
    /// to the end of the last pass that needs them.
    pub peak_in_flight: Vec<usize>,
    /// Seconds each device works.
    pub busy: Vec<f64>,
}

impl Pipeline {
    /// A pipeline of `devices` ranks over the virtual stages `work`, whose number must be a multiple of `devices`.
    ///
    /// `transfer[v]` is the time in seconds that a micro-batch takes from virtual stage `v` to `v + 1`, and its gradient
    /// back; it delays the receiver and occupies nobody.
    ///
    /// # Errors
    /// [`Error::Field`] if a count is 0 or does not fit, or a time is negative or not finite.
    pub fn new(
        devices: usize,
        work: Vec<ChunkTimes>,
        transfer: Vec<f64>,
        micro_batches: usize,
    ) -> Result<Self> {
        if devices == 0 || work.is_empty() || !work.len().is_multiple_of(devices) {
            return Err(Error::field(
                "work",
                format!("{} virtual stages", work.len()),
                format!("a multiple of devices = {devices}, both at least 1"),
            ));
        }
        if transfer.len() + 1 != work.len() {
            return Err(Error::field(
                "transfer",
                format!("{} times", transfer.len()),
                format!("one per boundary of {} virtual stages", work.len()),
            ));
        }
        if micro_batches == 0 {
            return Err(Error::field("micro_batches", 0, "1 or more"));
        }
        let times = work.iter().flat_map(|w| [w.forward, w.backward, w.weight]);
        if let Some(bad) = times
            .chain(transfer.iter().copied())
            .find(|t| !t.is_finite() || *t < 0.0)
        {
            return Err(Error::field("time", bad, "0 or more seconds"));
        }
        let chunks = work.len() / devices;
        Ok(Self {
            devices,
            chunks,
            micro_batches,
            work,
            transfer,
        })
    }

    /// A pipeline of equal virtual stages with equal transfers.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn uniform(
        devices: usize,
        chunks: usize,
        micro_batches: usize,
        times: ChunkTimes,
        transfer: f64,
    ) -> Result<Self> {
        let stages = devices * chunks;
        Self::new(
            devices,
            vec![times; stages],
            vec![transfer; stages.saturating_sub(1)],
            micro_batches,
        )
    }

    /// Number of pipeline ranks.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Model chunks per rank.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Micro-batches per iteration.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Times per virtual stage.
    pub fn work(&self) -> &[ChunkTimes] {
        &self.work
    }

    /// Transfer times between virtual stages.
    pub fn transfer(&self) -> &[f64] {
        &self.transfer
    }

    /// The device that holds virtual stage `stage` under `schedule`.
    pub fn device_of(&self, schedule: Schedule, stage: usize) -> usize {
        if schedule == Schedule::ZbV && stage >= self.devices {
            2 * self.devices - 1 - stage
        } else {
            stage % self.devices
        }
    }

    /// Whether the schedule exists for these counts.
    ///
    /// # Errors
    /// [`Infeasible::Divisibility`] if interleaving gets a number of micro-batches that is no multiple of the devices,
    /// [`Infeasible::Unsupported`] if the schedule does not take this number of chunks.
    pub fn check(&self, schedule: Schedule) -> Result<(), Infeasible> {
        check(schedule, self.devices, self.chunks, self.micro_batches)
    }

    /// Simulates the schedule and returns every task.
    ///
    /// Computes in O(n) for n tasks, zero-bubble schedules in O(n log n).
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn simulate(&self, schedule: Schedule) -> Result<Timeline, Infeasible> {
        self.check(schedule)?;
        Ok(engine::timeline(self, schedule))
    }

    /// What the schedule takes, by the closed form where one is exact and by simulation elsewhere.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn time(&self, schedule: Schedule) -> Result<PipelineTime, Infeasible> {
        self.check(schedule)?;
        if let Some(makespan) = self.closed_form(schedule)
            && !splits_backward(schedule)
        {
            let busy = self.busy(schedule);
            let peak_in_flight = (0..self.devices)
                .map(|d| in_flight(schedule, self.devices, self.chunks, d, self.micro_batches))
                .collect();
            return Ok(PipelineTime {
                makespan,
                period: makespan,
                peak_in_flight,
                busy,
            });
        }
        Ok(engine::time(self, schedule))
    }

    /// Seconds per iteration in closed form, where that is exact: equal stages and no transfers, for the zero-bubble
    /// schedules also equal passes and micro-batches enough to fill the pipeline.
    ///
    /// With p devices, m micro-batches, v chunks and the times f, b, w of a device:
    ///
    /// | schedule | seconds | source |
    /// |---|---|---|
    /// | `GPipe`, 1F1B | `(m + p - 1) (f + b + w)` | Narayanan et al. 2021, section 2.2 |
    /// | interleaved | `(m + (p - 1) / v) (f + b + w)` | the same, section 2.3 |
    /// | ZB-H1 | `m (f + b + w) + (p - 1) (f + b - w)` | Qi et al. 2024, table 1 |
    /// | ZB-2P | `m (f + b + w) + (p - 1) (f + b - 2 w)` | the same |
    /// | ZB-V | `m (f + b + w)` | the same, section 6; the greedy schedule here reaches it up to 4 devices |
    #[allow(clippy::float_cmp, reason = "even means equal in every bit")]
    pub fn closed_form(&self, schedule: Schedule) -> Option<f64> {
        let first = self.work[0];
        let even = self.work.iter().all(|w| *w == first) && self.transfer.iter().all(|&t| t == 0.0);
        if !even || self.check(schedule).is_err() {
            return None;
        }
        let (p, v, m) = (
            self.devices as f64,
            self.chunks as f64,
            self.micro_batches as f64,
        );
        let work = m * v * first.total();
        let unsplit = first.forward + first.backward;
        let equal_passes = first.forward == first.backward && first.backward == first.weight;
        let filled = |times: usize| equal_passes && self.micro_batches >= times * self.devices;
        match schedule {
            Schedule::GPipe | Schedule::OneFOneB => Some(work + (p - 1.0) * first.total()),
            Schedule::ZbH1 => filled(1).then_some(work + (p - 1.0) * (unsplit - first.weight)),
            Schedule::Zb2p => {
                filled(2).then_some(work + (p - 1.0) * (unsplit - 2.0 * first.weight))
            }
            Schedule::ZbV => filled(2).then_some(work),
        }
    }

    /// A time that no order of the passes can beat under the schedule's dependencies, in O(stages).
    ///
    /// For every device: the first micro-batch must reach it, all its work must be done there, and the last gradient
    /// must go back to the first device (Qi et al. 2024 let weight gradients wait, so those count only on the device
    /// itself). 1F1B holds no more than `devices - d` micro-batches on device d, so that as many micro-batches share one
    /// round trip to the last stage and back.
    pub fn lower_bound(&self, schedule: Schedule) -> f64 {
        let m = self.micro_batches as f64;
        let split = splits_backward(schedule);
        let backward = |w: &ChunkTimes| w.backward + if split { 0.0 } else { w.weight };
        let trip: f64 = self
            .work
            .iter()
            .map(|w| w.forward + backward(w))
            .sum::<f64>()
            + 2.0 * self.crossings(schedule, 0);
        let last_weight = if split { self.work[0].weight } else { 0.0 };
        let mut bound = trip + last_weight;
        let (mut head, mut tail) = (0.0, 0.0);
        let mut before = 0.0;
        for device in 0..self.devices {
            let (mut passes, mut weights) = (0.0, 0.0);
            for stage in (0..self.work.len()).filter(|&v| self.device_of(schedule, v) == device) {
                passes += self.work[stage].forward + backward(&self.work[stage]);
                weights += self.work[stage].weight;
            }
            bound = bound.max(head + m * passes + tail + last_weight);
            if split {
                bound = bound.max(m * (passes + weights));
            }
            if schedule == Schedule::OneFOneB && self.chunks == 1 {
                let rest = trip - before;
                let rounds = self.micro_batches.div_ceil(self.devices - device) as f64;
                bound = bound.max(head + rounds * rest + tail);
            }
            let hop = self.transfer.get(device).copied().unwrap_or(0.0);
            head += self.work[device].forward + hop;
            tail += backward(&self.work[device]) + hop;
            before += self.work[device].forward + backward(&self.work[device]) + 2.0 * hop;
        }
        bound
    }

    /// Transfers between different devices from virtual stage `from` to the last.
    fn crossings(&self, schedule: Schedule, from: usize) -> f64 {
        (from..self.transfer.len())
            .map(|v| self.hop(schedule, v))
            .sum()
    }

    /// Time from virtual stage `v` to `v + 1`; nothing where one device holds both.
    fn hop(&self, schedule: Schedule, v: usize) -> f64 {
        if self.device_of(schedule, v) == self.device_of(schedule, v + 1) {
            0.0
        } else {
            self.transfer[v]
        }
    }

    fn busy(&self, schedule: Schedule) -> Vec<f64> {
        let mut busy = vec![0.0; self.devices];
        for (stage, work) in self.work.iter().enumerate() {
            busy[self.device_of(schedule, stage)] += self.micro_batches as f64 * work.total();
        }
        busy
    }
}

/// Whether the schedule runs the gradients of input and weights as separate passes.
pub fn splits_backward(schedule: Schedule) -> bool {
    matches!(schedule, Schedule::ZbH1 | Schedule::Zb2p | Schedule::ZbV)
}

/// Whether `schedule` exists for a pipeline of these counts; see [`Pipeline::check`].
///
/// # Errors
/// [`Infeasible::Divisibility`] or [`Infeasible::Unsupported`].
pub fn check(
    schedule: Schedule,
    devices: usize,
    chunks: usize,
    micro_batches: usize,
) -> Result<(), Infeasible> {
    let allowed = match schedule {
        Schedule::GPipe | Schedule::ZbH1 | Schedule::Zb2p => chunks == 1,
        Schedule::OneFOneB => true,
        Schedule::ZbV => chunks == 2,
    };
    if !allowed {
        let takes = if schedule == Schedule::ZbV { 2 } else { 1 };
        return Err(Infeasible::Unsupported(format!(
            "schedule {schedule:?} takes {takes} model chunk(s) per stage, not {chunks}"
        )));
    }
    if schedule == Schedule::OneFOneB && chunks > 1 && !micro_batches.is_multiple_of(devices) {
        return Err(Infeasible::Divisibility {
            what: "number of micro-batches".to_owned(),
            value: micro_batches as u64,
            divisor: devices as u64,
            of: "pipeline stages, as interleaving needs".to_owned(),
        });
    }
    Ok(())
}

/// Most micro-batch chunks whose activations device `device` may hold under `schedule`: a limit that the simulation keeps,
/// reached as soon as the pipeline is filled.
///
/// Sources: all micro-batches for `GPipe`; `p - d` for 1F1B; `2 (p - d - 1) + (v - 1) p + 1` chunks for interleaving (the
/// warm-up of Narayanan et al. 2021 and the pass in hand); `p`, `2 p - 1` and `2 p` half-chunks for ZB-H1, ZB-2P and ZB-V
/// (Qi et al. 2024, table 1 and section 6), counted as held until the weight gradient is done.
pub fn in_flight(
    schedule: Schedule,
    devices: usize,
    chunks: usize,
    device: usize,
    micro_batches: usize,
) -> usize {
    let all = micro_batches * chunks;
    match schedule {
        Schedule::GPipe => all,
        Schedule::OneFOneB if chunks > 1 => {
            all.min(order::warm_up(devices, chunks, device, micro_batches) + 1)
        }
        Schedule::OneFOneB => all.min(devices - device),
        Schedule::ZbH1 => all.min(devices),
        Schedule::Zb2p => all.min(2 * devices - 1),
        Schedule::ZbV => all.min(2 * devices),
    }
}

#[cfg(test)]
mod tests;
