//! The same training under every layout: losses and parameters against one device over 50 steps.
//!
//! On one rank the order of every sum is fixed, so layouts of one rank agree bit for bit. Over several ranks the sum over
//! micro-batches is associated differently; the tolerances below are what that difference grows to in 50 steps.

mod common;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdamWConfig as BurnAdamW, GradientsParams};
use burn::tensor::{Device, Tensor};
use common::{CnnTask, GptTask, MlpTask, batch, losses, max_difference, one_device, run};
use iidp::optimizer::{AdamWConfig, LambConfig, OptimizerConfig, SgdConfig};
use iidp::{ExecutorConfig, MicroBatch, Mode, WorkerLayout, Workload};

const STEPS: usize = 50;
const LEARNING_RATE: f64 = 3e-3;
/// Loss in nats, relative to losses of about 1.
const LOSS_TOLERANCE: f64 = 2e-5;
/// Absolute, on weights of about 0.1 that have moved by up to 0.15.
const PARAMETER_TOLERANCE: f32 = 2e-4;

/// 2, 3 and 5 uneven ranks that compute the same six or seven micro-batches.
fn uneven(local_batch: usize) -> Vec<Vec<WorkerLayout>> {
    let layout = |v, a| WorkerLayout::new(local_batch, v, a);
    vec![
        vec![layout(2, 2), layout(1, 3)],
        vec![layout(1, 1), layout(2, 2), layout(1, 2)],
        vec![
            layout(1, 1),
            layout(1, 2),
            layout(2, 1),
            layout(1, 1),
            layout(1, 1),
        ],
    ]
}

fn compare<W: Workload + Clone>(workload: &W, local_batch: usize) {
    let (reference, mut executor) = run(
        ExecutorConfig::new(one_device(local_batch, 7)),
        workload.clone(),
        STEPS,
        LEARNING_RATE,
    );
    let expected = executor.state().unwrap();
    let reference = losses(&reference);
    assert!(
        reference[STEPS - 1] < reference[0] - 0.02,
        "nothing was learnt: {} to {}",
        reference[0],
        reference[STEPS - 1]
    );
    for layouts in uneven(local_batch) {
        let (outputs, mut executor) = run(
            ExecutorConfig::new(layouts.clone()),
            workload.clone(),
            STEPS,
            LEARNING_RATE,
        );
        for (step, (got, expected)) in losses(&outputs).iter().zip(&reference).enumerate() {
            let difference = (got - expected).abs();
            assert!(
                difference <= LOSS_TOLERANCE,
                "step {step}, {layouts:?}: loss {got}, expected {expected}"
            );
        }
        let state = executor.state().unwrap();
        let difference = max_difference(&state.parameters, &expected.parameters);
        assert!(
            difference <= PARAMETER_TOLERANCE,
            "{layouts:?}: parameters differ by {difference}"
        );
        let difference = max_difference(&state.buffers, &expected.buffers);
        assert!(
            difference <= PARAMETER_TOLERANCE,
            "{layouts:?}: buffers differ by {difference}"
        );
    }
}

#[test]
fn uneven_ranks_train_an_mlp_like_one_device() {
    compare(&MlpTask, 4);
}

#[test]
fn uneven_ranks_train_a_cnn_with_batch_norm_like_one_device() {
    compare(&CnnTask, 4);
}

#[test]
fn uneven_ranks_train_a_gpt_like_one_device() {
    compare(
        &GptTask {
            tied: false,
            dropout: 0.0,
        },
        2,
    );
}

#[test]
fn dropout_and_tied_weights_do_not_depend_on_the_layout() {
    compare(
        &GptTask {
            tied: true,
            dropout: 0.1,
        },
        2,
    );
}

#[test]
fn overlapping_communication_changes_no_bit() {
    for tied in [false, true] {
        let workload = GptTask { tied, dropout: 0.1 };
        let layouts = uneven(2).swap_remove(0);
        let once = |depth: Option<usize>| {
            let mut config = ExecutorConfig::new(layouts.clone())
                .with_bucket_bytes(2048)
                .with_overlap(depth.is_some());
            if let Some(depth) = depth {
                config = config.with_overlap_depth(depth);
            }
            let (outputs, mut executor) = run(config, workload.clone(), 10, LEARNING_RATE);
            assert!(executor.layout().buckets().len() > 5);
            (losses(&outputs), executor.state().unwrap())
        };
        let expected = once(None);
        // A depth of 5 is more micro-batches than any worker has.
        for depth in [1, 2, 5] {
            assert_eq!(once(Some(depth)), expected, "depth {depth}");
        }
    }
}

#[test]
fn layouts_of_one_rank_agree_bit_for_bit() {
    let workload = GptTask {
        tied: false,
        dropout: 0.1,
    };
    let (reference, mut executor) = run(
        ExecutorConfig::new(one_device(2, 6)).with_clip_norm(0.5),
        workload.clone(),
        10,
        LEARNING_RATE,
    );
    let expected = executor.state().unwrap();
    for (workers, steps) in [(2, 3), (3, 2), (6, 1)] {
        let config =
            ExecutorConfig::new(vec![WorkerLayout::new(2, workers, steps)]).with_clip_norm(0.5);
        let (outputs, mut executor) = run(config, workload.clone(), 10, LEARNING_RATE);
        assert_eq!(losses(&outputs), losses(&reference), "{workers} workers");
        assert_eq!(executor.state().unwrap(), expected, "{workers} workers");
    }
}

