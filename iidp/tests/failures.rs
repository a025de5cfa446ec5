//! What goes wrong ends in one clear error, with nothing changed.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use common::{MlpTask, batch, one_device};
use iidp::models::Mlp;
use iidp::{
    BoxError, Error, Executor, ExecutorConfig, MicroBatch, MicroBatchObserver, MicroBatchRef,
    WorkerLayout, Workload,
};

const LEARNING_RATE: f64 = 1e-2;

/// What happens when the sample named by the trigger is met.
#[derive(Debug, Clone, Copy)]
enum Accident {
    NanLoss,
    InfiniteGradient,
    Panic,
    Refusal,
    Hang(Duration),
    Untracked,
    NotScalar,
}

struct Accidental {
    accident: Accident,
    trigger: Arc<AtomicU64>,
}

impl Workload for Accidental {
    type Model = Mlp;

    fn init(&self, device: &Device) -> Result<Mlp, BoxError> {
        MlpTask.init(device)
    }

    fn loss(
        &self,
        model: &Mlp,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let loss = MlpTask.loss(model, batch, device)?;
        if !batch.samples.contains(&self.trigger.load(Ordering::SeqCst)) {
            return Ok(loss);
        }
        match self.accident {
            Accident::NanLoss => Ok(loss.mul_scalar(f32::NAN)),
            // The loss stays finite: the square root's slope at zero is infinite.
            Accident::InfiniteGradient => Ok((loss.clone() - loss.detach()).sqrt()),
            Accident::Panic => panic!("a wheel came off"),
            Accident::Refusal => Err("no such sample".into()),
            Accident::Hang(time) => {
                std::thread::sleep(time);
                Ok(loss)
            }
            Accident::Untracked => Ok(loss.detach()),
            Accident::NotScalar => Ok(loss.repeat_dim(0, 3)),
        }
    }
}

fn uneven() -> Vec<WorkerLayout> {
    vec![
        WorkerLayout::new(2, 1, 2),
        WorkerLayout::new(2, 2, 2),
        WorkerLayout::new(2, 1, 1),
    ]
}

fn executor(
    accident: Accident,
    timeout: Duration,
    overlap_depth: usize,
) -> (Executor<Accidental>, Arc<AtomicU64>) {
    let trigger = Arc::new(AtomicU64::new(u64::MAX));
    let workload = Accidental {
        accident,
        trigger: Arc::clone(&trigger),
    };
    (
        ExecutorConfig::new(uneven())
            .with_timeout(timeout)
            .with_overlap(overlap_depth > 0)
            .with_overlap_depth(overlap_depth.max(1))
            .init(workload)
            .unwrap(),
        trigger,
    )
}

/// Micro-batch 3 is the second of rank 1. Without a communication thread, with one, and with interleaved backward passes.
fn spring(accident: Accident) -> Error {
    let errors = [0, 1, 2].map(|depth| {
        let (mut executor, trigger) = executor(accident, Duration::from_secs(20), depth);
        executor.step(&batch(0, 14), LEARNING_RATE).unwrap();
        let before = executor.state().unwrap();
        let samples = batch(1, 14);
        trigger.store(samples[7], Ordering::SeqCst);
        let error = executor.step(&samples, LEARNING_RATE).unwrap_err();
        assert_eq!(executor.state().unwrap(), before, "the step is rolled back");
        trigger.store(u64::MAX, Ordering::SeqCst);
        let output = executor.step(&samples, LEARNING_RATE).unwrap();
        assert_eq!(output.step, 1, "the executor goes on");
        assert_ne!(executor.state().unwrap(), before);
        error
    });
    assert_eq!(errors[0].to_string(), errors[1].to_string());
    assert_eq!(errors[0].to_string(), errors[2].to_string());
    let [error, ..] = errors;
    error
}

#[test]
fn a_loss_that_is_not_finite_is_rolled_back() {
    let Error::NonFiniteLoss {
        rank: 1,
        micro_batch: 3,
        loss,
    } = spring(Accident::NanLoss)
    else {
        panic!()
    };
    assert!(loss.is_nan());
}

