//! Training on CUDA devices equals training on the CPU; `scripts/cuda_tests.sh` runs it where a GPU is found.
#![cfg(feature = "cuda")]

mod common;

use std::time::Duration;

use common::{CnnTask, GptTask, MlpTask, batch, compare_with_cpu, losses, run};
use iidp::communicator::{Communicator, DeviceCommunicator};
use iidp::{ExecutorConfig, WorkerLayout};

const GPT: GptTask = GptTask {
    tied: true,
    dropout: 0.1,
};

#[test]
fn two_virtual_workers_on_a_gpu_equal_the_cpu() {
    let device = iidp::devices("cuda", 1)
        .expect("a device to test on")
        .swap_remove(0);
    compare_with_cpu(&MlpTask, &device, 10);
    compare_with_cpu(&GPT, &device, 5);
    compare_with_cpu(&CnnTask, &device, 5);
}

#[test]
fn devices_that_communicate_by_themselves_train_like_those_that_go_through_the_host() {
    let Ok(devices) = iidp::devices("cuda", 2) else {
        // One GPU has nobody to communicate with.
        return;
    };
    let layouts = vec![WorkerLayout::new(2, 2, 1), WorkerLayout::new(2, 1, 3)];
    let config = || ExecutorConfig::new(layouts.clone()).with_devices(devices.clone());
    let (expected, _) = run(config(), GPT, 10, 3e-3);
    let ends = DeviceCommunicator::group(&devices, Duration::from_mins(1)).unwrap();
    let ends = ends
        .into_iter()
        .map(|end| Box::new(end) as Box<dyn Communicator>);
    let mut executor = config().init_with(GPT, ends.collect()).unwrap();
    for (step, expected) in losses(&expected).into_iter().enumerate() {
        let loss = executor.step(&batch(step, 10), 3e-3).unwrap().loss;
        assert!(
            (loss - expected).abs() <= 1e-4,
            "step {step}: {loss}, expected {expected}"
        );
    }
}

#[test]
fn more_devices_than_there_are_is_an_error_that_says_so() {
    let error = iidp::devices("cuda", 1000).unwrap_err().to_string();
    assert!(
        error.starts_with("cuda device: found ") && error.contains("expected 1000"),
        "{error}"
    );
}
