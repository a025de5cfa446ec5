//! Time of the kernels of one layer for one micro-batch.
//!
//! A matrix product of m x k by k x n takes its operations at the efficiency that large products reach, plus the time for its
//! operands at memory bandwidth: the sum, not the maximum, because tiles at the edge and the first loads do not overlap; it
//! gives the fall of efficiency with small or thin shapes that measurements show. Element-wise work counts its traffic. Kernels are
//! queued: a pass takes as long as its work, or as the host needs to launch its kernels, whichever is longer.

use crate::cluster::GpuType;
use crate::cost::constants::Constants;
use crate::model::{Head, Layer, Split, Transformer};
use crate::training::{Precision, Recompute};

/// What of a device counts: rates in FLOP/s and bytes/s after efficiencies, and the launch interval in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Device {
    /// Matrix products of the blocks.
    pub gemm: f64,
    /// Matrix products in 16 bits or more: the output projection stays in them when the blocks use 8 bits.
    pub wide: f64,
    /// The experts' matrix products.
    pub expert: f64,
    /// Fused attention.
    pub attention: f64,
    /// Exponential of one score in fused attention, in columns of head width.
    pub softmax: f64,
    /// Fraction of the forward pass that full recomputation repeats.
    pub recompute: f64,
    /// Memory traffic.
    pub memory: f64,
    /// Least seconds of a kernel.
    pub launch: f64,
}

impl Device {
    /// The device of a GPU type at a precision.
    pub fn new(gpu: &GpuType, precision: Precision, constants: &Constants) -> Self {
        let peak = gpu.peak_flops(precision) * constants.gemm_efficiency;
        let (gemm, wide) = match precision {
            Precision::Fp8 | Precision::Fp4 => (
                peak * constants.narrow_efficiency,
                gpu.peak_flops(Precision::Bf16) * constants.gemm_efficiency,
            ),
            _ => (peak, peak),
        };
        Self {
            gemm,
            wide,
            expert: gemm * constants.expert_efficiency,
            attention: wide * constants.attention_efficiency,
            softmax: constants.softmax,
            recompute: constants.recompute,
            memory: gpu.memory_bandwidth_gb_s * 1e9 * constants.memory_efficiency,
            launch: constants.launch,
        }
    }
}

/// Seconds of a sequence of kernels: what the device needs to run them, and what the host needs to launch them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct KernelTime {
    /// Seconds during which the device is busy.
    pub busy: f64,
    /// Seconds of launching; hidden while the device is busy.
    pub launches: f64,
}

impl KernelTime {
    fn kernels(&mut self, seconds: f64, count: f64, device: &Device) {
        self.busy += seconds;
        self.launches += count * device.launch;
    }

    /// Adds a product of m x k by k x n with `element` bytes per number, repeated `times` times in one kernel each.
    pub(crate) fn gemm(
        &mut self,
        m: f64,
        k: f64,
        n: f64,
        element: f64,
        times: f64,
        device: &Device,
    ) {
        let seconds =
            2.0 * m * k * n / device.gemm + element * (m * k + k * n + m * n) / device.memory;
        self.kernels(times * seconds, times, device);
    }

    /// Adds `groups` products as [`gemm`](Self::gemm) in one grouped kernel.
    pub(crate) fn grouped(
        &mut self,
        m: f64,
        k: f64,
        n: f64,
        element: f64,
        groups: f64,
        device: &Device,
    ) {
        let launches = self.launches;
        self.gemm(m, k, n, element, groups, device);
        self.launches = launches + device.launch;
    }

    /// Adds `count` kernels that move `bytes` in all.
    pub(crate) fn traffic(&mut self, bytes: f64, count: f64, device: &Device) {
        self.kernels(bytes / device.memory, count, device);
    }

    /// Adds `flops` at a rate, in one kernel.
    pub(crate) fn flops(&mut self, flops: f64, rate: f64, device: &Device) {
        self.kernels(flops / rate, 1.0, device);
    }

    /// The sum of two.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            busy: self.busy + other.busy,
            launches: self.launches + other.launches,
        }
    }

    /// This time `factor` times.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            busy: factor * self.busy,
            launches: factor * self.launches,
        }
    }

    /// Seconds of the sequence: the work or the launches, whichever takes longer.
    pub fn elapsed(&self) -> f64 {
        self.busy.max(self.launches)
    }

    /// Seconds of `streams` equal sequences that share the device: bound by one stream's launches or by all streams' work.
    pub fn shared(&self, streams: u32) -> f64 {
        self.launches.max(f64::from(streams) * self.busy)
    }
}

/// Forward and backward time of a part of the model for one micro-batch; the backward pass contains what is recomputed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassTime {
    /// Forward pass.
    pub forward: KernelTime,
    /// Backward pass.
    pub backward: KernelTime,
}

