//! Measures micro-batch gradients while they are accumulated.

mod config;
mod previous;
mod step;

use std::ops::Range;

pub use config::{MeterConfig, MicroBatch, Weighting};

use self::config::{check_adam, check_scale, check_weighting};
use self::previous::Previous;
use self::step::{Measurement, Step};
use crate::element::{AccumulatorElement, Element};
use crate::error::{Error, GradientOf, Result, require};
use crate::fused::{self, Adam};
use crate::gather::Gather;
use crate::half_split::HalfSplit;
use crate::layout::{Placement, Segment, Shard};
use crate::stats::{HalfSums, MicroBatchStats};

/// Measures the gradients of one rank over a step, while it accumulates them.
///
/// Per micro-batch and shard call [`accumulate`](Self::accumulate) (in any order); after the all-reduce (or, for one
/// replica, after the last micro-batch) call [`summed`](Self::summed) once per shard; then
/// [`finish_gathered`](Self::finish_gathered) gives the statistics of all ranks and starts the next step. The meter keeps no
/// gradient (unless [`keep_previous`](MeterConfig::keep_previous) is on), shares nothing with other meters, and needs no lock.
///
/// # Examples
/// Two replicas as threads, each with two micro-batches, over two steps:
/// ```
/// use adaptive_batch::{
///     EmaEstimator, FixedController, BatchSizeController, MeterConfig, MicroBatch, Placement, Shard,
///     ThreadGather, TrainingState,
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let estimates: Vec<f64> = std::thread::scope(|scope| {
///     let ranks: Vec<_> = ThreadGather::group(2)
///         .into_iter()
///         .enumerate()
///         .map(|(rank, mut gather)| {
///             scope.spawn(move || -> adaptive_batch::Result<f64> {
///                 let mut meter = MeterConfig::new([Shard::new("all", 2)])
///                     .placement(Placement::data_parallel(rank, 2)?)
///                     .build()?;
///                 let mut acc = [0.0f32; 2];
///                 for index in 0..2 {
///                     // The gradient is (2, 0); each micro-batch sees it with an error of its own.
///                     let noise = if index == 0 { 1.0 } else { -1.0 };
///                     let grad = if rank == 0 { [2.0 + noise, 0.0f32] } else { [2.0, noise] };
///                     meter.accumulate(0, MicroBatch { index, samples: 8 }, &mut acc, &grad)?;
///                 }
///                 // What the all-reduce of the executor leaves in `acc` on both ranks:
///                 let acc = [8.0f32, 0.0];
///                 meter.summed(0, &acc)?;
///                 let stats = meter.finish_gathered(&mut gather)?;
///                 Ok(stats.estimate()?.noise_scale)
///             })
///         })
///         .collect();
///     ranks.into_iter().map(|r| r.join().unwrap()).collect::<Result<_, _>>()
/// })?;
/// // S1 = 9 + 1 + 5 + 5, S2 = 64: |G|^2 = (64 - 20) / 12, tr = 8 (20 - 64 / 4) / 3.
/// let expected = (8.0 * 4.0 / 3.0) / (44.0 / 12.0);
/// assert!(estimates.iter().all(|e| (e - expected).abs() < 1e-12));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GradientMeter {
    config: MeterConfig,
    segments: Vec<Vec<Segment>>,
    /// Counted elements of all shards.
    counted: u64,
    step: Step,
    previous: Option<Previous>,
}

/// The part of a shard of `len` elements whose sum the rank measures when all replicas hold the whole sum.
fn share(len: usize, placement: Placement) -> Range<usize> {
    let cut = |i: usize| (len as u128 * i as u128 / placement.replicas() as u128) as usize;
    cut(placement.replica())..cut(placement.replica() + 1)
}

impl GradientMeter {
    fn new(
        config: MeterConfig,
        segments: Vec<Vec<Segment>>,
        counted: u64,
        previous: Option<Previous>,
    ) -> Self {
        let step = Step::new(config.shards.len());
        Self {
            config,
            segments,
            counted,
            step,
            previous,
        }
    }

    /// The shards of this rank.
    pub fn shards(&self) -> &[Shard] {
        &self.config.shards
    }

    /// Elements that this rank counts.
    pub const fn counted_elements(&self) -> u64 {
        self.counted
    }

    /// Adds the gradient of one micro-batch into the accumulator of a shard, weighted as [`Weighting`] says, and measures
    /// it in the same pass. O(n) in the length of the shard, without locks.
    ///
    /// # Errors
    /// - [`Error::UnknownShard`], [`Error::Length`], [`Error::RepeatedShard`], [`Error::SampleCount`], [`Error::Option`]
    ///   (a meter with [`adam`](MeterConfig::adam) needs the second moments): nothing is added.
    /// - [`Error::NonFinite`]: the meter is unchanged. The accumulator holds what plain addition gives, or is
    ///   unchanged too with [`guard`](MeterConfig::guard).
    pub fn accumulate<A: AccumulatorElement, G: Element>(
        &mut self,
        shard: usize,
        micro_batch: MicroBatch,
        acc: &mut [A],
        grad: &[G],
    ) -> Result<()> {
        self.no_adam("accumulate")?;
        self.accumulate_with(shard, micro_batch, acc, grad, |_, acc, grad, factor| {
            #[expect(clippy::float_cmp, reason = "exactly 1 is the plain addition")]
            if factor == 1.0 {
                fused::accumulate_and_measure(acc, grad)
            } else {
                fused::accumulate_scaled_and_measure(acc, grad, factor)
            }
        })
    }

    /// Measures the gradient of one micro-batch without accumulating it: for executors whose accumulation is out of reach.
    ///
    /// # Errors
    /// As [`accumulate`](Self::accumulate); the meter is unchanged then.
    pub fn measure<G: Element>(
        &mut self,
        shard: usize,
        micro_batch: MicroBatch,
        grad: &[G],
    ) -> Result<()> {
        self.no_adam("measure")?;
        self.check_gradient(shard, micro_batch, grad.len())?;
        let mut norm_sq = 0.0;
        for segment in self.segments[shard].iter().filter(|s| s.counted) {
            norm_sq += fused::squared_norm(&grad[segment.range.clone()]);
        }
        self.record(shard, micro_batch, norm_sq, norm_sq, grad)
    }

    /// [`accumulate`](Self::accumulate) for a meter with [`adam`](MeterConfig::adam): measures the gradient divided by
    /// `sqrt(v / correction) + eps` and accumulates it as it is.
    ///
    /// # Errors
    /// As [`accumulate`](Self::accumulate), [`Error::Option`] without that option, and [`Error::Length`] for
    /// second moments of another length; [`Error::Parameter`] for a second moment that nothing can be divided by (NaN, negative,
    /// or 0 with an eps of 0), which does to the meter and the accumulator what [`Error::NonFinite`] does.
    pub fn accumulate_preconditioned<A: AccumulatorElement, G: Element>(
        &mut self,
        shard: usize,
        micro_batch: MicroBatch,
        acc: &mut [A],
        grad: &[G],
        second_moment: &[f32],
    ) -> Result<()> {
        let adam = self.adam("accumulate_preconditioned")?;
        self.check_shard(shard)?;
        self.check_len(shard, "second moment", second_moment.len())?;
        if self.config.guard {
            self.check_second_moment(shard, 0, second_moment, adam)?;
        }
        self.accumulate_with(shard, micro_batch, acc, grad, |range, acc, grad, factor| {
            let v = &second_moment[range];
            Ok(fused::accumulate_preconditioned(acc, grad, v, adam, factor))
        })
        .map_err(|error| match error {
            Error::Overflow { .. } => self
                .check_second_moment(shard, 0, second_moment, adam)
                .err()
                .unwrap_or(error),
            _ => error,
        })
    }

    /// Adds and measures a gradient segment by segment: `pass` gets the segment's range in the shard, its part of the
    /// accumulator and of the gradient, and the weight, and returns the squared norm.
    fn accumulate_with<A: AccumulatorElement, G: Element>(
        &mut self,
        shard: usize,
        micro_batch: MicroBatch,
        acc: &mut [A],
        grad: &[G],
        pass: impl Fn(Range<usize>, &mut [A], &[G], f64) -> Result<f64>,
    ) -> Result<()> {
        self.check_gradient(shard, micro_batch, grad.len())?;
        self.check_len(shard, "accumulator", acc.len())?;
        if self.config.guard {
            self.check_finite(shard, GradientOf::MicroBatch(micro_batch.index), grad)?;
        }
        let factor = self.config.weighting.factor(micro_batch.samples);
        let (mut norm_sq, mut others) = (0.0, 0.0);
        for segment in &self.segments[shard] {
            let range = segment.range.clone();
            let (acc, grad) = (&mut acc[range.clone()], &grad[range.clone()]);
            let part = pass(range, acc, grad, factor)?;
            if segment.counted {
                norm_sq += part;
            } else {
                others += part;
            }
        }
        self.record(shard, micro_batch, norm_sq, norm_sq + others, grad)
    }

    /// Measures the sum of a shard over all micro-batches and replicas, for ranks that all hold the whole sum (after an
    /// all-reduce, or with one replica): each replica measures its own part of it, so that it is counted, and read, once.
    ///
    /// # Errors
    /// [`Error::UnknownShard`], [`Error::Length`], [`Error::RepeatedSum`], [`Error::NonFinite`], [`Error::Option`]; the
    /// meter is unchanged then.
    pub fn summed<G: Element>(&mut self, shard: usize, sum: &[G]) -> Result<()> {
        self.no_adam("summed")?;
        self.check_shard(shard)?;
        self.check_len(shard, "summed gradient", sum.len())?;
        let range = share(sum.len(), self.config.placement);
        let part = &sum[range.clone()];
        self.sum_part(shard, range, part, None, true)
    }

    /// Measures a part of the sum of a shard that no other rank measures: what `ZeRO`'s reduce-scatter leaves on this rank.
    /// `offset` is the position of the part's first element in the shard.
    ///
    /// # Errors
    /// As [`summed`](Self::summed), and [`Error::OutOfShard`]. That all parts together cover the shard once is checked when
    /// the gathered statistics are used.
    pub fn summed_part<G: Element>(
        &mut self,
        shard: usize,
        offset: usize,
        part: &[G],
    ) -> Result<()> {
        self.no_adam("summed_part")?;
        let range = self.part_range(shard, offset, part.len())?;
        self.sum_part(shard, range, part, None, false)
    }

    /// [`summed`](Self::summed) for a meter with [`adam`](MeterConfig::adam).
    ///
    /// # Errors
    /// As [`summed`](Self::summed), [`Error::Length`] for second moments of another length, and [`Error::Parameter`] for one that
    /// nothing can be divided by.
    pub fn summed_preconditioned<G: Element>(
        &mut self,
        shard: usize,
        sum: &[G],
        second_moment: &[f32],
    ) -> Result<()> {
        self.adam("summed_preconditioned")?;
        self.check_shard(shard)?;
        self.check_len(shard, "summed gradient", sum.len())?;
        self.check_len(shard, "second moment", second_moment.len())?;
        let range = share(sum.len(), self.config.placement);
        let (part, v) = (&sum[range.clone()], &second_moment[range.clone()]);
        self.sum_part(shard, range, part, Some(v), true)
    }

    /// [`summed_part`](Self::summed_part) for a meter with [`adam`](MeterConfig::adam): `ZeRO` keeps the second
    /// moments of exactly the part that it reduces onto the rank.
    ///
    /// # Errors
    /// As [`summed_part`](Self::summed_part), and those of [`summed_preconditioned`](Self::summed_preconditioned).
    pub fn summed_part_preconditioned<G: Element>(
        &mut self,
        shard: usize,
        offset: usize,
        part: &[G],
        second_moment: &[f32],
    ) -> Result<()> {
        self.adam("summed_part_preconditioned")?;
        let range = self.part_range(shard, offset, part.len())?;
        fused::check_len("second moment", part.len(), second_moment.len())?;
        self.sum_part(shard, range, part, Some(second_moment), false)
    }

    /// Measures the halves of a shard's batch and joins them: `first`, then `halves`' buffer, both already summed over all
    /// replicas. `first` ends as the sum of both, and its sum is measured too, so [`summed`](Self::summed) must not be called
    /// for the shard.
    ///
    /// # Errors
    /// As [`summed`](Self::summed), and [`Error::Length`] for halves of other shards; nothing changes then.
    pub fn summed_halves(
        &mut self,
        shard: usize,
        first: &mut [f32],
        halves: &HalfSplit,
    ) -> Result<()> {
        self.no_adam("summed_halves")?;
        self.check_shard(shard)?;
        let second = halves.second(shard)?;
        self.check_len(shard, "first half", first.len())?;
        self.check_len(shard, "second half", second.len())?;
        self.check_new_sum(shard, &(0..first.len()))?;
        let mine = share(first.len(), self.config.placement);
        let mut sums = HalfSums::default();
        for segment in &self.segments[shard] {
            let range = intersection(&segment.range, &mine);
            if segment.counted && !range.is_empty() {
                sums.first_sq += fused::squared_norm(&first[range.clone()]);
                sums.dot += fused::dot(&first[range.clone()], &second[range.clone()])?;
                sums.second_sq += fused::squared_norm(&second[range.clone()]);
                sums.elements += range.len() as u64;
            }
        }
        if !(sums.first_sq + sums.second_sq).is_finite() {
            self.check_finite(shard, GradientOf::Sum, first)?;
            self.check_finite(shard, GradientOf::Sum, second)?;
        }
        // Halves as large as this may have a sum that `f32` does not hold.
        if sums.first_sq.sqrt() + sums.second_sq.sqrt() > f64::from(f32::MAX) / 2.0 {
            let joined: Vec<f32> = first.iter().zip(second).map(|(a, b)| a + b).collect();
            self.check_finite(shard, GradientOf::Sum, &joined)?;
        }
        fused::accumulate(first, second, 1.0)?;
        let part = &first[mine.clone()];
        self.sum_part(shard, mine, part, None, true)?;
        self.step.sums[shard].halves = sums;
        Ok(())
    }

    /// Ends the step and returns *this rank's* statistics, to be merged with those of the other ranks; the next step begins.
    ///
    /// # Errors
    /// [`Error::NoMicroBatch`], [`Error::MissingShard`], [`Error::MissingSum`], [`Error::BatchTotal`],
    /// [`Error::Weights`], [`Error::Overflow`]; the meter is unchanged then: bring what is missing, or
    /// [`reset`](Self::reset).
    pub fn finish(&mut self) -> Result<MicroBatchStats> {
        let stats = self.own_stats()?;
        self.next_step(&stats);
        Ok(stats)
    }

    /// Ends the step on all ranks and returns the statistics of them all, the same on each; the next step begins.
    ///
    /// If any rank has to refuse its part, every rank gets an error (that rank its own, the others
    /// [`Error::OtherRanks`]) and no meter changes, so none waits for another and none decides alone.
    ///
    /// # Errors
    /// As [`finish`](Self::finish), [`Error::OtherRanks`], and what the communicator returns.
    pub fn finish_gathered(&mut self, gather: &mut impl Gather) -> Result<MicroBatchStats> {
        let (own, all) = MicroBatchStats::gather_all(self.own_stats(), gather)?;
        if let Weighting::Fraction { batch } = self.config.weighting
            && all.samples != batch
        {
            return Err(Error::BatchTotal {
                expected: batch,
                got: all.samples,
            });
        }
        self.next_step(&own);
        Ok(all)
    }

    /// Forgets what was measured in this step: a step that was refused, or whose update is skipped.
    pub fn reset(&mut self) {
        if let Some(previous) = &mut self.previous
            && self.step.sums.iter().any(|sum| !sum.parts.is_empty())
        {
            // Some of what was kept has been replaced by the gradient of the step that is given up.
            previous.valid = false;
        }
        self.step = Step::new(self.config.shards.len());
    }

    /// Sets the weighting of the next step, as the batch size changes.
    ///
    /// # Errors
    /// [`Error::MidStep`] after the first micro-batch of a step, [`Error::Parameter`] for a batch of 0.
    pub fn set_weighting(&mut self, weighting: Weighting) -> Result<()> {
        self.between_steps("weighting")?;
        check_weighting(weighting)?;
        self.config.weighting = weighting;
        Ok(())
    }

    /// Sets the loss scale of the next step.
    ///
    /// The previous gradient, where one is kept, was stored with the old scale already taken out.
    ///
    /// # Errors
    /// [`Error::MidStep`] after the first micro-batch of a step, [`Error::Parameter`] unless positive and finite.
    pub fn set_loss_scale(&mut self, scale: f64) -> Result<()> {
        self.between_steps("loss scale")?;
        check_scale(scale)?;
        self.config.loss_scale = scale;
        Ok(())
    }

    /// Sets Adam's bias correction 1 - beta2^t for the next step.
    ///
    /// # Errors
    /// [`Error::MidStep`] after the first micro-batch of a step, [`Error::Option`] without
    /// [`adam`](MeterConfig::adam), [`Error::Parameter`] outside (0, 1].
    pub fn set_adam_correction(&mut self, correction: f64) -> Result<()> {
        self.between_steps("Adam's bias correction")?;
        let adam = Adam {
            correction,
            ..self.adam("set_adam_correction")?
        };
        check_adam(adam)?;
        self.config.adam = Some(adam);
        Ok(())
    }

    fn own_stats(&self) -> Result<MicroBatchStats> {
        self.step
            .stats(&self.config, self.counted, self.previous.as_ref())
    }

    fn next_step(&mut self, own: &MicroBatchStats) {
        if let Some(previous) = &mut self.previous {
            previous.next_step(own.samples, own.weight);
        }
        self.step = Step::new(self.config.shards.len());
    }

    /// Writes down the norm of one shard of one micro-batch; `all_sq` includes what other ranks count.
    fn record<G: Element>(
        &mut self,
        shard: usize,
        micro_batch: MicroBatch,
        norm_sq: f64,
        all_sq: f64,
        grad: &[G],
    ) -> Result<()> {
        if !all_sq.is_finite() {
            self.check_finite(shard, GradientOf::MicroBatch(micro_batch.index), grad)?;
            // Finite f64 gradients (or preconditioned ones) whose squares leave the range.
            return Err(Error::Overflow {
                what: "squared norm of a gradient",
            });
        }
        let shards = self.config.shards.len();
        let measurement = self
            .step
            .micro_batches
            .entry(micro_batch.index)
            .or_insert_with(|| Measurement {
                samples: micro_batch.samples,
                norms: vec![None; shards],
            });
        measurement.norms[shard] = Some(norm_sq);
        Ok(())
    }

    fn sum_part<G: Element>(
        &mut self,
        shard: usize,
        range: Range<usize>,
        part: &[G],
        second_moment: Option<&[f32]>,
        whole: bool,
    ) -> Result<()> {
        self.check_new_sum(shard, &range)?;
        let counted: Vec<Range<usize>> = self.segments[shard]
            .iter()
            .filter(|segment| segment.counted)
            .map(|segment| intersection(&segment.range, &range))
            .filter(|counted| !counted.is_empty())
            .map(|counted| counted.start - range.start..counted.end - range.start)
            .collect();
        let mut norm_sq = 0.0;
        for counted in &counted {
            norm_sq += match (second_moment, self.config.adam) {
                (Some(v), Some(adam)) => {
                    fused::preconditioned_norm(&part[counted.clone()], &v[counted.clone()], adam)
                }
                _ => fused::squared_norm(&part[counted.clone()]),
            };
        }
        if !norm_sq.is_finite() {
            self.check_finite_at(shard, GradientOf::Sum, range.start, part)?;
            if let (Some(v), Some(adam)) = (second_moment, self.config.adam) {
                self.check_second_moment(shard, range.start, v, adam)?;
            }
            return Err(Error::Overflow {
                what: "squared norm of the summed gradient",
            });
        }
        let sum = &mut self.step.sums[shard];
        if let Some(previous) = &mut self.previous {
            let scale = self.config.loss_scale;
            let (norm_sq, dot) = previous.exchange(shard, &range, part, &counted, scale);
            sum.previous_norm_sq += norm_sq;
            sum.previous_dot += dot;
        }
        sum.elements += counted.iter().map(|c| c.len() as u64).sum::<u64>();
        sum.whole = whole;
        let position = sum
            .parts
            .partition_point(|(other, _)| other.start < range.start);
        sum.parts.insert(position, (range, norm_sq));
        Ok(())
    }

    fn check_shard(&self, shard: usize) -> Result<()> {
        let shards = self.config.shards.len();
        if shard < shards {
            Ok(())
        } else {
            Err(Error::UnknownShard { shard, shards })
        }
    }

    fn check_len(&self, shard: usize, what: &str, got: usize) -> Result<()> {
        let shard = &self.config.shards[shard];
        fused::check_len(
            &format!("{what} of shard `{}`", shard.name()),
            shard.len(),
            got,
        )
    }

    fn check_gradient(&self, shard: usize, micro_batch: MicroBatch, len: usize) -> Result<()> {
        self.check_shard(shard)?;
        let name = || self.config.shards[shard].name().to_owned();
        if len != self.config.shards[shard].len() {
            let what = format!("micro-batch {} of shard `{}`", micro_batch.index, name());
            return Err(Error::Length {
                what,
                expected: self.config.shards[shard].len(),
                got: len,
            });
        }
        require(
            micro_batch.samples > 0,
            "samples of a micro-batch",
            "at least 1",
            0,
        )?;
        let Some(before) = self.step.micro_batches.get(&micro_batch.index) else {
            return self.check_size(micro_batch);
        };
        if before.samples != micro_batch.samples {
            return Err(Error::SampleCount {
                shard: name(),
                micro_batch: micro_batch.index,
                expected: before.samples,
                got: micro_batch.samples,
            });
        }
        if before.norms[shard].is_some() {
            return Err(Error::RepeatedShard {
                shard: name(),
                micro_batch: micro_batch.index,
            });
        }
        Ok(())
    }

    /// Equal weights are only right for micro-batches of one size.
    fn check_size(&self, micro_batch: MicroBatch) -> Result<()> {
        if self.config.weighting == Weighting::Equal
            && let Some((index, other)) = self.step.micro_batches.first_key_value()
            && other.samples != micro_batch.samples
        {
            return Err(Error::Weights {
                detail: format!(
                    "micro-batch {index} has {} samples, micro-batch {} has {}",
                    other.samples, micro_batch.index, micro_batch.samples
                ),
            });
        }
        Ok(())
    }

    fn check_new_sum(&self, shard: usize, range: &Range<usize>) -> Result<()> {
        let sum = &self.step.sums[shard];
        let again = sum
            .parts
            .iter()
            .find(|(other, _)| other == range || !intersection(other, range).is_empty());
        match again {
            Some((other, _)) => Err(Error::RepeatedSum {
                shard: self.config.shards[shard].name().to_owned(),
                range: other.start.max(range.start)..other.end.min(range.end),
            }),
            None => Ok(()),
        }
    }

    fn part_range(&self, shard: usize, offset: usize, len: usize) -> Result<Range<usize>> {
        self.check_shard(shard)?;
        let shard = &self.config.shards[shard];
        match offset.checked_add(len) {
            Some(end) if end <= shard.len() => Ok(offset..end),
            end => Err(Error::OutOfShard {
                shard: shard.name().to_owned(),
                range: offset..end.unwrap_or(usize::MAX),
                len: shard.len(),
            }),
        }
    }

    fn check_finite<G: Element>(&self, shard: usize, of: GradientOf, grad: &[G]) -> Result<()> {
        self.check_finite_at(shard, of, 0, grad)
    }

    /// Names the first element that is not finite; `part` starts at element `offset` of the shard.
    fn check_finite_at<G: Element>(
        &self,
        shard: usize,
        micro_batch: GradientOf,
        offset: usize,
        part: &[G],
    ) -> Result<()> {
        let Some(position) = part.iter().position(|g| !g.to_f64().is_finite()) else {
            return Ok(());
        };
        let element = offset + position;
        let shard = &self.config.shards[shard];
        let (parameter, range) = shard.parameter_at(element);
        Err(Error::NonFinite {
            shard: shard.name().to_owned(),
            micro_batch,
            parameter: parameter.to_owned(),
            range,
            element,
            value: part[position].to_f64(),
        })
    }

    /// Names the first second moment whose root nothing can be divided by; `part` starts at element `offset` of the shard.
    fn check_second_moment(
        &self,
        shard: usize,
        offset: usize,
        part: &[f32],
        adam: Adam,
    ) -> Result<()> {
        let usable = |v: f32| v >= 0.0 && (v > 0.0 || adam.eps > 0.0);
        match part.iter().position(|v| !usable(*v)) {
            Some(position) => Err(Error::Parameter {
                name: "second moment",
                expected: "at least 0, and above 0 with an eps of 0",
                got: format!(
                    "{} at element {} of shard `{}`",
                    part[position],
                    offset + position,
                    self.config.shards[shard].name()
                ),
            }),
            None => Ok(()),
        }
    }

    fn no_adam(&self, call: &'static str) -> Result<()> {
        match self.config.adam {
            None => Ok(()),
            Some(_) => Err(Error::Option {
                call,
                needs: "a meter without `adam`; call its preconditioned form",
            }),
        }
    }

    fn adam(&self, call: &'static str) -> Result<Adam> {
        let needs = "a meter configured with `adam`";
        self.config.adam.ok_or(Error::Option { call, needs })
    }

    fn between_steps(&self, what: &'static str) -> Result<()> {
        match self.step.micro_batches.len() {
            0 => Ok(()),
            micro_batches => Err(Error::MidStep {
                what,
                micro_batches,
            }),
        }
    }
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}
