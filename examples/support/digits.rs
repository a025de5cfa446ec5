//! What the digits examples share: the data, a two-layer network on flat slices, Adam, and a gradient in measured micro-batches.

use std::path::Path;

use adaptive_batch::{
    GradientMeter, MeterConfig, MicroBatch, MicroBatchStats, OwnerRule, Shard, Weighting,
};
use anyhow::Context;

const INPUTS: usize = 64;
const HIDDEN: usize = 64;
const CLASSES: usize = 10;
const PARAMETERS: usize = HIDDEN * INPUTS + HIDDEN + CLASSES * HIDDEN + CLASSES;
/// Devices, each with one micro-batch of a step.
pub(crate) const DEVICES: usize = 8;

#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pixels: [f32; INPUTS],
    class: usize,
}

#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) train: Vec<Sample>,
    pub(crate) test: Vec<Sample>,
}

impl Data {
    /// Every fifth sample is for testing.
    pub(crate) fn read(folder: &Path) -> anyhow::Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).with_context(|| format!("reading {}", path.display()))
        };
        let images = read("digits8x8-images.idx3-ubyte")?;
        let labels = read("digits8x8-labels.idx1-ubyte")?;
        anyhow::ensure!(
            images.len() >= 16
                && labels.len() >= 8
                && (images.len() - 16) / INPUTS == labels.len() - 8,
            "digits8x8: {} bytes of images do not fit {} bytes of labels",
            images.len(),
            labels.len()
        );
        let (mut train, mut test) = (Vec::new(), Vec::new());
        for (i, (image, &label)) in images[16..]
            .chunks_exact(INPUTS)
            .zip(&labels[8..])
            .enumerate()
        {
            let mut pixels = [0.0; INPUTS];
            for (p, &byte) in pixels.iter_mut().zip(image) {
                *p = f32::from(byte) / 16.0;
            }
            let sample = Sample {
                pixels,
                class: usize::from(label),
            };
            if i % 5 == 4 {
                test.push(sample);
            } else {
                train.push(sample);
            }
        }
        Ok(Self { train, test })
    }
}

/// A small generator of random numbers (`SplitMix64`).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 16_777_216.0
    }
}

/// Deals out samples in a new random order each epoch.
#[derive(Debug)]
pub(crate) struct Shuffle {
    order: Vec<usize>,
    position: usize,
    random: Random,
}

impl Shuffle {
    pub(crate) fn new(samples: usize, seed: u64) -> Self {
        Self {
            order: (0..samples).collect(),
            position: samples,
            random: Random(seed ^ 0x5eed),
        }
    }

    pub(crate) fn take(&mut self, count: usize) -> Vec<usize> {
        (0..count)
            .map(|_| {
                if self.position == self.order.len() {
                    for i in (1..self.order.len()).rev() {
                        self.order
                            .swap(i, (self.random.next() % (i as u64 + 1)) as usize);
                    }
                    self.position = 0;
                }
                self.position += 1;
                self.order[self.position - 1]
            })
            .collect()
    }
}

/// 64 inputs, 64 rectified hidden units, 10 classes, all parameters in one slice.
#[derive(Debug, Clone)]
pub(crate) struct Network {
    parameters: Vec<f32>,
}

