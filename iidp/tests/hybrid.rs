//! Any mesh trains as one device does.

mod blocks;

use std::sync::{Arc, Mutex};

use blocks::{Run, Task, difference, even, gpt, mlp, modern_gpt, resnet, samples, vit};
use iidp::hybrid::{BlockModel, HybridObserverContext, ScheduleKind};
use iidp::optimizer::SgdConfig;
use iidp::{
    BoxError, Communicator, GradientBucket, HybridConfig, MicroBatchObserver, MicroBatchRef,
    ParallelDims, WorkerLayout, accumulate_weighted,
};

/// One layout against one device; the global batch has `micro_batches` micro-batches of one sample.
fn compare<M: BlockModel + Clone>(
    run: &Run,
    task: &Task<M>,
    config: HybridConfig,
    expected: &blocks::Trace,
) {
    let name = format!("{config:?}");
    let (got, _) = run.hybrid(task, config);
    let worst = difference(&got, expected);
    assert!(worst < 1e-5, "{name}: off by {worst:e}");
}

/// Sixteen layouts on up to eight ranks: all three dimensions, uneven micro-batches, virtual workers, uneven stages, every schedule, recompute, sequence parallelism,
/// with the norm clipped and the embedding tied.
#[test]
fn every_layout_trains_as_one_device() {
    let task = gpt(true);
    let run = Run {
        clip: Some(0.5),
        ..Run::new(4, 3e-3)
    };
    let expected = run.one_device(&task, 1, 6);
    assert!(
        expected.norms.iter().any(|norm| *norm > 0.5),
        "{:?}",
        expected.norms
    );
    let of = |dp, tp, pp| even(ParallelDims::new(dp, tp, pp), 1, 6);
    let uneven = |dims: ParallelDims, replicas: &[(usize, usize)]| {
        let layouts = replicas
            .iter()
            .map(|(v, a)| WorkerLayout::new(1, *v, *a))
            .collect();
        HybridConfig::new(dims, layouts)
    };
    let layouts = vec![
        of(1, 1, 1),
        of(2, 1, 1),
        of(1, 2, 1),
        of(1, 1, 4).with_schedule(ScheduleKind::Gpipe),
        of(1, 1, 2).with_schedule(ScheduleKind::Interleaved { chunks: 2 }),
        of(1, 1, 3).with_cuts(vec![1, 2]).with_recompute(true),
        of(1, 1, 3).with_schedule(ScheduleKind::ZeroBubbleH1),
        of(2, 2, 2),
        of(2, 2, 2)
            .with_schedule(ScheduleKind::Interleaved { chunks: 2 })
            .with_sequence_parallel(true),
        of(1, 3, 2).with_cuts(vec![3]),
        of(1, 4, 2).with_schedule(ScheduleKind::ZeroBubbleH1),
        of(2, 1, 4).with_recompute(true),
        uneven(ParallelDims::new(2, 1, 2), &[(1, 4), (2, 1)]),
        uneven(ParallelDims::new(3, 2, 1), &[(1, 1), (2, 1), (1, 3)]),
        uneven(ParallelDims::new(2, 2, 2), &[(2, 2), (1, 2)]).with_sequence_parallel(true),
        uneven(ParallelDims::new(1, 2, 3), &[(3, 2)]).with_schedule(ScheduleKind::Gpipe),
    ];
    for config in layouts {
        compare(&run, &task, config, &expected);
    }
}

#[test]
fn other_models_train_as_one_device() {
    let run = Run::new(5, 3e-3);
    let of = |dp, tp, pp| even(ParallelDims::new(dp, tp, pp), 2, 4);
    compare(
        &run,
        &modern_gpt(true),
        of(1, 3, 2),
        &run.one_device(&modern_gpt(true), 2, 4),
    );
    compare(
        &run,
        &resnet(),
        of(2, 2, 2),
        &run.one_device(&resnet(), 2, 4),
    );
    compare(
        &run,
        &vit(),
        of(1, 4, 2).with_sequence_parallel(true),
        &run.one_device(&vit(), 2, 4),
    );
    let sgd = Run {
        optimizer: SgdConfig::new().with_momentum(0.9).into(),
        ..Run::new(10, 1e-2)
    };
    compare(
        &sgd,
        &mlp(),
        of(2, 2, 2).with_recompute(true),
        &sgd.one_device(&mlp(), 2, 4),
    );
    compare(
        &sgd,
        &mlp(),
        of(2, 1, 3).with_schedule(ScheduleKind::ZeroBubbleH1),
        &sgd.one_device(&mlp(), 2, 4),
    );
}

