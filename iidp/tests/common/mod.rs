//! Small workloads whose data are computed from the sample's id.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Mutex;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use iidp::models::{Cnn, CnnConfig, Gpt, GptConfig, Mlp, MlpConfig};
use iidp::{
    BoxError, Error, Executor, ExecutorConfig, MicroBatch, StepOutput, WorkerLayout, Workload,
};

/// Burn's generator of initial weights is one per process: tests that make models take turns.
static MODEL_INIT: Mutex<()> = Mutex::new(());

/// Makes a model from a seed.
pub(crate) fn seeded<M: Module>(
    device: &Device,
    seed: u64,
    make: impl FnOnce(&Device) -> Result<M, Error>,
) -> Result<M, BoxError> {
    /// Burn's layers draw their weights at the first use.
    struct Materialize;
    impl ModuleVisitor for Materialize {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let _ = param.val();
        }
    }
    let _turn = MODEL_INIT
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    device.seed(seed);
    let model = make(device)?;
    model.visit(&mut Materialize);
    Ok(model)
}

/// A number in -1..1 from a sample and a place in it.
pub(crate) fn feature(sample: u64, place: u64) -> f32 {
    let mut z =
        sample.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place.wrapping_mul(0xd1b5_4a32_d192_ed03);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^= z >> 32;
    (z >> 40) as f32 / 8_388_608.0 - 1.0
}

fn features(samples: &[u64], per_sample: usize) -> Vec<f32> {
    samples
        .iter()
        .flat_map(|s| (0..per_sample as u64).map(|place| feature(*s, place)))
        .collect()
}

/// A class that the features determine.
fn classes(samples: &[u64], count: i32, device: &Device) -> Tensor<1, Int> {
    let class = |s: &u64| {
        let score = feature(*s, 0) + 0.5 * feature(*s, 1) * feature(*s, 2) + 1.5;
        ((score / 3.0 * count as f32) as i32).clamp(0, count - 1)
    };
    let ids: Vec<i32> = samples.iter().map(class).collect();
    Tensor::from_data(TensorData::new(ids, [samples.len()]), device)
}

/// Classification by a multi-layer perceptron.
#[derive(Debug, Clone)]
pub(crate) struct MlpTask;

impl Workload for MlpTask {
    type Model = Mlp;

    fn init(&self, device: &Device) -> Result<Mlp, BoxError> {
        seeded(device, 1, |device| MlpConfig::new([12, 24, 5]).init(device))
    }

    fn loss(
        &self,
        model: &Mlp,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let x = Tensor::from_data(
            TensorData::new(features(batch.samples, 12), [batch.samples.len(), 12]),
            device,
        );
        Ok(model.loss(x, classes(batch.samples, 5, device)))
    }
}

/// Classification by a convolutional network with batch norm.
#[derive(Debug, Clone)]
pub(crate) struct CnnTask;

impl Workload for CnnTask {
    type Model = Cnn;

    fn init(&self, device: &Device) -> Result<Cnn, BoxError> {
        seeded(device, 2, |device| {
            CnnConfig::new(1, [4, 8], 3).init(device)
        })
    }

    fn loss(
        &self,
        model: &Cnn,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let n = batch.samples.len();
        let x = Tensor::from_data(
            TensorData::new(features(batch.samples, 64), [n, 1, 8, 8]),
            device,
        );
        Ok(model.loss(x, classes(batch.samples, 3, device)))
    }
}

/// A tiny GPT on text computed from the position.
#[derive(Debug, Clone)]
pub(crate) struct GptTask {
    pub(crate) tied: bool,
    pub(crate) dropout: f64,
}

pub(crate) const CONTEXT: usize = 12;
pub(crate) const VOCABULARY: usize = 17;

impl Workload for GptTask {
    type Model = Gpt;

    fn init(&self, device: &Device) -> Result<Gpt, BoxError> {
        let config = GptConfig::new(VOCABULARY, CONTEXT, 2, 32, 2)
            .with_tied(self.tied)
            .with_dropout(self.dropout);
        seeded(device, 3, |device| config.init(device))
    }

    fn loss(
        &self,
        model: &Gpt,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let text = |start: u64| -> Vec<u8> {
            (start..=start + CONTEXT as u64)
                .map(|i| ((i * i / 7 + i) % VOCABULARY as u64) as u8)
                .collect()
        };
        let windows: Vec<Vec<u8>> = batch.samples.iter().map(|s| text(*s)).collect();
        let windows: Vec<&[u8]> = windows.iter().map(Vec::as_slice).collect();
        Ok(model.batch_loss(&windows, batch, device)?)
    }
}

/// One rank that computes all micro-batches one after the other.
pub(crate) fn one_device(local_batch: usize, micro_batches: usize) -> Vec<WorkerLayout> {
    vec![WorkerLayout::new(local_batch, 1, micro_batches)]
}

/// The samples of step `step`.
pub(crate) fn batch(step: usize, size: usize) -> Vec<u64> {
    (0..size)
        .map(|i| (step * size + i) as u64 * 13 % 1009)
        .collect()
}

/// Runs `steps` steps and returns their outputs, and the executor.
pub(crate) fn run<W: Workload>(
    config: ExecutorConfig,
    workload: W,
    steps: usize,
    learning_rate: f64,
) -> (Vec<StepOutput>, Executor<W>) {
    let mut executor = config.init(workload).expect("the configuration is valid");
    let size = executor.global_batch();
    let outputs = (0..steps)
        .map(|step| {
            executor
                .step(&batch(step, size), learning_rate)
                .expect("the step succeeds")
        })
        .collect();
    (outputs, executor)
}

pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

pub(crate) fn losses(outputs: &[StepOutput]) -> Vec<f64> {
    outputs.iter().map(|output| output.loss).collect()
}

/// Trains two virtual workers on `device` and on the CPU, from the same state.
pub(crate) fn compare_with_cpu<W: Workload + Clone>(workload: &W, device: &Device, steps: usize) {
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
        let samples = batch(step, 8);
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