impl PassTime {
    /// This time `factor` times.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            forward: self.forward.times(factor),
            backward: self.backward.times(factor),
        }
    }

    /// The sum of two.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            forward: self.forward.plus(other.forward),
            backward: self.backward.plus(other.backward),
        }
    }
}

/// Shape of the work of one micro-batch on one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shard {
    /// Samples per micro-batch.
    pub samples: f64,
    /// Tokens per sample.
    pub seq: f64,
    /// Tensor-parallel degree.
    pub tp: f64,
    /// Context-parallel degree.
    pub cp: f64,
    /// Expert-parallel degree.
    pub ep: f64,
    /// Whether element-wise work between tensor-parallel regions is split as well.
    pub sequence_parallel: bool,
    /// Whether attention is one fused kernel.
    pub flash: bool,
    /// Bytes per activation.
    pub element: f64,
    /// What is recomputed in the backward pass.
    pub recompute: Recompute,
}

impl Shard {
    /// Tokens on this device.
    pub fn tokens(&self) -> f64 {
        self.samples * self.seq / self.cp
    }

    fn elementwise_split(&self) -> f64 {
        if self.sequence_parallel { self.tp } else { 1.0 }
    }
}

/// One transformer block.
pub fn block(shape: &Transformer, layer: u32, shard: &Shard, device: &Device) -> PassTime {
    let attention = attention_core(shape, shard, device);
    let rest = block_rest(shape, layer, shard, device);
    let forward = attention.0.plus(rest.0);
    let mut backward = attention.1.plus(rest.1);
    match shard.recompute {
        Recompute::None => {}
        // A fused attention kernel recomputes its scores anyway.
        Recompute::Selective => {
            if !shard.flash {
                backward = backward.plus(attention.0);
            }
        }
        Recompute::Full => backward = backward.plus(forward.times(device.recompute)),
    }
    PassTime { forward, backward }
}

/// Scores, softmax and weighted sum: forward and backward.
fn attention_core(shape: &Transformer, shard: &Shard, device: &Device) -> (KernelTime, KernelTime) {
    let heads = f64::from(shape.heads) / shard.tp;
    let (score, value) = shape.core_widths();
    let queries = shard.tokens();
    // Two products of 2 s_q s_k d operations per head.
    let flops = 2.0 * queries * shard.seq * heads * (score + value);
    let mut forward = KernelTime::default();
    let mut backward = KernelTime::default();
    if shard.flash {
        let flops = if shape.causal { flops / 2.0 } else { flops };
        // Each score costs its share of two products and one exponential.
        let flops = flops * (1.0 + device.softmax * 2.0 / (score + value));
        forward.flops(flops, device.attention, device);
        // Dao 2023: five products in the backward pass against two in the forward pass.
        backward.flops(2.5 * flops, device.attention, device);
    } else {
        // Unfused: products at the rate of matrix products, and the score matrix crosses memory several times:
        // written, read and written by softmax, by dropout with its mask, read by the second product.
        let scores = queries * shard.seq * heads * shard.element;
        let products = |time: &mut KernelTime, times: f64| {
            time.kernels(times * flops / device.gemm, 2.0 * times, device);
        };
        products(&mut forward, 1.0);
        forward.traffic(6.5 * scores, 3.0, device);
        products(&mut backward, 2.0);
        backward.traffic(8.5 * scores, 3.0, device);
    }
    (forward, backward)
}

