//! Sharded and gathered equals unsharded, for any split over data, tensor and pipeline parallelism and `ZeRO`, with
//! replicated, tied and excluded parameters, unequal micro-batches and any order.

use adaptive_batch::{
    Error, Gather, GradientMeter, MeterConfig, MicroBatch, MicroBatchStats, OwnerRule, Placement,
    Shard, SingleRank, ThreadGather, Weighting,
};
use proptest::prelude::*;

/// A model of a few parameters, each with the rule by which ranks share it, and a plan of who runs which micro-batches.
#[derive(Debug, Clone)]
struct Case {
    tensors: usize,
    stages: usize,
    /// Samples of each micro-batch, per replica.
    replicas: Vec<Vec<u64>>,
    parameters: Vec<Parameter>,
    weighting: Weighting,
    zero: bool,
    buckets: usize,
    loss_scale: f64,
    seed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Parameter {
    len: usize,
    kind: Kind,
    stage: usize,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Split,
    ReplicatedOverTensor,
    Tied,
    ReplicatedAndTied,
    Excluded,
}

fn case() -> impl Strategy<Value = Case> {
    let parameter = (1usize..40, 0usize..5, 0usize..4).prop_map(|(len, kind, stage)| Parameter {
        len,
        stage,
        kind: [
            Kind::Split,
            Kind::ReplicatedOverTensor,
            Kind::Tied,
            Kind::ReplicatedAndTied,
            Kind::Excluded,
        ][kind],
    });
    let replica = proptest::collection::vec(1u64..9, 1..4);
    (
        1usize..4,
        1usize..4,
        proptest::collection::vec(replica, 1..4),
        proptest::collection::vec(parameter, 1..7),
        0u8..4,
        any::<bool>(),
        1usize..4,
        prop_oneof![Just(1.0), Just(1024.0)],
        any::<u64>(),
    )
        .prop_filter("at least two micro-batches", |c| {
            c.2.iter().map(Vec::len).sum::<usize>() >= 2
        })
        .prop_map(
            |(
                tensors,
                stages,
                mut replicas,
                mut parameters,
                weighting,
                zero,
                buckets,
                loss_scale,
                seed,
            )| {
                for parameter in &mut parameters {
                    parameter.stage %= stages;
                }
                // Something must be counted.
                parameters.push(Parameter {
                    len: 5,
                    kind: Kind::Split,
                    stage: 0,
                });
                let batch = replicas.iter().flatten().sum();
                let weighting = match weighting {
                    0 => {
                        replicas.iter_mut().flatten().for_each(|b| *b = 4);
                        Weighting::Equal
                    }
                    1 => Weighting::Samples,
                    2 => Weighting::Fraction { batch },
                    _ => Weighting::Sum,
                };
                Case {
                    tensors,
                    stages,
                    replicas,
                    parameters,
                    weighting,
                    zero,
                    buckets,
                    loss_scale,
                    seed,
                }
            },
        )
}

/// A number in (-1, 1) that is the same for everyone who asks for the same element.
fn value(seed: u64, replica: usize, index: u64, parameter: usize, element: usize) -> f32 {
    let mut x =
        seed ^ (replica as u64) << 48 ^ index << 40 ^ (parameter as u64) << 32 ^ element as u64;
    for _ in 0..3 {
        x ^= x >> 30;
        x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 27;
    }
    0.3 + (x >> 40) as f32 / 16_777_216.0 - 0.5
}

impl Case {
    fn batch(&self) -> u64 {
        self.replicas.iter().flatten().sum()
    }

    /// Elements of a parameter that the rank holds.
    fn held(&self, p: Parameter, tensor: usize, stage: usize) -> std::ops::Range<usize> {
        let split = p.len * tensor / self.tensors..p.len * (tensor + 1) / self.tensors;
        match p.kind {
            Kind::Split if stage == p.stage => split,
            Kind::ReplicatedOverTensor | Kind::Excluded if stage == p.stage => 0..p.len,
            // Tied between its stage and the last one; split over the tensor ranks of both.
            Kind::Tied if stage == p.stage || stage == self.stages - 1 => split,
            Kind::ReplicatedAndTied if stage == p.stage || stage == self.stages - 1 => 0..p.len,
            _ => 0..0,
        }
    }