impl Network {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(7_919) + 1);
        let mut parameters = vec![0.0; PARAMETERS];
        let (first, rest) = parameters.split_at_mut(HIDDEN * INPUTS);
        let second = &mut rest[HIDDEN..HIDDEN + CLASSES * HIDDEN];
        for (weights, inputs) in [(first, INPUTS), (second, HIDDEN)] {
            let bound = (6.0 / inputs as f32).sqrt();
            weights.fill_with(|| (2.0 * random.uniform() - 1.0) * bound);
        }
        Self { parameters }
    }

    /// Weights and biases of both layers.
    fn layers(&self) -> (&[f32], &[f32], &[f32], &[f32]) {
        let (w1, rest) = self.parameters.split_at(HIDDEN * INPUTS);
        let (b1, rest) = rest.split_at(HIDDEN);
        let (w2, b2) = rest.split_at(CLASSES * HIDDEN);
        (w1, b1, w2, b2)
    }

    fn forward(&self, pixels: &[f32; INPUTS]) -> ([f32; HIDDEN], [f32; CLASSES]) {
        let (w1, b1, w2, b2) = self.layers();
        let (mut hidden, mut out) = ([0.0f32; HIDDEN], [0.0; CLASSES]);
        // One row of weights per input: the inner loop runs over independent sums.
        hidden.copy_from_slice(b1);
        for (row, x) in w1
            .chunks_exact(HIDDEN)
            .zip(pixels)
            .filter(|(_, x)| **x != 0.0)
        {
            for (h, w) in hidden.iter_mut().zip(row) {
                *h += w * x;
            }
        }
        let hidden = hidden.map(|h| h.max(0.0));
        for (o, (row, b)) in out.iter_mut().zip(w2.chunks_exact(HIDDEN).zip(b2)) {
            *o = b + row.iter().zip(&hidden).map(|(w, h)| w * h).sum::<f32>();
        }
        (hidden, out)
    }

    /// Adds the gradient of one sample's cross-entropy, times `scale`.
    fn backward(&self, sample: &Sample, scale: f32, gradient: &mut [f32]) {
        let (hidden, out) = self.forward(&sample.pixels);
        let largest = out.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exp = out.map(|o| (o - largest).exp());
        let total: f32 = exp.iter().sum();
        let mut d_out = exp.map(|e| e / total * scale);
        d_out[sample.class] -= scale;
        let (_, _, w2, _) = self.layers();
        let (g1, rest) = gradient.split_at_mut(HIDDEN * INPUTS);
        let (gb1, rest) = rest.split_at_mut(HIDDEN);
        let (g2, gb2) = rest.split_at_mut(CLASSES * HIDDEN);
        let mut d_hidden = [0.0; HIDDEN];
        for (c, &d) in d_out.iter().enumerate() {
            gb2[c] += d;
            for (h, &activation) in hidden.iter().enumerate() {
                g2[c * HIDDEN + h] += d * activation;
                d_hidden[h] += d * w2[c * HIDDEN + h];
            }
        }
        for ((d, h), g) in d_hidden.iter_mut().zip(&hidden).zip(gb1) {
            *d = if *h > 0.0 { *d } else { 0.0 };
            *g += *d;
        }
        for (row, x) in g1
            .chunks_exact_mut(HIDDEN)
            .zip(&sample.pixels)
            .filter(|(_, x)| **x != 0.0)
        {
            for (g, d) in row.iter_mut().zip(&d_hidden) {
                *g += d * x;
            }
        }
    }

    /// Share of samples that are classified rightly.
    pub(crate) fn accuracy(&self, samples: &[Sample]) -> f64 {
        let right = samples.iter().filter(|s| {
            let (_, out) = self.forward(&s.pixels);
            (0..CLASSES).max_by(|a, b| out[*a].total_cmp(&out[*b])) == Some(s.class)
        });
        right.count() as f64 / samples.len() as f64
    }
}

/// A meter over the whole network, for mean gradients of unequal micro-batches.
pub(crate) fn meter() -> adaptive_batch::Result<GradientMeter> {
    let first = HIDDEN * INPUTS + HIDDEN;
    let shard = Shard::new("network", PARAMETERS)
        .parameter("hidden layer", 0..first, OwnerRule::Partitioned)
        .parameter("output layer", first..PARAMETERS, OwnerRule::Partitioned);
    MeterConfig::new([shard])
        .weighting(Weighting::Samples)
        .build()
}

/// The mean gradient of a batch, accumulated through the meter in one micro-batch per device.
pub(crate) fn gradient(
    network: &Network,
    data: &Data,
    batch: &[usize],
    meter: &mut GradientMeter,
) -> adaptive_batch::Result<(Vec<f32>, MicroBatchStats)> {
    let mut sum = vec![0.0f32; PARAMETERS];
    let mut micro = vec![0.0f32; PARAMETERS];
    for device in 0..DEVICES {
        let own = &batch[batch.len() * device / DEVICES..batch.len() * (device + 1) / DEVICES];
        if own.is_empty() {
            continue;
        }
        micro.fill(0.0);
        for &i in own {
            network.backward(&data.train[i], 1.0 / own.len() as f32, &mut micro);
        }
        let micro_batch = MicroBatch {
            index: device as u64,
            samples: own.len() as u64,
        };
        meter.accumulate(0, micro_batch, &mut sum, &micro)?;
    }
    meter.summed(0, &sum)?;
    let stats = meter.finish()?;
    for g in &mut sum {
        *g /= batch.len() as f32;
    }
    Ok((sum, stats))
}

/// Adam (Kingma and Ba 2015).
#[derive(Debug)]
pub(crate) struct Adam {
    first: Vec<f32>,
    second: Vec<f32>,
    step: i32,
}

impl Adam {
    pub(crate) fn new(network: &Network) -> Self {
        let zeros = vec![0.0; network.parameters.len()];
        Self {
            first: zeros.clone(),
            second: zeros,
            step: 0,
        }
    }

    pub(crate) fn step(&mut self, network: &mut Network, gradient: &[f32], rate: f64) {
        self.step += 1;
        let (c1, c2) = (1.0 - 0.9f32.powi(self.step), 1.0 - 0.999f32.powi(self.step));
        for (((p, g), m), v) in network
            .parameters
            .iter_mut()
            .zip(gradient)
            .zip(&mut self.first)
            .zip(&mut self.second)
        {
            *m += 0.1 * (g - *m);
            *v += 0.001 * (g * g - *v);
            *p -= rate as f32 * (*m / c1) / ((*v / c2).sqrt() + 1e-8);
        }
    }
}
