//! Training on wgpu devices equals training on the CPU. Where no GPU is, Mesa's software Vulkan device serves
//! (`mesa-vulkan-drivers`, with `XDG_RUNTIME_DIR` set); without any device the tests say so and fail.
#![cfg(feature = "wgpu")]

mod common;

use common::{CnnTask, GptTask, MlpTask, compare_with_cpu};

#[test]
fn two_virtual_workers_on_a_gpu_equal_the_cpu() {
    let device = iidp::devices("wgpu", 1)
        .expect("a device to test on")
        .swap_remove(0);
    compare_with_cpu(&MlpTask, &device, 10);
    compare_with_cpu(
        &GptTask {
            tied: true,
            dropout: 0.1,
        },
        &device,
        5,
    );
    compare_with_cpu(&CnnTask, &device, 5);
}

#[test]
fn more_devices_than_there_are_is_an_error_that_says_so() {
    let error = iidp::devices("wgpu", 1000).unwrap_err().to_string();
    assert!(
        error.starts_with("wgpu device: found ") && error.contains("expected 1000"),
        "{error}"
    );
}