    fn rule(p: Parameter) -> OwnerRule {
        match p.kind {
            Kind::Split => OwnerRule::Partitioned,
            Kind::ReplicatedOverTensor => OwnerRule::ReplicatedOverTensor,
            Kind::Tied => OwnerRule::TiedOverStages { owner: p.stage },
            Kind::ReplicatedAndTied => OwnerRule::ReplicatedAndTied { owner: p.stage },
            Kind::Excluded => OwnerRule::Excluded,
        }
    }

    /// The elements (parameter, element) of each bucket of a rank.
    fn buckets_at(&self, tensor: usize, stage: usize) -> Vec<Vec<(usize, usize)>> {
        let mut buckets = vec![Vec::new(); self.buckets];
        for (i, p) in self.parameters.iter().enumerate() {
            buckets[i % self.buckets].extend(self.held(*p, tensor, stage).map(|e| (i, e)));
        }
        buckets
    }

    fn meter(&self, replica: usize, tensor: usize, stage: usize) -> GradientMeter {
        let shards = self
            .buckets_at(tensor, stage)
            .into_iter()
            .enumerate()
            .map(|(b, elements)| {
                let mut shard = Shard::new(format!("bucket {b}"), elements.len());
                for (i, p) in self.parameters.iter().enumerate() {
                    if let Some(start) = elements.iter().position(|e| e.0 == i) {
                        let len = elements.iter().filter(|e| e.0 == i).count();
                        shard =
                            shard.parameter(format!("p{i}"), start..start + len, Self::rule(*p));
                    }
                }
                shard
            });
        MeterConfig::new(shards)
            .placement(
                Placement::data_parallel(replica, self.replicas.len())
                    .unwrap()
                    .at(tensor, stage),
            )
            .weighting(self.weighting)
            .loss_scale(self.loss_scale)
            .build()
            .unwrap()
    }

    /// What the executor passes: the mean gradient, or the sum, times the loss scale.
    fn gradient(&self, replica: usize, index: usize, elements: &[(usize, usize)]) -> Vec<f32> {
        let b = self.replicas[replica][index] as f64;
        let factor = if self.weighting == Weighting::Sum {
            b
        } else {
            1.0
        } * self.loss_scale;
        elements
            .iter()
            .map(|&(p, e)| {
                (f64::from(value(self.seed, replica, index as u64, p, e)) * factor) as f32
            })
            .collect()
    }

    fn weight(&self, samples: u64) -> f64 {
        match self.weighting {
            Weighting::Samples => samples as f64,
            Weighting::Fraction { batch } => samples as f64 / batch as f64,
            _ => 1.0,
        }
    }

    /// The whole step on one rank.
    fn run_rank(&self, replica: usize, tensor: usize, stage: usize) -> GradientMeter {
        let mut meter = self.meter(replica, tensor, stage);
        let buckets = self.buckets_at(tensor, stage);
        // Backward order differs from the order of the shards.
        for (b, elements) in buckets.iter().enumerate().rev() {
            let mut acc = vec![0.0f32; elements.len()];
            for (index, &samples) in self.replicas[replica].iter().enumerate() {
                let grad = self.gradient(replica, index, elements);
                let micro_batch = MicroBatch {
                    index: index as u64,
                    samples,
                };
                meter.accumulate(b, micro_batch, &mut acc, &grad).unwrap();
            }
            // All-reduce over the replicas.
            let mut sum = vec![0.0f64; elements.len()];
            for (r, samples) in self.replicas.iter().enumerate() {
                for (index, &b) in samples.iter().enumerate() {
                    for (s, g) in sum.iter_mut().zip(self.gradient(r, index, elements)) {
                        *s += f64::from(g) * self.weight(b);
                    }
                }
            }
            if self.zero {
                // Reduce-scatter leaves each replica one part, here of unequal sizes.
                let n = self.replicas.len();
                let cut = |i: usize| {
                    if i == n {
                        sum.len()
                    } else {
                        sum.len() * i * i / (n * n)
                    }
                };
                let range = cut(replica)..cut(replica + 1);
                meter.summed_part(b, range.start, &sum[range]).unwrap();
            } else {
                meter.summed(b, &sum).unwrap();
            }
        }
        meter
    }

