//! Training on wgpu devices equals training on the CPU. Where no GPU is, Mesa's software Vulkan device serves
//! (`mesa-vulkan-drivers`, with `XDG_RUNTIME_DIR` set); without any device the tests say so and fail.
#![cfg(feature = "wgpu")]

mod common;

use burn::tensor::Device;
use common::{CnnTask, GptTask, MlpTask, losses, max_difference, run};
use iidp::{ExecutorConfig, WorkerLayout, Workload};

fn compare<W: Workload + Clone>(workload: &W, device: &Device, steps: usize) {
    let layouts = vec![WorkerLayout::new(2, 2, 2)];
    let on_cpu = ExecutorConfig::new(layouts.clone());
    let on_gpu = ExecutorConfig::new(layouts).with_devices(vec![device.clone()]);
    let (expected, mut cpu) = run(on_cpu, workload.clone(), 0, 3e-3);
    assert!(expected.is_empty());
    // The devices draw different initial weights: both start from the CPU's.
    let (_, mut gpu) = run(on_gpu, workload.clone(), 0, 3e-3);
    gpu.restore(cpu.state().unwrap()).unwrap();
    let (mut on_cpu, mut on_gpu) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let samples = common::batch(step, 8);
        on_cpu.push(cpu.step(&samples, 3e-3).unwrap());
        on_gpu.push(gpu.step(&samples, 3e-3).unwrap());
    }
    for (step, (got, expected)) in losses(&on_gpu).iter().zip(losses(&on_cpu)).enumerate() {
        assert!(
            (got - expected).abs() <= 1e-4,
            "step {step}: loss {got}, on the CPU {expected}"
        );
    }
    let difference = max_difference(&gpu.parameters().unwrap(), &cpu.parameters().unwrap());
    assert!(difference <= 1e-4, "parameters differ by {difference}");
}

#[test]
fn two_virtual_workers_on_a_gpu_equal_the_cpu() {
    let device = iidp::devices("wgpu", 1)
        .expect("a device to test on")
        .swap_remove(0);
    compare(&MlpTask, &device, 10);
    compare(
        &GptTask {
            tied: true,
            dropout: 0.1,
        },
        &device,
        5,
    );
    compare(&CnnTask, &device, 5);
}

#[test]
fn more_devices_than_there_are_is_an_error_that_says_so() {
    let error = iidp::devices("wgpu", 1000).unwrap_err().to_string();
    assert!(
        error.starts_with("wgpu device: found ") && error.contains("expected 1000"),
        "{error}"
    );
}
