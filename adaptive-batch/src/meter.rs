//! Measures micro-batch gradients while they are accumulated.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::element::{AccumulatorElement, Element};
use crate::error::{Error, GradientOf, Result, require};
use crate::fused::{self, Adam};
use crate::gather::Gather;
use crate::half_split::HalfSplit;
use crate::layout::{Placement, Segment, Shard};
use crate::stats::{HalfSums, MicroBatchStats, PreviousSums};

/// One micro-batch: its index within this replica's step and its number of samples.
///
/// Indices only have to differ from each other within a step on one replica; all ranks of a replica use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MicroBatch {
    /// Index within the step.
    pub index: u64,
    /// Samples b_k.
    pub samples: u64,
}

/// What the gradients passed to the meter are and with which weight they are accumulated; with g_k the *mean* gradient
/// over the b_k samples of micro-batch k and B the samples of the whole batch over all replicas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Weighting {
    /// Passed: g_k. Accumulator: `acc += g_k`, so it ends as `sum_k g_k`; divide the all-reduced sum by K. Only right
    /// if all micro-batches of all replicas have the same size, which is checked.
    #[default]
    Equal,
    /// Passed: g_k. Accumulator: `acc += b_k g_k`, so it ends as `sum_k b_k g_k`; divide the all-reduced sum by B.
    Samples,
    /// Passed: g_k. Accumulator: `acc += (b_k / B) g_k`, with this B: the all-reduced sum is the mean gradient.
    Fraction {
        /// Samples B of the whole batch, over all replicas.
        batch: u64,
    },
    /// Passed: the sum over the samples, b_k g_k. Accumulator: `acc += b_k g_k` as it is; divide the all-reduced sum by B.
    Sum,
}

impl Weighting {
    /// Factor on the gradient that is passed.
    fn factor(self, samples: u64) -> f64 {
        match self {
            Self::Equal | Self::Sum => 1.0,
            Self::Samples => samples as f64,
            // As f32, which is what multiplies the gradient.
            Self::Fraction { batch } => f64::from((samples as f64 / batch as f64) as f32),
        }
    }

    /// Factor on the mean gradient that ends up in the accumulator.
    fn weight(self, samples: u64) -> f64 {
        match self {
            Self::Sum => samples as f64,
            _ => self.factor(samples),
        }
    }
}

/// Options of a [`GradientMeter`].
///
/// # Examples
/// ```
/// use adaptive_batch::{MeterConfig, Placement, Shard, Weighting};
/// let meter = MeterConfig::new([Shard::new("bucket 0", 1_000), Shard::new("bucket 1", 24)])
///     .placement(Placement::data_parallel(1, 4)?)
///     .weighting(Weighting::Fraction { batch: 256 })
///     .build()?;
/// assert_eq!(meter.shards().len(), 2);
/// # Ok::<(), adaptive_batch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MeterConfig {
    shards: Vec<Shard>,
    placement: Placement,
    weighting: Weighting,
    loss_scale: f64,
    guard: bool,
    keep_previous: bool,
    adam: Option<Adam>,
}

impl MeterConfig {
    /// A meter for one rank that holds these shards, whole and alone until [`placement`](Self::placement) says otherwise.
    pub fn new(shards: impl IntoIterator<Item = Shard>) -> Self {
        Self {
            shards: shards.into_iter().collect(),
            placement: Placement::single(),
            weighting: Weighting::default(),
            loss_scale: 1.0,
            guard: false,
            keep_previous: false,
            adam: None,
        }
    }

    /// Where the rank stands.
    #[must_use]
    pub const fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// What the gradients are and how they are accumulated; [`Weighting::Equal`] by default.
    #[must_use]
    pub const fn weighting(mut self, weighting: Weighting) -> Self {
        self.weighting = weighting;
        self
    }

    /// The factor on the loss that the gradients still carry (mixed precision); the statistics are divided by its square.
    #[must_use]
    pub const fn loss_scale(mut self, scale: f64) -> Self {
        self.loss_scale = scale;
        self
    }

    /// Looks at each gradient *before* it is added, so that a NaN or infinite one leaves the accumulator as it was.
    ///
    /// Off by default: the accumulator then receives such values as it would by plain accumulation, the meter refuses
    /// the gradient all the same, and the step is lost to the accumulator (as with every loss scaler). On, the gradient is read
    /// twice, which about halves the speed of accumulation.
    #[must_use]
    pub const fn guard(mut self, guard: bool) -> Self {
        self.guard = guard;
        self
    }

