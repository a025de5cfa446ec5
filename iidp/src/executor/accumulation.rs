//! One step's gradients on a rank: accumulated in the order of the micro-batches, reduced bucket by bucket.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::agreement::{Agreement, Failure};
use super::observer::{MicroBatchObserver, MicroBatchRef};
use super::output::{BucketTiming, MicroBatchTiming, RankTimings};
use super::reducer::Reducer;
use crate::bucket::FlatGradient;
use crate::communicator::Communicator;
use crate::worker::{Answer, Piece};
use crate::{BoxError, Error, GradientBucket, ParameterLayout};

/// After which segment of the backward pass the gradient of each slot is complete; segments are counted from the loss.
pub(super) type Readiness = Arc<[usize]>;

/// What a step accumulates on a rank.
pub(super) struct Accumulation<'a> {
    pub(super) rank: usize,
    pub(super) layout: &'a ParameterLayout,
    pub(super) observer: &'a mut dyn MicroBatchObserver,
    pub(super) gradient: &'a mut [f32],
    pub(super) buffers: &'a [f32],
    pub(super) buffer_change: &'a mut [f32],
    pub(super) global_batch: usize,
    pub(super) begin: Instant,
    pub(super) agreement: Agreement,
    pub(super) timings: RankTimings,
    /// The communication thread and how many buckets, from the last one down, are not with it yet.
    pub(super) flow: Option<(&'a mut Reducer, usize)>,
    /// After which segment slots are complete, once that is known.
    pub(super) readiness: Option<Readiness>,
    /// What the last micro-batch of the rank found out.
    pub(super) learnt: Option<Readiness>,
    /// The micro-batches whose gradients come in parts, the last ones of the rank.
    pub(super) streams: BTreeMap<usize, Stream>,
    /// Micro-batches before those that were not answered.
    pub(super) whole_left: usize,
    /// Segments of the streams that were added.
    pub(super) segments: usize,
}

/// A micro-batch whose gradient comes in parts.
#[derive(Debug)]
pub(super) struct Stream {
    samples: usize,
    /// Parts that came and are not added, by segment.
    parts: VecDeque<FlatGradient>,
    /// Whether nothing else will come.
    ended: bool,
}

impl Stream {
    pub(super) fn of(samples: usize) -> Self {
        Self {
            samples,
            parts: VecDeque::new(),
            ended: false,
        }
    }
}