#[test]
fn runs_are_reproducible() {
    let layouts = uneven(4).swap_remove(1);
    let once = || {
        let (outputs, mut executor) = run(
            ExecutorConfig::new(layouts.clone()),
            CnnTask,
            8,
            LEARNING_RATE,
        );
        (losses(&outputs), executor.state().unwrap())
    };
    assert_eq!(once(), once());
}

/// All trainable parameters of a module, in the order of its visit.
fn parameters<M: Module>(module: &M) -> Vec<f32> {
    struct Collect(Vec<f32>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val();
            if value.is_require_grad() {
                self.0.extend(value.into_data().iter::<f32>());
            }
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

/// The plain Burn loop with Burn's own `AdamW`: the mean over the global batch, whose samples go through the model `together` at a time.
fn plain_burn_loop<W: Workload>(
    workload: &W,
    size: usize,
    together: usize,
    steps: usize,
) -> (Vec<f64>, Vec<f32>) {
    let device = Device::flex().autodiff();
    let mut model = workload.init(&device).unwrap();
    let mut optimizer = BurnAdamW::new().init();
    let mut losses = Vec::new();
    for step in 0..steps {
        let samples = batch(step, size);
        let loss = samples
            .chunks(together)
            .map(|samples| {
                let mut micro_batch = MicroBatch::new(samples, Mode::Train);
                micro_batch.step = step as u64;
                let loss = workload.loss(&model, &micro_batch, &device).unwrap();
                loss.mul_scalar(samples.len() as f64 / size as f64)
            })
            .reduce(|sum, loss| sum + loss)
            .unwrap();
        losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    (losses, parameters(&model))
}

fn compare_with_burn<W: Workload + Clone>(workload: &W, together: usize) {
    let layouts = vec![WorkerLayout::new(3, 2, 1), WorkerLayout::new(3, 1, 3)];
    let (outputs, mut executor) = run(
        ExecutorConfig::new(layouts),
        workload.clone(),
        STEPS,
        LEARNING_RATE,
    );
    let (expected, weights) = plain_burn_loop(workload, 15, together, STEPS);
    for (step, (got, expected)) in losses(&outputs).iter().zip(&expected).enumerate() {
        assert!(
            (got - expected).abs() <= LOSS_TOLERANCE,
            "step {step}: loss {got}, Burn's {expected}"
        );
    }
    let difference = max_difference(&executor.parameters().unwrap(), &weights);
    assert!(
        difference <= PARAMETER_TOLERANCE,
        "parameters differ from Burn's by {difference}"
    );
}

#[test]
fn the_executor_trains_like_a_plain_burn_loop() {
    compare_with_burn(&MlpTask, 15);
    compare_with_burn(
        &GptTask {
            tied: false,
            dropout: 0.0,
        },
        15,
    );
}

#[test]
fn batch_norm_is_that_of_the_same_micro_batches_in_a_plain_burn_loop() {
    compare_with_burn(&CnnTask, 3);
}

fn sharded_config(optimizer: OptimizerConfig, sharded: bool) -> ExecutorConfig {
    ExecutorConfig::new(uneven(2).swap_remove(1))
        .with_optimizer(optimizer)
        .with_clip_norm(0.5)
        .with_sharded_optimizer(sharded)
}

fn compare_sharded<W: Workload + Clone>(workload: &W, optimizer: OptimizerConfig, tolerance: f32) {
    let (expected, mut whole) = run(
        sharded_config(optimizer, false),
        workload.clone(),
        20,
        LEARNING_RATE,
    );
    let (got, mut sharded) = run(
        sharded_config(optimizer, true),
        workload.clone(),
        20,
        LEARNING_RATE,
    );
    assert!(expected.iter().any(|output| output.clipped));
    let (expected_state, state) = (whole.state().unwrap(), sharded.state().unwrap());
    if tolerance == 0.0 {
        assert_eq!(losses(&got), losses(&expected));
        assert_eq!(state, expected_state);
    }
    let difference = max_difference(&state.parameters, &expected_state.parameters);
    assert!(difference <= tolerance, "parameters differ by {difference}");
}

#[test]
fn sharded_optimizers_train_like_whole_ones() {
    let gpt = GptTask {
        tied: true,
        dropout: 0.1,
    };
    compare_sharded(&gpt, AdamWConfig::new().into(), 0.0);
    compare_sharded(&CnnTask, SgdConfig::new().with_momentum(0.9).into(), 0.0);
    // LAMB's norms are added in another order.
    compare_sharded(&gpt, LambConfig::new().into(), 1e-6);
}

#[test]
fn the_state_moves_between_layouts_and_forms() {
    let gpt = GptTask {
        tied: false,
        dropout: 0.0,
    };
    let adamw = || AdamWConfig::new().into();
    let (_, mut sharded) = run(sharded_config(adamw(), true), gpt.clone(), 3, LEARNING_RATE);
    let state = sharded.state().unwrap();
    // Another number of ranks, so other shares, in the middle of the run; and a whole optimizer from the same state.
    sharded.reassign(uneven(2).swap_remove(0)).unwrap();
    let mut whole = sharded_config(adamw(), false).init(gpt).unwrap();
    whole.reassign(uneven(2).swap_remove(0)).unwrap();
    whole.restore(state).unwrap();
    for step in 3..8 {
        let samples = batch(step, 14);
        let expected = whole.step(&samples, LEARNING_RATE).unwrap().loss;
        assert_eq!(
            sharded.step(&samples, LEARNING_RATE).unwrap().loss,
            expected
        );
    }
    assert_eq!(sharded.state().unwrap(), whole.state().unwrap());
}