    /// Keeps this rank's share of the summed gradient until the next step, for batches that consist of one micro-batch.
    ///
    /// A batch of K = 1 tells nothing about the noise. With the previous step's gradient at hand the two steps are taken
    /// for two micro-batches, and the estimate is flagged. Costs one `f32` per counted element divided by the replicas.
    #[must_use]
    pub const fn keep_previous(mut self, keep: bool) -> Self {
        self.keep_previous = keep;
        self
    }

    /// Measures p = g / (sqrt(v / correction) + eps) instead of g, v being Adam's second moment and `correction` its
    /// bias correction 1 - beta2^t: the noise that the optimizer sees. What is accumulated stays g.
    #[must_use]
    pub const fn adam(mut self, eps: f64, correction: f64) -> Self {
        self.adam = Some(Adam { eps, correction });
        self
    }

    /// Builds the meter.
    ///
    /// # Errors
    /// [`Error::Parameter`] or [`Error::OutOfShard`] for parameter ranges that overlap or leave their shard, a loss
    /// scale that is not positive, a batch of 0 samples, or Adam's eps below 0 or correction outside (0, 1].
    pub fn build(self) -> Result<GradientMeter> {
        check_scale(self.loss_scale)?;
        check_weighting(self.weighting)?;
        if let Some(adam) = self.adam {
            check_adam(adam)?;
        }
        require(!self.shards.is_empty(), "shards", "at least one", "none")?;
        let segments = self
            .shards
            .iter()
            .map(|shard| shard.segments(self.placement))
            .collect::<Result<Vec<_>>>()?;
        let mut counted = 0u64;
        for segment in segments.iter().flatten().filter(|s| s.counted) {
            counted = counted
                .checked_add(segment.range.len() as u64)
                .ok_or(Error::Overflow {
                    what: "number of parameters",
                })?;
        }
        if self.keep_previous && self.adam.is_some() {
            return Err(Error::Option {
                call: "keep_previous",
                needs: "a meter without `adam`, whose measure changes from step to step",
            });
        }
        let previous = self.keep_previous.then(|| Previous::new(self.shards.len()));
        let shards = self.shards.len();
        Ok(GradientMeter {
            config: self,
            segments,
            counted,
            step: Step::new(shards),
            previous,
        })
    }
}

fn check_scale(scale: f64) -> Result<()> {
    require(
        scale > 0.0 && scale.is_finite(),
        "loss scale",
        "positive and finite",
        scale,
    )
}

fn check_weighting(weighting: Weighting) -> Result<()> {
    match weighting {
        Weighting::Fraction { batch } => require(
            batch > 0,
            "batch of the weighting",
            "at least one sample",
            batch,
        ),
        _ => Ok(()),
    }
}

fn check_adam(adam: Adam) -> Result<()> {
    require(
        adam.eps >= 0.0 && adam.eps.is_finite(),
        "Adam's eps",
        "at least 0",
        adam.eps,
    )?;
    require(
        adam.correction > 0.0 && adam.correction <= 1.0,
        "Adam's bias correction",
        "in (0, 1]",
        adam.correction,
    )
}

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

/// What one step has measured so far.
#[derive(Debug)]
struct Step {
    micro_batches: BTreeMap<u64, Measurement>,
    sums: Vec<ShardSum>,
}

impl Step {
    fn new(shards: usize) -> Self {
        Self {
            micro_batches: BTreeMap::new(),
            sums: vec![ShardSum::default(); shards],
        }
    }
}

#[derive(Debug)]
struct Measurement {
    samples: u64,
    /// |g|^2 of each shard as it was passed. Kept apart until the end and added in the order of the shards, so that the
    /// result does not depend on the order in which they came.
    norms: Vec<Option<f64>>,
}

#[derive(Debug, Clone, Default)]
struct ShardSum {
    /// Parts of the shard that were measured, with their squared norms, in the order of their start.
    parts: Vec<(Range<usize>, f64)>,
    elements: u64,
    /// Whether the whole shard was passed, of which this rank took its share.
    whole: bool,
    halves: HalfSums,
    previous_norm_sq: f64,
    previous_dot: f64,
}