/// Everything of a block but the attention core: forward and backward.
fn block_rest(
    shape: &Transformer,
    layer: u32,
    shard: &Shard,
    device: &Device,
) -> (KernelTime, KernelTime) {
    let h = f64::from(shape.hidden);
    let tokens = shard.tokens();
    let element = shard.element;
    let mut forward = KernelTime::default();
    let mut backward = KernelTime::default();
    let product = |forward: &mut KernelTime, backward: &mut KernelTime, m, k, n, times, on| {
        forward.grouped(m, k, n, element, times, on);
        // Gradients of the input and of the weight.
        backward.grouped(m, n, k, element, times, on);
        backward.grouped(k, m, n, element, times, on);
    };
    let linear = |forward: &mut KernelTime, backward: &mut KernelTime, m, k, n, times| {
        product(forward, backward, m, k, n, times, device);
    };
    let experts = Device {
        gemm: device.expert,
        ..*device
    };
    for product in shape.attention_products() {
        let (k, n) = match product.split {
            Split::Inputs => (product.inputs / shard.tp, product.outputs),
            Split::Outputs => (product.inputs, product.outputs / shard.tp),
            Split::No => (product.inputs, product.outputs),
        };
        linear(&mut forward, &mut backward, tokens, k, n, 1.0);
    }

    let up = if shape.gated_mlp { 2.0 } else { 1.0 };
    let inner =
        |forward: &mut KernelTime, backward: &mut KernelTime, m: f64, f: f64, times: f64, on| {
            product(forward, backward, m, h, up * f, times, on);
            product(forward, backward, m, f, h, times, on);
            // Activation: reads and writes the inner width.
            forward.traffic(times * (up + 1.0) * m * f * element, 1.0, device);
            backward.traffic(times * (2.0 * up + 1.0) * m * f * element, 1.0, device);
        };
    if shape.is_moe(layer) {
        let local = (f64::from(shape.experts) / shard.ep).max(1.0);
        let routed = tokens * f64::from(shape.experts_per_token);
        inner(
            &mut forward,
            &mut backward,
            routed / local,
            f64::from(shape.expert_ffn()) / shard.tp,
            local,
            &experts,
        );
        // Router, and permuting the tokens to their experts and back.
        linear(
            &mut forward,
            &mut backward,
            tokens,
            h,
            f64::from(shape.experts),
            1.0,
        );
        forward.traffic(4.0 * routed * h * element, 4.0, device);
        backward.traffic(4.0 * routed * h * element, 4.0, device);
        if shape.shared_experts > 0 {
            let width = f64::from(shape.shared_experts * shape.expert_ffn()) / shard.tp;
            inner(&mut forward, &mut backward, tokens, width, 1.0, device);
        }
    } else {
        inner(
            &mut forward,
            &mut backward,
            tokens,
            f64::from(shape.ffn()) / shard.tp,
            1.0,
            device,
        );
    }
    // Two norms (read, write), two residual additions with dropout (read two, write one, mask).
    let stream = tokens * h * element / shard.elementwise_split();
    forward.traffic(11.0 * stream, 4.0, device);
    backward.traffic(13.0 * stream, 4.0, device);
    (forward, backward)
}

/// Embedding of one micro-batch: a gather and its scattered gradient.
pub fn embedding(shape: &Transformer, shard: &Shard, device: &Device) -> PassTime {
    let h = f64::from(shape.hidden);
    let bytes = shard.tokens() * h * shard.element;
    let mut time = PassTime::default();
    if shape.patch_inputs > 0 {
        let k = f64::from(shape.patch_inputs);
        time.forward
            .gemm(shard.tokens(), k, h, shard.element, 1.0, device);
        time.backward
            .gemm(k, shard.tokens(), h, shard.element, 1.0, device);
    } else {
        time.forward.traffic(4.0 * bytes, 2.0, device);
        time.backward.traffic(4.0 * bytes, 2.0, device);
    }
    time
}

/// Final norm, projection and loss of one micro-batch.
pub fn head(shape: &Transformer, shard: &Shard, device: &Device) -> PassTime {
    let h = f64::from(shape.hidden);
    let v = f64::from(shape.vocab) / shard.tp;
    let rows = match shape.head {
        Head::Language => shard.tokens(),
        Head::Classifier => shard.samples,
    };
    let mut time = PassTime::default();
    let wide = Device {
        gemm: device.wide,
        ..*device
    };
    time.forward.gemm(rows, h, v, shard.element, 1.0, &wide);
    time.backward.gemm(rows, v, h, shard.element, 1.0, &wide);
    time.backward.gemm(h, rows, v, shard.element, 1.0, &wide);
    // Loss in 32 bits: convert, maximum, exponential and sum; gradient in place.
    time.forward
        .traffic(rows * v * (shard.element + 12.0), 4.0, device);
    time.backward
        .traffic(rows * v * (shard.element + 8.0), 2.0, device);
    time
}

