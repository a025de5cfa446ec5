//! The measurement on Burn tensors equals the one on slices, on every device that is there.
#![cfg(feature = "burn")]

use adaptive_batch::burn::accumulate_and_measure;
use burn::tensor::{Device, Tensor, TensorData};

fn data(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / 16_777_216.0 - 0.5) * 3.0
        })
        .collect()
}

fn equals_the_host_path(device: &Device) {
    for n in [1usize, 7, 255, 256, 257, 65_536, 65_537, 1_000_003] {
        let (before, grad) = (data(n, 1), data(n, 2));
        let mut acc = before.clone();
        let want = adaptive_batch::accumulate_scaled_and_measure(&mut acc, &grad, 0.25).unwrap();
        let tensor = |x: &[f32]| Tensor::<1>::from_data(TensorData::from(x), device);
        let (sum, norm) = accumulate_and_measure(tensor(&before), tensor(&grad), 0.25).unwrap();
        let got = norm.read().unwrap();
        assert!(
            (got / want - 1.0).abs() < 1e-6,
            "{device:?}, {n}: {got} instead of {want}"
        );
        let sum = sum.into_data().try_to_vec::<f32>().unwrap();
        for (i, (a, b)) in sum.iter().zip(&acc).enumerate() {
            // A device may fuse the product into the sum.
            assert!(
                (a - b).abs() <= 1e-6 * (1.0 + b.abs()),
                "{device:?}, {n}: element {i}: {a}, {b}"
            );
        }
    }
}

/// One element so large that a plain `f32` sum would lose every other one of its workgroup.
fn small_squares_beside_a_large_one_are_not_lost(device: &Device) {
    let mut grad = vec![1.0f32; 1_000_003];
    grad[0] = 1e4;
    let tensor = |x: &[f32]| Tensor::<1>::from_data(TensorData::from(x), device);
    let acc = tensor(&vec![0.0; grad.len()]);
    let (_, norm) = accumulate_and_measure(acc, tensor(&grad), 1.0).unwrap();
    let (got, want) = (norm.read().unwrap(), 1e8 + 1_000_002.0);
    assert!(
        (got / want - 1.0).abs() < 1e-9,
        "{device:?}: {got} instead of {want}"
    );
}

fn shared_and_strided_tensors_keep_their_values(device: &Device) {
    let x = Tensor::<1>::from_data(TensorData::from(data(600, 3).as_slice()), device);
    let acc = x.clone().reshape([20, 30]);
    let grad = x.clone().reshape([30, 20]).transpose();
    let (sum, norm) = accumulate_and_measure(acc.clone(), grad.clone(), 1.0).unwrap();
    let values = |t: Tensor<2>| t.into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(values(sum), values(acc.clone() + grad));
    assert_eq!(
        values(acc),
        data(600, 3),
        "the accumulator was shared and must not change"
    );
    let want = adaptive_batch::squared_norm(&data(600, 3));
    assert!((norm.read().unwrap() / want - 1.0).abs() < 1e-6);
}

#[test]
fn flex() {
    equals_the_host_path(&Device::flex());
    small_squares_beside_a_large_one_are_not_lost(&Device::flex());
    shared_and_strided_tensors_keep_their_values(&Device::flex());
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let device = Device::flex();
    let ones = |n: usize| Tensor::<1>::ones([n], &device);
    let message = accumulate_and_measure(ones(3), ones(4), 1.0)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("[4]") && message.contains("[3]"),
        "{message}"
    );
    let tracked = Tensor::<1>::ones([3], &device.clone().autodiff());
    let message = accumulate_and_measure(ones(3), tracked, 1.0)
        .unwrap_err()
        .to_string();
    assert!(message.contains("autodiff"), "{message}");
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn on_each(devices: &[Device]) -> usize {
    for device in devices {
        equals_the_host_path(device);
        small_squares_beside_a_large_one_are_not_lost(device);
        shared_and_strided_tensors_keep_their_values(device);
    }
    devices.len()
}

/// Needs a device: in CI a software one. `ADAPTIVE_BATCH_WITHOUT_WGPU=1` says that there is none.
#[cfg(feature = "wgpu")]
#[test]
fn wgpu() {
    let found = on_each(&Device::enumerate(burn::tensor::DeviceType::Wgpu));
    assert!(
        found > 0 || std::env::var_os("ADAPTIVE_BATCH_WITHOUT_WGPU").is_some(),
        "no wgpu device"
    );
}

/// Runs where a CUDA device is found, which a machine without one need not have.
#[cfg(feature = "cuda")]
#[test]
fn cuda() {
    on_each(&Device::enumerate(burn::tensor::DeviceType::Cuda));
}