    fn ranks(&self) -> Vec<(usize, usize, usize)> {
        let mut ranks = Vec::new();
        for r in 0..self.replicas.len() {
            for t in 0..self.tensors {
                for s in 0..self.stages {
                    ranks.push((r, t, s));
                }
            }
        }
        ranks
    }

    /// |G|^2 and tr straight from the definitions, in f64, on the unsharded gradient.
    fn unsharded(&self) -> (f64, f64) {
        let batch = self.batch() as f64;
        let k = self.replicas.iter().map(Vec::len).sum::<usize>() as f64;
        let elements = self
            .parameters
            .iter()
            .enumerate()
            .filter(|(_, p)| !matches!(p.kind, Kind::Excluded));
        let (mut q, mut p_sum) = (0.0, 0.0);
        for (i, p) in elements {
            for e in 0..p.len {
                let mut mean = 0.0;
                for (r, samples) in self.replicas.iter().enumerate() {
                    for (index, &b) in samples.iter().enumerate() {
                        let g = f64::from(value(self.seed, r, index as u64, i, e));
                        q += b as f64 / batch * g * g;
                        mean += b as f64 / batch * g;
                    }
                }
                p_sum += mean * mean;
            }
        }
        ((k * p_sum - q) / (k - 1.0), batch * (q - p_sum) / (k - 1.0))
    }
}

fn close(got: f64, want: f64, scale: f64) -> bool {
    (got - want).abs() <= 1e-6 * scale
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn sharded_and_gathered_equals_unsharded(case in case(), order in any::<u64>()) {
        let mut parts: Vec<MicroBatchStats> = case
            .ranks()
            .into_iter()
            .map(|(r, t, s)| case.run_rank(r, t, s).finish().unwrap())
            .collect();
        // Any order, and any tree: merge two that a cheap generator picks until one is left.
        let mut state = order;
        while parts.len() > 1 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let a = parts.swap_remove((state >> 33) as usize % parts.len());
            let at = (state >> 13) as usize % parts.len();
            parts[at] = parts[at].merge(&a).unwrap();
        }
        let estimate = parts[0].estimate().unwrap();
        let (grad_sq, variance) = case.unsharded();
        let scale = grad_sq.abs() + variance / case.batch() as f64;
        prop_assert!(close(estimate.grad_sq_norm, grad_sq, scale), "{} {grad_sq}", estimate.grad_sq_norm);
        prop_assert!(close(estimate.variance, variance, scale * case.batch() as f64), "{} {variance}", estimate.variance);
        prop_assert_eq!(estimate.samples, case.batch());
    }

    #[test]
    fn merging_is_commutative_to_the_bit(case in case()) {
        let parts: Vec<MicroBatchStats> =
            case.ranks().into_iter().map(|(r, t, s)| case.run_rank(r, t, s).finish().unwrap()).collect();
        for a in &parts {
            for b in &parts {
                prop_assert_eq!(a.merge(b).unwrap(), b.merge(a).unwrap());
            }
        }
    }
}