/// One explicit layer.
pub fn explicit(layer: &Layer, shard: &Shard, device: &Device) -> PassTime {
    let scale = shard.samples * shard.element / 2.0;
    let traffic = if layer.traffic_bytes > 0.0 {
        layer.traffic_bytes
    } else {
        2.0 * layer.activation_bytes
    };
    let seconds = shard.samples * layer.forward_flops / shard.tp / device.gemm
        + (traffic * scale + layer.parameters * shard.element) / shard.tp / device.memory;
    let kernels = f64::from(layer.kernels);
    let mut time = PassTime::default();
    time.forward.kernels(seconds, kernels, device);
    let ratio = layer.backward_ratio;
    time.backward
        .kernels(ratio * seconds, 2.0 * kernels, device);
    if shard.recompute == Recompute::Full {
        time.backward.kernels(
            device.recompute * seconds,
            device.recompute * kernels,
            device,
        );
    }
    time
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Device = Device {
        gemm: 100e12,
        wide: 100e12,
        expert: 100e12,
        attention: 80e12,
        softmax: 0.0,
        recompute: 1.0,
        memory: 1e12,
        launch: 5e-6,
    };

    fn shard(recompute: Recompute) -> Shard {
        Shard {
            samples: 2.0,
            seq: 1024.0,
            tp: 1.0,
            cp: 1.0,
            ep: 1.0,
            sequence_parallel: false,
            flash: true,
            element: 2.0,
            recompute,
        }
    }

    #[test]
    fn gemm_by_hand() {
        let mut time = KernelTime::default();
        time.gemm(1000.0, 2000.0, 3000.0, 2.0, 1.0, &DEVICE);
        // 2 * 6e9 / 100e12 + 2 * (2e6 + 6e6 + 3e6) / 1e12
        assert!((time.elapsed() - (12e9 / 100e12 + 22e6 / 1e12)).abs() < 1e-15);
    }

    #[test]
    fn tiny_kernels_take_as_long_as_their_launches_and_share_the_device() {
        let mut time = KernelTime::default();
        time.gemm(8.0, 8.0, 8.0, 2.0, 1.0, &DEVICE);
        assert!((time.elapsed() - 5e-6).abs() < 1e-18);
        assert!(
            (time.shared(4) - 5e-6).abs() < 1e-18,
            "four streams hide in one launch interval"
        );
        let mut large = KernelTime::default();
        large.traffic(1e9, 1.0, &DEVICE);
        assert!(
            (large.shared(4) - 4e-3).abs() < 1e-12,
            "full kernels gain nothing"
        );
    }

    #[test]
    fn grouped_products_are_launched_once() {
        let mut time = KernelTime::default();
        time.grouped(8.0, 8.0, 8.0, 2.0, 16.0, &DEVICE);
        assert!((time.launches - 5e-6).abs() < 1e-18);
        let one = 2.0 * 512.0 / 100e12 + 2.0 * 192.0 / 1e12;
        assert!((time.busy / (16.0 * one) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn exponentials_cost_columns_of_head_width() {
        // Shah et al. 2024, section 3.2: on H100 the exponentials of heads of width 128 take half as long as the products.
        let plain = Transformer::new(1, 4096, 32, 50_000);
        let device = Device {
            softmax: 64.0,
            ..DEVICE
        };
        let time = |device: &Device| {
            attention_core(&plain, &shard(Recompute::None), device)
                .0
                .busy
        };
        assert!((time(&device) / time(&DEVICE) - 1.5).abs() < 1e-12);
        let (s, h) = (1024.0, 4096.0);
        assert!((time(&DEVICE) / (2.0 * 2.0 * s * s * h / 80e12) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn eight_bits_leave_the_head_in_sixteen() {
        let gpu = GpuType::catalogue("H100-80").unwrap();
        let constants = Constants {
            narrow_efficiency: 0.75,
            ..Constants::of(gpu)
        };
        let narrow = Device::new(gpu, Precision::Fp8, &constants);
        let wide = Device::new(gpu, Precision::Bf16, &constants);
        // 1979 against 989 TFLOP/s.
        assert!((narrow.gemm / wide.gemm - 0.75 * 1979.0 / 989.0).abs() < 1e-12);
        assert!((narrow.wide / wide.wide - 1.0).abs() < 1e-12);
        let shape = Transformer::new(1, 4096, 32, 50_000);
        let shard = shard(Recompute::None);
        let head = |device: &Device| head(&shape, &shard, device).forward.busy;
        assert!((head(&narrow) / head(&wide) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn block_operations_are_those_of_the_formula() {
        // With infinite memory bandwidth and no launch interval only operations count: forward 24 b s h^2 + 4 b s^2 h
        // (Narayanan et al. 2021, section 3, without the logit layer), halved in the second term for a causal fused kernel.
        let device = Device {
            memory: f64::INFINITY,
            launch: 0.0,
            attention: 100e12,
            ..DEVICE
        };
        let shape = Transformer::new(1, 4096, 32, 50_000);
        let (b, s, h) = (2.0, 1024.0, 4096.0);
        let time = block(&shape, 0, &shard(Recompute::None), &device);
        let linear = 24.0 * b * s * h * h;
        let attention = 2.0 * b * s * s * h;
        assert!((time.forward.elapsed() * 100e12 / (linear + attention) - 1.0).abs() < 1e-12);
        let backward = 2.0 * linear + 2.5 * attention;
        assert!((time.backward.elapsed() * 100e12 / backward - 1.0).abs() < 1e-12);
        let full = block(&shape, 0, &shard(Recompute::Full), &device);
        let again = full.backward.elapsed() - time.backward.elapsed();
        assert!((again / time.forward.elapsed() - 1.0).abs() < 1e-12);
    }
}
