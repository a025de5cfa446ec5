//! A mesh that changes while the run goes on, and state in files that no mesh owns.

mod blocks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use blocks::{Data, SEED, Task, even, gpt, optimizer, plain_name, samples, values};
use burn::tensor::Device;
use iidp::hybrid::{BlockModel, ScheduleKind};
use iidp::models::{BlockMlp, BlockMlpConfig};
use iidp::optimizer::SgdConfig;
use iidp::{
    BoxError, Error, ExecutorConfig, HybridConfig, LocalCommunicator, ParallelDims,
    PlainAccumulation, StateDict, WorkerLayout,
};

const LEARNING_RATE: f64 = 3e-3;
const CLIP: f64 = 0.5;

fn hybrid(config: HybridConfig) -> HybridConfig {
    config
        .with_optimizer(optimizer())
        .with_clip_norm(CLIP)
        .with_seed(SEED)
}

/// Batch, virtual workers, replicas, shards, stages, cuts, schedule and the number of ranks change every three steps; one device sees only the batch change.
#[test]
fn a_run_goes_on_through_every_change() {
    let task = gpt(true);
    let layouts = |replicas: &[(usize, usize)]| -> Vec<WorkerLayout> {
        let layout = |(v, a): &(usize, usize)| WorkerLayout::new(1, *v, *a);
        replicas.iter().map(layout).collect()
    };
    let changes = [
        (ParallelDims::new(2, 2, 2), layouts(&[(1, 3), (3, 1)])),
        (ParallelDims::new(1, 1, 3), layouts(&[(1, 6)])),
        (ParallelDims::new(1, 4, 1), layouts(&[(2, 4)])),
        (
            ParallelDims::new(3, 1, 1),
            layouts(&[(1, 1), (2, 1), (1, 5)]),
        ),
        (ParallelDims::new(1, 3, 2), layouts(&[(1, 4)])),
        (ParallelDims::new(1, 1, 1), layouts(&[(1, 4)])),
        (ParallelDims::new(1, 2, 4), layouts(&[(2, 2)])),
    ];
    let mut one_device = ExecutorConfig::new(layouts(&[(1, 6)]))
        .with_optimizer(optimizer())
        .with_clip_norm(CLIP)
        .with_seed(SEED)
        .init(blocks::OneDevice(task.clone()))
        .unwrap();
    let start = even(ParallelDims::new(1, 1, 2), 1, 6);
    let mut executor = hybrid(start).init(task).unwrap();
    let mut changes = changes.into_iter();
    let mut schedules = 0;
    for step in 0..24 {
        if step > 0 && step % 3 == 0 {
            let (dims, layouts) = changes.next().unwrap();
            let before = executor.state().unwrap();
            let plan = if dims.pp == 3 {
                schedules += 1;
                let mut config = hybrid(HybridConfig::new(dims, layouts)).with_cuts(vec![1, 3]);
                config = config.with_schedule(ScheduleKind::Gpipe);
                executor.reconfigure_with(config).unwrap()
            } else {
                executor.reconfigure(dims, layouts).unwrap()
            };
            assert_eq!(plan.to().ranks().len(), dims.world_size());
            assert_eq!(executor.state().unwrap(), before, "step {step}, to the bit");
            let batch = executor.global_batch();
            one_device
                .reassign(vec![WorkerLayout::new(1, 1, batch)])
                .unwrap();
        }
        let batch = samples(step, executor.global_batch());
        let got = executor.step(&batch, LEARNING_RATE).unwrap();
        let expected = one_device.step(&batch, LEARNING_RATE).unwrap();
        assert_eq!(got.step, step as u64);
        for (got, expected) in [
            (got.loss, expected.loss),
            (got.gradient_norm, expected.gradient_norm),
        ] {
            let off = (got - expected).abs() / expected;
            assert!(
                off < 2e-5,
                "step {step}: {got} and {expected}, off by {off:e}"
            );
        }
    }
    assert_eq!(schedules, 1);
    let state = values(&executor.state().unwrap());
    let flat = one_device.parameters().unwrap();
    assert_eq!(one_device.layout().slots().len(), state.len());
    for slot in one_device.layout().slots() {
        let got = &state[&plain_name(&slot.path)];
        let expected = &flat[slot.range()];
        let size = expected.iter().fold(1e-3_f32, |size, x| size.max(x.abs()));
        for (got, expected) in got.iter().zip(expected) {
            let off = (got - expected).abs() / size;
            assert!(off < 1e-4, "{}: {got} and {expected}", slot.path);
        }
    }
}

#[test]
fn what_stays_in_place_does_not_move() {
    let mut executor = hybrid(even(ParallelDims::new(1, 2, 2), 1, 4))
        .init(gpt(false))
        .unwrap();
    let more_workers = vec![WorkerLayout::new(1, 2, 1)];
    let plan = executor
        .reconfigure(ParallelDims::new(1, 2, 2), more_workers)
        .unwrap();
    assert_eq!((plan.bytes_sent(), plan.bytes_kept()), (0, 0));
    // A second replica: everything goes over once, to the new ranks.
    let twice = vec![WorkerLayout::new(1, 1, 1); 2];
    let plan = executor
        .reconfigure(ParallelDims::new(2, 2, 2), twice)
        .unwrap();
    assert_eq!(plan.bytes_sent(), plan.from().bytes());
    assert_eq!(plan.bytes_received_by_rank()[..4], [0; 4]);
}

