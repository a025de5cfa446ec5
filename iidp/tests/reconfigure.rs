//! Layouts that change while the run goes on, partial batches, evaluation, state.

mod common;

use common::{CnnTask, GptTask, MlpTask, batch, max_difference, one_device, run};
use iidp::{Error, ExecutorConfig, WorkerLayout};

const LEARNING_RATE: f64 = 3e-3;

#[test]
fn training_goes_on_through_changes_of_layout() {
    let layout = |v, a| WorkerLayout::new(2, v, a);
    let plans = [
        vec![layout(1, 6)],
        vec![layout(3, 2)],
        vec![layout(1, 4), layout(2, 1)],
        vec![layout(1, 1), layout(1, 2), layout(1, 3)],
        vec![layout(2, 3)],
    ];
    let workload = GptTask {
        tied: false,
        dropout: 0.1,
    };
    let (_, mut fixed) = run(
        ExecutorConfig::new(one_device(2, 6)),
        workload.clone(),
        0,
        LEARNING_RATE,
    );
    let (_, mut moving) = run(
        ExecutorConfig::new(one_device(2, 6)),
        workload,
        0,
        LEARNING_RATE,
    );
    for step in 0..20 {
        if step % 4 == 3 {
            moving
                .reassign(plans[step / 4 % plans.len()].clone())
                .unwrap();
        }
        let samples = batch(step, 12);
        let (expected, got) = (
            fixed.step(&samples, LEARNING_RATE).unwrap(),
            moving.step(&samples, LEARNING_RATE).unwrap(),
        );
        assert_eq!(got.step, step as u64);
        assert!(
            (expected.loss - got.loss).abs() < 2e-5,
            "step {step}: {} and {}",
            expected.loss,
            got.loss
        );
    }
    let difference = max_difference(&fixed.parameters().unwrap(), &moving.parameters().unwrap());
    assert!(difference < 2e-4, "parameters differ by {difference}");
}

#[test]
fn the_global_batch_can_change() {
    let (_, mut executor) = run(
        ExecutorConfig::new(one_device(4, 2)),
        MlpTask,
        1,
        LEARNING_RATE,
    );
    executor
        .reassign(vec![WorkerLayout::new(4, 1, 3), WorkerLayout::new(4, 2, 1)])
        .unwrap();
    assert_eq!(executor.global_batch(), 20);
    assert_eq!(
        executor.step(&batch(1, 20), LEARNING_RATE).unwrap().samples,
        20
    );
    let refused = executor
        .reassign(vec![WorkerLayout::new(4, 0, 3)])
        .unwrap_err();
    assert_eq!(
        refused,
        Error::ZeroInLayout {
            rank: 0,
            field: "virtual_workers"
        }
    );
    assert_eq!(
        executor.global_batch(),
        20,
        "a refused change changes nothing"
    );
    executor.step(&batch(2, 20), LEARNING_RATE).unwrap();
}

#[test]
fn state_moves_to_another_executor() {
    let (_, mut first) = run(
        ExecutorConfig::new(vec![WorkerLayout::new(4, 2, 2)]),
        CnnTask,
        5,
        LEARNING_RATE,
    );
    let state = first.state().unwrap();
    let (_, mut second) = run(
        ExecutorConfig::new(one_device(4, 4)),
        CnnTask,
        0,
        LEARNING_RATE,
    );
    second.restore(state.clone()).unwrap();
    assert_eq!(second.steps(), 5);
    for step in 5..8 {
        let samples = batch(step, 16);
        let (a, b) = (
            first.step(&samples, LEARNING_RATE).unwrap(),
            second.step(&samples, LEARNING_RATE).unwrap(),
        );
        assert_eq!(a.loss, b.loss);
    }
    assert_eq!(first.state().unwrap(), second.state().unwrap());
    let mut short = state;
    short.parameters.pop();
    assert!(matches!(
        second.restore(short),
        Err(Error::LengthMismatch { .. })
    ));
}

#[test]
fn evaluation_is_the_mean_over_the_samples_under_any_layout() {
    let samples: Vec<u64> = (0..37).collect();
    let evaluate = |layouts: Vec<WorkerLayout>| {
        let (_, mut executor) = run(ExecutorConfig::new(layouts), CnnTask, 0, LEARNING_RATE);
        executor.evaluate(&samples).unwrap()
    };
    let expected = evaluate(one_device(1, 1));
    for layouts in [
        vec![WorkerLayout::new(4, 2, 1)],
        vec![WorkerLayout::new(5, 1, 1), WorkerLayout::new(5, 1, 2)],
    ] {
        let got = evaluate(layouts);
        assert!((got - expected).abs() < 1e-6, "{got} and {expected}");
    }
    let (_, mut executor) = run(
        ExecutorConfig::new(one_device(4, 1)),
        CnnTask,
        0,
        LEARNING_RATE,
    );
    assert_eq!(executor.evaluate(&[]).unwrap_err(), Error::EmptyBatch);
}

#[test]
fn a_partial_batch_is_the_mean_over_its_samples() {
    let samples = batch(0, 11);
    let step = |layouts: Vec<WorkerLayout>| {
        let config = ExecutorConfig::new(layouts).with_partial_batches(true);
        let mut executor = config.init(MlpTask).unwrap();
        let output = executor.step(&samples, LEARNING_RATE).unwrap();
        (output.loss, executor.parameters().unwrap())
    };
    let whole = step(one_device(11, 1));
    // Three micro-batches of 4, 4 and 3 samples, and ranks without any.
    let parts = step(vec![
        WorkerLayout::new(4, 1, 2),
        WorkerLayout::new(4, 2, 1),
        WorkerLayout::new(4, 1, 3),
    ]);
    assert!((whole.0 - parts.0).abs() < 1e-6);
    assert!(max_difference(&whole.1, &parts.1) < 1e-5);
}