impl Accumulation<'_> {
    /// Takes a part of a micro-batch's gradient.
    pub(super) fn piece(&mut self, piece: Piece) -> Result<(), Error> {
        if let Some(stream) = self.streams.get_mut(&piece.micro_batch) {
            stream.parts.push_back(piece.gradient);
        }
        self.add_parts()
    }

    /// Takes what an answer holds; answers come in the order of their micro-batches.
    pub(super) fn answer(&mut self, answer: Answer, samples: usize) -> Result<(), Error> {
        let Answer {
            worker,
            micro_batch,
            result,
            start,
            duration,
        } = answer;
        self.timings.micro_batches.push(MicroBatchTiming {
            micro_batch,
            worker,
            start: start.saturating_duration_since(self.begin),
            duration,
        });
        let end = (start + duration).saturating_duration_since(self.begin);
        self.timings.compute = self.timings.compute.max(end);
        self.whole_left -= usize::from(!self.streams.contains_key(&micro_batch));
        let computed = match result {
            Ok(computed) => computed,
            Err(error) => {
                self.agreement.fail(Failure::of(error, micro_batch));
                return Ok(());
            }
        };
        self.agreement
            .set_loss(micro_batch, f64::from(computed.loss));
        match (self.streams.get_mut(&micro_batch), computed.gradient) {
            (Some(stream), rest) => {
                stream.parts.extend(rest);
                stream.ended = true;
            }
            (None, Some(gradient)) => self.add(micro_batch, samples, &gradient)?,
            (None, None) => {}
        }
        if let Some(readiness) = computed.readiness {
            self.learnt = Some(readiness);
        }
        let weight = self.weight(samples);
        let changes = self
            .buffer_change
            .iter_mut()
            .zip(&computed.buffers)
            .zip(self.buffers);
        for ((change, after), before) in changes {
            *change += weight * (after - before);
        }
        self.add_parts()
    }

    /// Adds the parts of a segment as soon as those of all streams are there and all other micro-batches are added: each slot's sum is
    /// taken in the order of the micro-batches. Buckets that are then complete start on their way.
    fn add_parts(&mut self) -> Result<(), Error> {
        if self.whole_left > 0 || self.agreement.failed() {
            return Ok(());
        }
        let there = |stream: &Stream| stream.ended || !stream.parts.is_empty();
        while self.streams.values().all(there) {
            let parts: Vec<_> = self
                .streams
                .iter_mut()
                .filter_map(|(m, stream)| Some((*m, stream.samples, stream.parts.pop_front()?)))
                .collect();
            if parts.is_empty() {
                break;
            }
            for (micro_batch, samples, part) in parts {
                self.add(micro_batch, samples, &part)?;
            }
            if let Some(readiness) = self.readiness.clone() {
                let segment = self.segments;
                self.send_while(|bucket| {
                    readiness[bucket.slots.clone()]
                        .iter()
                        .all(|ready| *ready <= segment)
                });
            }
            self.segments += 1;
        }
        Ok(())
    }

    fn weight(&self, samples: usize) -> f32 {
        samples as f32 / self.global_batch as f32
    }

    /// The accumulation pass over a micro-batch's gradient, or a part of it.
    fn add(
        &mut self,
        micro_batch: usize,
        samples: usize,
        gradient: &FlatGradient,
    ) -> Result<(), Error> {
        let started = Instant::now();
        for bucket in self.layout.buckets() {
            for slot in bucket.slots.clone() {
                let Some(slice) = gradient.slot(slot) else {
                    continue;
                };
                if !all_finite(slice) {
                    let parameter = self.layout.slots()[slot].path.clone();
                    let micro_batch_named = Some(micro_batch);
                    let error = Error::NonFiniteGradient {
                        rank: self.rank,
                        micro_batch: micro_batch_named,
                        parameter,
                    };
                    self.agreement.fail(Failure::of(error, micro_batch));
                    return Ok(());
                }
                let range = self.layout.slots()[slot].range();
                let at = MicroBatchRef {
                    micro_batch,
                    samples,
                    global_batch: self.global_batch,
                    weight: self.weight(samples),
                    bucket: bucket.index,
                    slot,
                    offset: range.start,
                };
                self.observer
                    .accumulate(&at, &mut self.gradient[range], slice)
                    .map_err(|error| observer_error(self.rank, &error))?;
            }
        }
        self.timings.accumulate += started.elapsed();
        Ok(())
    }

    /// Sends buckets to the communication thread, from the last one down: an order that all ranks share, and
    /// that in which a backward pass completes the parameters of most models.
    fn send_while(&mut self, ready: impl Fn(&GradientBucket) -> bool) {
        if let Some((reducer, left)) = &mut self.flow {
            while let Some(bucket) = left.checked_sub(1).map(|last| &self.layout.buckets()[last]) {
                if !ready(bucket) {
                    return;
                }
                reducer.submit(bucket.index, &self.gradient[bucket.range.clone()]);
                *left -= 1;
            }
        }
    }

    /// Sums what was accumulated over all ranks.
    pub(super) fn reduce(&mut self, communicator: &dyn Communicator) -> Result<(), Error> {
        self.timings.communicate_start = self.begin.elapsed();
        self.send_while(|_| true);
        let Self {
            flow,
            gradient,
            timings,
            begin,
            ..
        } = self;
        let mut done = |bucket: usize, start: Instant, duration| {
            timings.buckets.push(BucketTiming {
                bucket,
                start: start.saturating_duration_since(*begin),
                duration,
            });
        };
        if let Some((reducer, _)) = flow {
            reducer.collect(self.rank, |reduced| {
                let range = self.layout.buckets()[reduced.bucket].range.clone();
                gradient[range].copy_from_slice(&reduced.values);
                done(reduced.bucket, reduced.start, reduced.duration);
            })?;
        } else {
            for bucket in self.layout.buckets() {
                let start = Instant::now();
                communicator.all_reduce_sum(&mut gradient[bucket.range.clone()])?;
                done(bucket.index, start, start.elapsed());
            }
        }
        if !self.buffer_change.is_empty() {
            communicator.all_reduce_sum(self.buffer_change)?;
        }
        Ok(())
    }

    /// Shows the reduced gradient to the observer and lets it gather.
    pub(super) fn observe_reduced(&mut self, communicator: &dyn Communicator) -> Result<(), Error> {
        for bucket in self.layout.buckets() {
            self.observer
                .reduced(bucket, &self.gradient[bucket.range.clone()])
                .map_err(|error| observer_error(self.rank, &error))?;
        }
        self.observer
            .gather(communicator)
            .map_err(|error| observer_error(self.rank, &error))
    }

    /// Fails the step if the sum over finite micro-batches is not finite.
    pub(super) fn check_norm(&mut self, norm: f64) {
        if norm.is_finite() || self.agreement.failed() {
            return;
        }
        let slot = self
            .layout
            .slots()
            .iter()
            .find(|slot| !all_finite(&self.gradient[slot.range()]));
        let parameter = slot.map_or_else(
            || "the norm of all parameters".to_owned(),
            |slot| slot.path.clone(),
        );
        self.agreement.fail(Failure::of(
            Error::NonFiniteGradient {
                rank: self.rank,
                micro_batch: None,
                parameter,
            },
            0,
        ));
    }
}

fn observer_error(rank: usize, error: &BoxError) -> Error {
    Error::Observer {
        rank,
        message: error.to_string(),
    }
}

fn all_finite(values: &[f32]) -> bool {
    // Without a branch per element the loop vectorises.
    values
        .chunks(1024)
        .all(|chunk| chunk.iter().fold(true, |fine, x| fine & x.is_finite()))
}