/// Evaluation is the same everywhere, and a state moves between layouts.
#[test]
fn states_move_between_layouts() {
    let task = gpt(true);
    let run = Run::new(2, 3e-3);
    let (_, mut first) = run.hybrid(&task, even(ParallelDims::new(1, 2, 2), 1, 4));
    let state = first.state().unwrap();
    let parameters: usize = state.parameters.values().map(|p| p.values.len()).sum();
    assert_eq!(
        parameters,
        blocks::parameter_count(&task.model) - 24 * 24,
        "the tied embedding counts once"
    );
    let config = HybridConfig::new(
        ParallelDims::new(2, 1, 3),
        vec![WorkerLayout::new(1, 2, 1); 2],
    );
    let mut second = config.with_seed(99).init(task).unwrap();
    second.restore(state.clone()).unwrap();
    assert_eq!(second.state().unwrap(), state);
    let ids: Vec<u64> = (100..107).collect();
    let (a, b) = (
        first.evaluate(&ids).unwrap(),
        second.evaluate(&ids).unwrap(),
    );
    assert!((a - b).abs() < 1e-6 * a, "{a}, {b}");
    let batch = samples(2, 4);
    let (a, b) = (
        first.step(&batch, 1e-3).unwrap(),
        second.step(&batch, 1e-3).unwrap(),
    );
    assert!((a.loss - b.loss).abs() < 1e-6 * a.loss);
    assert_eq!(second.steps(), 3);
    assert!(b.bytes_sent() > 0 && (0.0..1.0).contains(&b.bubble()));
    let mut wrong = state;
    wrong.parameters.remove("blocks.1.attention.query.weight");
    assert!(
        second
            .restore(wrong)
            .unwrap_err()
            .to_string()
            .contains("blocks.1.attention.query.weight")
    );
}

/// Sums of squares as an observer finds them: of each micro-batch's gradient, and of the global gradient.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Squares {
    micro: f64,
    global: f64,
}

struct Meter {
    owned: Vec<bool>,
    first_replica: bool,
    slots: Vec<std::ops::Range<usize>>,
    now: Squares,
    /// Written by every rank after the exchange.
    out: Arc<Mutex<Vec<Squares>>>,
    reports: bool,
}

fn sum_of_squares(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()
}

impl MicroBatchObserver for Meter {
    fn accumulate(
        &mut self,
        at: &MicroBatchRef,
        accumulator: &mut [f32],
        gradient: &[f32],
    ) -> Result<(), BoxError> {
        accumulate_weighted(accumulator, gradient, at.weight);
        if self.owned[at.slot] {
            self.now.micro += sum_of_squares(gradient);
        }
        Ok(())
    }

    fn reduced(&mut self, bucket: &GradientBucket, gradient: &[f32]) -> Result<(), BoxError> {
        for slot in bucket
            .slots
            .clone()
            .filter(|slot| self.first_replica && self.owned[*slot])
        {
            let range = &self.slots[slot];
            self.now.global += sum_of_squares(
                &gradient[range.start - bucket.range.start..range.end - bucket.range.start],
            );
        }
        Ok(())
    }

    fn gather(&mut self, communicator: &dyn Communicator) -> Result<(), BoxError> {
        let mut sums = [self.now.micro, self.now.global];
        communicator.all_reduce_sum_f64(&mut sums)?;
        let [micro, global] = sums;
        if self.reports {
            self.out.lock().unwrap().push(Squares { micro, global });
        }
        self.now = Squares::default();
        Ok(())
    }
}

fn statistics<M: BlockModel + Clone>(task: &Task<M>, config: HybridConfig) -> Vec<Squares> {
    let out = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&out);
    let config = config.with_observers(move |context: &HybridObserverContext<'_>| {
        Box::new(Meter {
            owned: context.owned.to_vec(),
            first_replica: context.coordinates.dp == 0,
            slots: context
                .parameters
                .slots()
                .iter()
                .map(iidp::ParameterSlot::range)
                .collect(),
            now: Squares::default(),
            out: Arc::clone(&sink),
            reports: context.rank == 0,
        })
    });
    let (trace, _) = Run::new(3, 3e-3).hybrid(task, config);
    let got = out.lock().unwrap().clone();
    assert_eq!(got.len(), 3);
    for (squares, norm) in got.iter().zip(trace.norms) {
        assert!((squares.global.sqrt() - norm).abs() < 1e-9 * norm);
    }
    got
}

/// What observers gather by the owner rules equals what one device measures.
#[test]
fn gradient_statistics_equal_those_of_one_device() {
    for tied in [false, true] {
        let task = gpt(tied);
        let expected = statistics(&task, even(ParallelDims::new(1, 1, 1), 1, 4));
        for config in [
            even(ParallelDims::new(2, 2, 2), 1, 4),
            even(ParallelDims::new(1, 2, 2), 1, 4).with_sequence_parallel(true),
            even(ParallelDims::new(1, 1, 4), 1, 4).with_schedule(ScheduleKind::ZeroBubbleH1),
            even(ParallelDims::new(1, 1, 2), 1, 4)
                .with_schedule(ScheduleKind::Interleaved { chunks: 2 }),
            HybridConfig::new(
                ParallelDims::new(2, 1, 3),
                vec![WorkerLayout::new(1, 1, 1), WorkerLayout::new(1, 3, 1)],
            ),
        ] {
            let name = format!("{config:?}");
            let got = statistics(&task, config);
            for (got, expected) in got.iter().zip(&expected) {
                for (got, expected) in [(got.micro, expected.micro), (got.global, expected.global)]
                {
                    assert!(
                        (got - expected).abs() < 1e-5 * expected,
                        "{name}: {got}, expected {expected}"
                    );
                }
            }
        }
    }
}
