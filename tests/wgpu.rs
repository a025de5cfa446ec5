//! A `wgpu` device - a GPU, or Mesa's software Vulkan device - computes what the CPU computes, and the trainer runs on it.
#![cfg(feature = "wgpu")]

use hpmd::iidp::{Executor, ExecutorConfig, ExecutorState, WorkerLayout};
use hpmd::{Backend, CharCorpus, CharGptConfig, CharGptTask, Task, Trainer};

fn task() -> CharGptTask {
    let verse = "neither a borrower nor a lender be; for loan oft loses both itself and friend. ";
    let corpus = CharCorpus::from_text(&verse.repeat(12), 12, 6, 0.2).unwrap();
    let shape = CharGptConfig {
        layers: 1,
        width: 16,
        heads: 2,
        dropout: 0.0,
    };
    CharGptTask::new(corpus, shape)
}

/// Two ranks, the first with two virtual workers, all on one device.
fn executor(backend: Backend) -> Executor<CharGptTask> {
    let device = backend.devices().unwrap().swap_remove(0);
    ExecutorConfig::new(vec![WorkerLayout::new(4, 2, 1), WorkerLayout::new(4, 1, 1)])
        .with_devices(vec![device.clone(), device])
        .init(task())
        .unwrap()
}

/// Losses of a few steps from the given state, and the parameters after them.
fn train(mut executor: Executor<CharGptTask>, from: ExecutorState) -> (Vec<f64>, Vec<f32>) {
    executor.restore(from).unwrap();
    let keys = executor.workload().training_samples().to_vec();
    let losses = keys
        .chunks_exact(12)
        .take(6)
        .map(|batch| executor.step(batch, 1e-3).unwrap().loss)
        .collect();
    (losses, executor.parameters().unwrap())
}

#[test]
fn virtual_workers_on_wgpu_equal_the_cpu() {
    let mut cpu = executor(Backend::Flex);
    let start = cpu.state().unwrap();
    let (losses, parameters) = train(cpu, start.clone());
    let (losses_gpu, parameters_gpu) = train(executor(Backend::Wgpu), start);
    for (a, b) in losses.iter().zip(&losses_gpu) {
        assert!(
            (a - b).abs() < 1e-4,
            "{losses:?} on the CPU, {losses_gpu:?} on wgpu"
        );
    }
    let furthest = parameters
        .iter()
        .zip(&parameters_gpu)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    // AdamW moves a parameter by up to the learning rate per step whatever the gradient's size, so one whose gradient is
    // rounding noise may take another turn: six steps of 1e-3.
    assert!(furthest < 6e-3, "furthest parameter is {furthest} away");
}

#[test]
fn the_trainer_runs_on_wgpu() {
    let device = Backend::Wgpu.devices().unwrap().swap_remove(0);
    let report = Trainer::builder(task())
        .device_speeds(vec![1.0, 0.5])
        .device(device)
        .local_batch(4)
        .initial_batch(12)
        .samples(96)
        .learning_rate(5e-3)
        .build()
        .unwrap()
        .run()
        .unwrap();
    assert!(report.validation_loss().unwrap() < report.steps[0].loss);
    assert!(report.steps.last().unwrap().similarity.is_some());
}