#[test]
fn a_gradient_that_is_not_finite_is_rolled_back() {
    let error = spring(Accident::InfiniteGradient);
    assert!(
        matches!(
            error,
            Error::NonFiniteGradient {
                rank: 1,
                micro_batch: Some(3),
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_panic_is_rolled_back() {
    let error = spring(Accident::Panic);
    assert_eq!(
        error.to_string(),
        "micro-batch 3 on rank 1 panicked: a wheel came off"
    );
}

#[test]
fn a_workload_error_is_rolled_back() {
    assert_eq!(
        spring(Accident::Refusal).to_string(),
        "micro-batch 3 on rank 1: no such sample"
    );
}

#[test]
fn losses_that_cannot_be_learnt_from_are_refused() {
    assert_eq!(
        spring(Accident::Untracked),
        Error::LossNotTracked { micro_batch: 3 }
    );
    assert_eq!(
        spring(Accident::NotScalar),
        Error::LossNotScalar {
            micro_batch: 3,
            elements: 3
        }
    );
}

#[test]
fn a_rank_that_hangs_ends_in_a_timeout() {
    let (mut executor, trigger) = executor(
        Accident::Hang(Duration::from_secs(2)),
        Duration::from_secs(1),
        0,
    );
    let samples = batch(0, 14);
    trigger.store(samples[7], Ordering::SeqCst);
    let error = executor.step(&samples, LEARNING_RATE).unwrap_err();
    assert!(
        matches!(
            error,
            Error::WorkerTimeout {
                rank: 1,
                micro_batch: 3,
                ..
            }
        ),
        "{error}"
    );
    // What the sleeper answers later is nobody's: the next steps are those of an executor without an accident.
    trigger.store(u64::MAX, Ordering::SeqCst);
    let (mut expected, _) = self::executor(Accident::NanLoss, Duration::from_secs(20), 0);
    for step in 1..3 {
        let samples = batch(step, 14);
        let loss = executor.step(&samples, LEARNING_RATE).unwrap().loss;
        assert_eq!(loss, expected.step(&samples, LEARNING_RATE).unwrap().loss);
        std::thread::sleep(Duration::from_millis(1200));
    }
}

struct Faulty {
    rank: usize,
    panics: bool,
}

impl MicroBatchObserver for Faulty {
    fn accumulate(&mut self, at: &MicroBatchRef, _: &mut [f32], _: &[f32]) -> Result<(), BoxError> {
        match (self.rank, self.panics) {
            (1, true) => panic!("observer at micro-batch {}", at.micro_batch),
            (1, false) => Err("cannot measure".into()),
            _ => Ok(()),
        }
    }
}

#[test]
fn a_failing_observer_ends_the_step_on_every_rank() {
    for panics in [false, true] {
        let config = ExecutorConfig::new(uneven())
            .with_timeout(Duration::from_secs(20))
            .with_observers(move |context| {
                Box::new(Faulty {
                    rank: context.rank,
                    panics,
                })
            });
        let mut executor = config.init(MlpTask).unwrap();
        let before = executor.state().unwrap();
        for _ in 0..2 {
            let error = executor.step(&batch(0, 14), LEARNING_RATE).unwrap_err();
            let expected = if panics {
                "rank 1 panicked: observer at micro-batch 2"
            } else {
                "observer of rank 1: cannot measure"
            };
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!(executor.state().unwrap(), before);
    }
}

#[test]
fn settings_that_cannot_be_are_refused_with_what_would_work() {
    let refusal = |config: ExecutorConfig| config.init(MlpTask).unwrap_err().to_string();
    assert_eq!(
        refusal(ExecutorConfig::new(vec![])),
        "0 devices given, expected at least one worker layout"
    );
    assert_eq!(
        refusal(ExecutorConfig::new(vec![
            WorkerLayout::new(4, 1, 1),
            WorkerLayout::new(4, 1, 0)
        ])),
        "rank 1 has accumulation_steps = 0, expected at least 1"
    );
    assert!(
        refusal(ExecutorConfig::new(vec![
            WorkerLayout::new(4, 1, 1),
            WorkerLayout::new(2, 1, 1)
        ]))
        .contains("expected 4 as on rank 0")
    );
    assert!(
        refusal(ExecutorConfig::new(one_device(4, 1)).with_clip_norm(0.0))
            .starts_with("clip norm: got 0")
    );
    assert!(
        refusal(ExecutorConfig::new(one_device(4, 1)).with_timeout(Duration::ZERO))
            .starts_with("time-out")
    );
    assert!(
        refusal(ExecutorConfig::new(one_device(4, 1)).with_threads_per_worker(0))
            .starts_with("threads per worker")
    );
    assert!(
        refusal(ExecutorConfig::new(one_device(4, 1)).with_emulated_speeds(vec![1.5]))
            .contains("rank 0 has 1.5")
    );
    assert!(
        refusal(ExecutorConfig::new(one_device(4, 1)).with_devices(vec![]))
            .contains("has 0 elements, expected 1")
    );
}

#[test]
fn batches_that_do_not_fit_are_refused_with_what_would_work() {
    let mut executor = ExecutorConfig::new(uneven()).init(MlpTask).unwrap();
    assert_eq!(
        executor.step(&[], LEARNING_RATE).unwrap_err(),
        Error::EmptyBatch
    );
    assert_eq!(
        executor
            .step(&[1, 2, 3], LEARNING_RATE)
            .unwrap_err()
            .to_string(),
        "3 samples for 4 virtual workers: the layout takes 14; give more samples or fewer workers"
    );
    assert_eq!(
        executor.step(&batch(0, 15), LEARNING_RATE).unwrap_err(),
        Error::BatchMismatch {
            samples: 15,
            expected: 14,
            local_batch: 2
        }
    );
    assert!(executor.step(&batch(0, 14), f64::NAN).is_err());
    executor.step(&batch(0, 14), LEARNING_RATE).unwrap();
}