/// The part of a shard of `len` elements whose sum the rank measures when all replicas hold the whole sum.
fn share(len: usize, placement: Placement) -> Range<usize> {
    let cut = |i: usize| (len as u128 * i as u128 / placement.replicas() as u128) as usize;
    cut(placement.replica())..cut(placement.replica() + 1)
}

impl GradientMeter {
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
        self.check_gradient(shard, micro_batch, grad.len())?;
        self.check_len(shard, "accumulator", acc.len())?;
        if self.config.guard {
            self.check_finite(shard, GradientOf::MicroBatch(micro_batch.index), grad)?;
        }
        let factor = self.config.weighting.factor(micro_batch.samples);
        let mut norm_sq = 0.0;
        let mut others = 0.0;
        for segment in &self.segments[shard] {
            let (acc, grad) = (
                &mut acc[segment.range.clone()],
                &grad[segment.range.clone()],
            );
            #[expect(clippy::float_cmp, reason = "exactly 1 is the plain addition")]
            let part = if factor == 1.0 {
                fused::accumulate_and_measure(acc, grad)?
            } else {
                fused::accumulate_scaled_and_measure(acc, grad, factor)?
            };
            if segment.counted {
                norm_sq += part;
            } else {
                others += part;
            }
        }
        self.record(shard, micro_batch, norm_sq, norm_sq + others, grad)
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
    /// second moments of another length.
    pub fn accumulate_preconditioned<A: AccumulatorElement, G: Element>(
        &mut self,
        shard: usize,
        micro_batch: MicroBatch,
        acc: &mut [A],
        grad: &[G],
        second_moment: &[f32],
    ) -> Result<()> {
        let adam = self.adam("accumulate_preconditioned")?;
        self.check_gradient(shard, micro_batch, grad.len())?;
        self.check_len(shard, "accumulator", acc.len())?;
        self.check_len(shard, "second moment", second_moment.len())?;
        if self.config.guard {
            self.check_finite(shard, GradientOf::MicroBatch(micro_batch.index), grad)?;
        }
        let factor = self.config.weighting.factor(micro_batch.samples);
        let mut norm_sq = 0.0;
        let mut others = 0.0;
        for segment in &self.segments[shard] {
            let range = segment.range.clone();
            let part = fused::accumulate_preconditioned(
                &mut acc[range.clone()],
                &grad[range.clone()],
                &second_moment[range],
                adam,
                factor,
            );
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
    /// As [`summed`](Self::summed), and [`Error::Length`] for second moments of another length.
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
    /// As [`summed_part`](Self::summed_part), and [`Error::Length`] for second moments of another length.
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
        if self.step.micro_batches.is_empty() {
            return Err(Error::NoMicroBatch);
        }
        let mut samples = 0u64;
        let (mut s1, mut weight, mut weight_sq_per_sample) = (0.0, 0.0, 0.0);
        for (&index, measurement) in &self.step.micro_batches {
            let mut norm_sq = 0.0;
            for (norm, shard) in measurement.norms.iter().zip(&self.config.shards) {
                norm_sq += norm.ok_or_else(|| Error::MissingShard {
                    shard: shard.name().to_owned(),
                    micro_batch: index,
                })?;
            }
            let b = measurement.samples as f64;
            // Norms are of what was passed: the mean gradient, or b times it.
            s1 += if self.config.weighting == Weighting::Sum {
                norm_sq / b
            } else {
                norm_sq * b
            };
            let w = self.config.weighting.weight(measurement.samples);
            weight += w;
            weight_sq_per_sample += w * w / b;
            samples = samples
                .checked_add(measurement.samples)
                .ok_or(Error::Overflow {
                    what: "number of samples",
                })?;
        }
        if let Weighting::Fraction { batch } = self.config.weighting
            && (samples > batch || (self.config.placement.replicas() == 1 && samples < batch))
        {
            return Err(Error::BatchTotal {
                expected: batch,
                got: samples,
            });
        }
        let sums = &self.step.sums;
        if sums.iter().any(|sum| sum.whole) {
            for (sum, shard) in sums.iter().zip(&self.config.shards) {
                if !sum.whole && sum.parts.is_empty() && !shard.is_empty() {
                    return Err(Error::MissingSum {
                        shard: shard.name().to_owned(),
                    });
                }
            }
        }
        let micro_batches = self.step.micro_batches.len() as u64;
        let measured = self
            .counted
            .checked_mul(micro_batches)
            .ok_or(Error::Overflow {
                what: "number of measured elements",
            })?;
        let scale_sq = self.config.loss_scale * self.config.loss_scale;
        let leads = self.config.placement.leads_replica();
        let if_leads = |x: f64| if leads { x } else { 0.0 };
        let count_if_leads = |x: u64| if leads { x } else { 0 };
        let summed = sums.iter().map(|s| s.elements).sum();
        Ok(MicroBatchStats {
            micro_batches: count_if_leads(micro_batches),
            samples: count_if_leads(samples),
            replicas: count_if_leads(1),
            parameters: self.counted,
            measured,
            summed,
            weight: if_leads(weight),
            weight_sq_per_sample: if_leads(weight_sq_per_sample),
            s1: s1 / scale_sq,
            s2: sums
                .iter()
                .flat_map(|s| &s.parts)
                .map(|(_, norm_sq)| norm_sq)
                .sum::<f64>()
                / scale_sq,
            halves: HalfSums {
                elements: sums.iter().map(|s| s.halves.elements).sum(),
                first_sq: sums.iter().map(|s| s.halves.first_sq).sum::<f64>() / scale_sq,
                second_sq: sums.iter().map(|s| s.halves.second_sq).sum::<f64>() / scale_sq,
                dot: sums.iter().map(|s| s.halves.dot).sum::<f64>() / scale_sq,
            },
            previous: match &self.previous {
                Some(previous) if previous.valid => PreviousSums {
                    elements: summed,
                    samples: count_if_leads(previous.samples),
                    weight: if_leads(previous.weight),
                    norm_sq: sums.iter().map(|s| s.previous_norm_sq).sum(),
                    dot: sums.iter().map(|s| s.previous_dot).sum(),
                },
                _ => PreviousSums::default(),
            },
        })
    }

    fn next_step(&mut self, own: &MicroBatchStats) {
        if let Some(previous) = &mut self.previous {
            previous.samples = own.samples;
            previous.weight = own.weight;
            previous.valid = true;
            for kept in &mut previous.shards {
                kept.retain(|k| k.fresh);
                for k in kept {
                    k.fresh = false;
                }
            }
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

/// This rank's part of the summed gradient of the step before, for batches of one micro-batch.
#[derive(Debug)]
struct Previous {
    shards: Vec<Vec<Kept>>,
    samples: u64,
    weight: f64,
    /// Whether what is kept is one step's gradient, whole.
    valid: bool,
}

#[derive(Debug)]
struct Kept {
    range: Range<usize>,
    /// Loss scale taken out.
    gradient: Vec<f32>,
    /// Written in the current step.
    fresh: bool,
}

impl Previous {
    fn new(shards: usize) -> Self {
        Self {
            shards: (0..shards).map(|_| Vec::new()).collect(),
            samples: 0,
            weight: 0.0,
            valid: false,
        }
    }

    /// Puts `part` in the place of what was kept of the step before; returns that one's squared norm and the dot product
    /// of both over the `counted` runs (zero where nothing was kept).
    fn exchange<G: Element>(
        &mut self,
        shard: usize,
        range: &Range<usize>,
        part: &[G],
        counted: &[Range<usize>],
        loss_scale: f64,
    ) -> (f64, f64) {
        let kept = &mut self.shards[shard];
        let (mut norm_sq, mut dot) = (0.0, 0.0);
        let place = if let Some(i) = kept.iter().position(|k| k.range == *range) {
            for run in counted {
                for (old, new) in kept[i].gradient[run.clone()].iter().zip(&part[run.clone()]) {
                    norm_sq += f64::from(*old) * f64::from(*old);
                    dot += f64::from(*old) * new.to_f64() / loss_scale;
                }
            }
            &mut kept[i]
        } else {
            // The layout of the parts changed, or this is the first step.
            self.valid = false;
            kept.push(Kept {
                range: range.clone(),
                gradient: vec![0.0; part.len()],
                fresh: false,
            });
            let last = kept.len() - 1;
            &mut kept[last]
        };
        for (old, new) in place.gradient.iter_mut().zip(part) {
            *old = (new.to_f64() / loss_scale) as f32;
        }
        place.fresh = true;
        (norm_sq, dot)
    }
}