#[test]
fn a_file_goes_from_mesh_to_mesh() {
    let task = gpt(true);
    let mut first = hybrid(even(ParallelDims::new(2, 2, 2), 1, 4))
        .init(task.clone())
        .unwrap();
    for step in 0..3 {
        first.step(&samples(step, 4), LEARNING_RATE).unwrap();
    }
    let path = std::env::temp_dir().join(format!("iidp-mesh-{}.safetensors", std::process::id()));
    let state = first.state().unwrap();
    StateDict::from_hybrid(&state).save(&path).unwrap();
    let loaded = StateDict::load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let mut second = hybrid(even(ParallelDims::new(1, 3, 1), 1, 4))
        .init(task)
        .unwrap();
    second.restore(loaded.to_hybrid().unwrap()).unwrap();
    assert_eq!(second.state().unwrap(), state);
    assert_eq!(second.steps(), 3);
    let (a, b) = (
        first.step(&samples(3, 4), LEARNING_RATE).unwrap(),
        second.step(&samples(3, 4), LEARNING_RATE).unwrap(),
    );
    assert!((a.loss - b.loss).abs() < 1e-5 * b.loss);
    let mut torn = loaded;
    let name = torn.steps.keys().next().unwrap().clone();
    torn.moments.get_mut("moment_2").unwrap().remove(&name);
    let error = torn.to_hybrid().unwrap_err().to_string();
    assert_eq!(error, format!("tensor optimizer.moment_2.{name}: missing"));
}

/// A model whose blocks can be made only as long as it is whole.
#[derive(Debug, Clone)]
struct Brittle {
    model: BlockMlpConfig,
    broken: Arc<AtomicBool>,
}

impl BlockModel for Brittle {
    type Block = BlockMlp;

    fn blocks(&self) -> usize {
        self.model.blocks()
    }

    fn init_block(&self, index: usize, device: &Device) -> Result<BlockMlp, BoxError> {
        // One rank of the new layout fails; the others have been made.
        if index == self.blocks() - 1 && self.broken.load(Ordering::SeqCst) {
            return Err("out of memory".into());
        }
        self.model.init_block(index, device)
    }

    fn check(&self, dims: ParallelDims) -> Result<(), Error> {
        self.model.check(dims)
    }
}

#[test]
fn a_change_that_fails_leaves_the_old_layout_training() {
    let broken = Arc::new(AtomicBool::new(false));
    let brittle = Brittle {
        model: BlockMlpConfig::new(6, 12, 4, 3),
        broken: Arc::clone(&broken),
    };
    let task = Task {
        model: brittle,
        data: Data::Numbers {
            shape: vec![6],
            classes: 3,
        },
    };
    let observers = Arc::new(AtomicUsize::new(0));
    let made = Arc::clone(&observers);
    let config = hybrid(even(ParallelDims::new(1, 1, 2), 1, 4)).with_observers(move |_| {
        made.fetch_add(1, Ordering::SeqCst);
        Box::new(PlainAccumulation)
    });
    let mut executor = config.init(task.clone()).unwrap();
    let mut untouched = hybrid(even(ParallelDims::new(1, 1, 2), 1, 4))
        .init(task)
        .unwrap();
    let mut both = |executor: &mut iidp::HybridExecutor<_>, step: usize| {
        let batch = samples(step, 4);
        let expected = untouched.step(&batch, LEARNING_RATE).unwrap().loss;
        let got = executor.step(&batch, LEARNING_RATE).unwrap().loss;
        assert!(
            (got - expected).abs() < 1e-5 * expected,
            "step {step}: {got} and {expected}"
        );
    };
    both(&mut executor, 0);
    let state = executor.state().unwrap();
    let four = |dp: usize| vec![WorkerLayout::new(1, 1, 4 / dp); dp];
    let refusals = [
        executor.reconfigure(ParallelDims::new(1, 7, 1), four(1)),
        executor.reconfigure(ParallelDims::new(2, 1, 1), four(1)),
        executor.reconfigure_with(
            executor
                .settings()
                .with_optimizer(SgdConfig::new().with_momentum(0.9)),
        ),
    ]
    .map(|refused| refused.unwrap_err().to_string());
    assert!(refusals[0].contains("tp = 7"), "{}", refusals[0]);
    assert!(
        refusals[1].contains("layouts (one per replica) has 1 elements"),
        "{}",
        refusals[1]
    );
    assert!(refusals[2].contains("moments"), "{}", refusals[2]);
    broken.store(true, Ordering::SeqCst);
    let error = executor
        .reconfigure(ParallelDims::new(2, 2, 1), four(2))
        .unwrap_err();
    assert!(error.to_string().contains("out of memory"), "{error}");
    broken.store(false, Ordering::SeqCst);
    assert_eq!(executor.state().unwrap(), state);
    assert_eq!(executor.dims(), ParallelDims::new(1, 1, 2));
    both(&mut executor, 1);
    let before = observers.load(Ordering::SeqCst);
    executor
        .reconfigure(ParallelDims::new(2, 2, 1), four(2))
        .unwrap();
    assert_eq!(
        observers.load(Ordering::SeqCst) - before,
        4,
        "the new ranks are observed"
    );
    both(&mut executor, 2);
    assert_eq!(executor.steps(), 3);
}

#[test]
fn ranks_from_outside_are_not_replaced() {
    let group = LocalCommunicator::group(1, std::time::Duration::from_secs(10)).unwrap();
    let ends = group.into_iter().map(|end| Box::new(end) as _).collect();
    let config = hybrid(even(ParallelDims::new(1, 1, 1), 1, 2));
    let mut executor = config.init_with(gpt(false), ends).unwrap();
    let error = executor
        .reconfigure(ParallelDims::new(1, 1, 1), vec![WorkerLayout::new(1, 1, 3)])
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Invalid {
                what: "reconfiguration",
                ..
            }
        ),
        "{error}"
    );
    executor.step(&samples(0, 2), LEARNING_RATE).unwrap();
}