#[test]
fn every_rank_gathers_the_same_and_one_refusal_refuses_all() {
    let case = Case {
        tensors: 2,
        stages: 2,
        replicas: vec![vec![3, 5], vec![4]],
        parameters: vec![
            Parameter {
                len: 30,
                kind: Kind::Split,
                stage: 0,
            },
            Parameter {
                len: 7,
                kind: Kind::ReplicatedOverTensor,
                stage: 1,
            },
        ],
        weighting: Weighting::Samples,
        zero: false,
        buckets: 2,
        loss_scale: 1.0,
        seed: 1,
    };
    let gather = |spoil: bool| -> Vec<Result<MicroBatchStats, Error>> {
        std::thread::scope(|scope| {
            let handles: Vec<_> = case
                .ranks()
                .into_iter()
                .zip(ThreadGather::group(8))
                .map(|((r, t, s), mut gather)| {
                    let case = &case;
                    scope.spawn(move || {
                        let mut meter = case.run_rank(r, t, s);
                        if spoil && (r, t, s) == (1, 1, 0) {
                            let extra = MicroBatch {
                                index: 9,
                                samples: 2,
                            };
                            meter
                                .measure(0, extra, &vec![1.0f32; meter.shards()[0].len()])
                                .unwrap();
                        }
                        meter.finish_gathered(&mut gather)
                    })
                })
                .collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        })
    };
    let all = gather(false);
    let first = *all[0].as_ref().unwrap();
    assert!(all.iter().all(|stats| *stats.as_ref().unwrap() == first));
    let (grad_sq, _) = case.unsharded();
    assert!(close(
        first.estimate().unwrap().grad_sq_norm,
        grad_sq,
        grad_sq.abs()
    ));

    let refused = gather(true);
    let missing = refused
        .iter()
        .filter(|r| matches!(r, Err(Error::MissingShard { micro_batch: 9, .. })))
        .count();
    let others = refused
        .iter()
        .filter(|r| matches!(r, Err(Error::OtherRanks { ranks: 1 })))
        .count();
    assert_eq!((missing, others), (1, 7));
}

#[test]
fn a_broken_communicator_is_reported_with_its_cause() {
    #[derive(Debug)]
    struct Broken;
    impl Gather for Broken {
        fn all_reduce_sum(&mut self, _: &mut [f64]) -> adaptive_batch::Result<()> {
            Err(Error::Gather("rank 3 left".into()))
        }
    }
    let mut meter = MeterConfig::new([Shard::new("a", 1)]).build().unwrap();
    for index in 0..2 {
        meter
            .measure(0, MicroBatch { index, samples: 1 }, &[1.0f32])
            .unwrap();
    }
    meter.summed(0, &[2.0f32]).unwrap();
    let error = meter.finish_gathered(&mut Broken).unwrap_err();
    assert_eq!(
        std::error::Error::source(&error).unwrap().to_string(),
        "rank 3 left"
    );
    // Nothing is lost: the next attempt finds the step as it was.
    assert!(meter.finish_gathered(&mut SingleRank).is_ok());
}

#[test]
fn a_part_that_no_rank_measured_is_noticed_after_the_gather() {
    let mut parts = Vec::new();
    for replica in 0..2 {
        let mut meter = MeterConfig::new([Shard::new("a", 10)])
            .placement(Placement::data_parallel(replica, 2).unwrap())
            .build()
            .unwrap();
        meter
            .measure(
                0,
                MicroBatch {
                    index: 0,
                    samples: 1,
                },
                &[1.0f32; 10],
            )
            .unwrap();
        // Both parts together leave out element 9.
        meter
            .summed_part(0, replica * 5, &vec![2.0f32; 5 - replica])
            .unwrap();
        parts.push(meter.finish().unwrap());
    }
    let error = parts[0].merge(&parts[1]).unwrap().estimate().unwrap_err();
    assert_eq!(
        error.to_string(),
        "summed gradient: 9 elements were measured over all ranks, expected 10"
    );
    let error = parts[0].estimate().unwrap_err();
    assert!(
        matches!(error, Error::Incomplete { .. }),
        "one rank alone is no whole: {error}"
    );
}
