//! CubeCL devices: one kernel for CUDA, Vulkan, Metal and WebGPU.

use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::MeasureBackend;

/// Threads of a workgroup, and the most workgroups: enough to fill any device, few enough partial sums to read back.
const THREADS: usize = 256;
const MOST_GROUPS: usize = 1_024;

/// `x`, of which no compiler knows that it is `x`: `zero` is 0, but only when the kernel runs. Drivers may rearrange
/// floating-point sums (Mesa does), and would find that every rounding error is 0.
#[cube]
fn opaque(x: f32, zero: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(x) ^ zero)
}

/// What was rounded away in `total = a + b` for `a`, `b` of at least 0 (Dekker's fast two-sum).
#[cube]
fn rounded_away(total: f32, a: f32, b: f32, zero: u32) -> f32 {
    let large = max(a, b);
    let small = min(a, b);
    small - opaque(total - large, zero)
}

/// Thread i takes elements i, i + n, i + 2 n, ... of n threads: neighbours read neighbouring memory. The square's own
/// rounding error (by fused multiply-add) and that of the addition go into a second sum. The first thread of each workgroup
/// adds up its sums in the same way.
#[cube(launch)]
fn accumulate_and_measure(
    acc: &mut Tensor<f32>,
    grad: &Tensor<f32>,
    partials: &mut Tensor<f32>,
    weight: f32,
    zero: u32,
    #[comptime] threads: usize,
) {
    let stride = partials.shape(0) * threads;
    let mut sum = f32::new(0.0);
    let mut compensation = f32::new(0.0);
    let mut i = ABSOLUTE_POS;
    while i < grad.len() {
        let g = grad[i];
        acc[i] += weight * g;
        let square = g * g;
        let total = opaque(sum + square, zero);
        compensation += rounded_away(total, sum, square, zero) + fma(g, g, -square);
        sum = total;
        i += stride;
    }
    let mut sums = Shared::<[f32]>::new_slice(threads);
    let mut compensations = Shared::<[f32]>::new_slice(threads);
    sums[UNIT_POS as usize] = sum;
    compensations[UNIT_POS as usize] = compensation;
    sync_cube();
    if UNIT_POS == 0 {
        let mut group = f32::new(0.0);
        let mut rest = f32::new(0.0);
        for unit in 0..threads {
            let next = sums[unit];
            let total = opaque(group + next, zero);
            rest += rounded_away(total, group, next, zero) + compensations[unit];
            group = total;
        }
        partials[CUBE_POS * 2] = group;
        partials[CUBE_POS * 2 + 1] = rest;
    }
}

impl MeasureBackend for CubeBackend {
    fn accumulate_and_measure(
        acc: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        weight: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (acc, grad) = (into_contiguous(acc), into_contiguous(grad));
        let acc = if acc.can_mut() { acc } else { acc.copy() };
        let len: usize = grad.meta.shape().num_elements();
        let groups = len.div_ceil(THREADS).clamp(1, MOST_GROUPS);
        let bytes = groups * 2 * acc.dtype.size();
        let partials = CubeTensor::new_contiguous(
            acc.client.clone(),
            acc.device.clone(),
            [groups, 2].into(),
            acc.client.empty(bytes),
            acc.dtype,
        );
        accumulate_and_measure::launch(
            &partials.client,
            CubeCount::Static(groups as u32, 1, 1),
            CubeDim::new_1d(THREADS as u32),
            acc.clone().into_tensor_arg(),
            grad.into_tensor_arg(),
            partials.clone().into_tensor_arg(),
            weight,
            0,
            THREADS,
        );
        (acc, partials)
    }
}
