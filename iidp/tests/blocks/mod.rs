//! Workloads in blocks, the same on one device, and how runs are compared.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use iidp::hybrid::{BlockModel, HybridState, HybridWorkload, init_whole};
use iidp::models::{BlockGptConfig, BlockMlpConfig, Positions, ResNetConfig, VitConfig};
use iidp::optimizer::OptimizerConfig;
use iidp::pipeline::{Activation, Sequential, StageContext, StageModule};
use iidp::tensor_parallel::{Activate, TensorParallel};
use iidp::{
    AdamWConfig, BoxError, Executor, ExecutorConfig, HybridConfig, HybridExecutor, MicroBatch,
    ParallelDims, WorkerLayout, Workload,
};

pub(crate) const SEED: u64 = 11;

/// A number in -1..1 from a sample and a place in it.
fn feature(sample: u64, place: u64) -> f32 {
    let mut z =
        sample.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ place.wrapping_mul(0xd1b5_4a32_d192_ed03);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^= z >> 32;
    (z >> 40) as f32 / 8_388_608.0 - 1.0
}

/// A model and the shape of its samples.
#[derive(Debug, Clone)]
pub(crate) enum Data {
    /// `tokens` ids out of `vocabulary`, each to predict the next.
    Text { tokens: usize, vocabulary: usize },
    /// Numbers of this shape, to be told into classes.
    Numbers { shape: Vec<usize>, classes: i32 },
}

#[derive(Debug, Clone)]
pub(crate) struct Task<M> {
    pub(crate) model: M,
    pub(crate) data: Data,
}

impl<M: BlockModel> HybridWorkload for Task<M> {
    type Model = M;

    fn model(&self) -> &M {
        &self.model
    }

    fn input(&self, batch: &MicroBatch<'_>, device: &Device) -> Result<Activation, BoxError> {
        let n = batch.samples.len();
        Ok(match &self.data {
            Data::Text { tokens, .. } => {
                let ids = self.ids(batch, *tokens, 0);
                let ids: Vec<f32> = ids.into_iter().map(|id| id as f32).collect();
                Activation::new(Tensor::<2>::from_data(
                    TensorData::new(ids, [n, *tokens]),
                    device,
                ))
            }
            Data::Numbers { shape, .. } => {
                let each: usize = shape.iter().product();
                let values: Vec<f32> = batch
                    .samples
                    .iter()
                    .flat_map(|s| (0..each as u64).map(|place| feature(*s, place)))
                    .collect();
                match shape.as_slice() {
                    [a] => Activation::new(Tensor::<2>::from_data(
                        TensorData::new(values, [n, *a]),
                        device,
                    )),
                    [a, b, c] => Activation::new(Tensor::<4>::from_data(
                        TensorData::new(values, [n, *a, *b, *c]),
                        device,
                    )),
                    other => return Err(format!("no samples of shape {other:?}").into()),
                }
            }
        })
    }

    fn loss(&self, output: Activation, context: &StageContext<'_>) -> Result<Tensor<1>, BoxError> {
        let batch = &context.batch;
        let n = batch.samples.len();
        let device = output.device();
        Ok(match &self.data {
            Data::Text { tokens, .. } => {
                let ids = self.ids(batch, *tokens, 1);
                let targets =
                    Tensor::<2, Int>::from_data(TensorData::new(ids, [n, *tokens]), &device);
                BlockGptConfig::loss(output, targets, context.group)?
            }
            Data::Numbers { classes, .. } => {
                let class = |s: &u64| {
                    let score = feature(*s, 0) + 0.5 * feature(*s, 1) * feature(*s, 2) + 1.5;
                    ((score / 3.0 * *classes as f32) as i32).clamp(0, classes - 1)
                };
                let ids: Vec<i32> = batch.samples.iter().map(class).collect();
                let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [n]), &device);
                burn::nn::loss::CrossEntropyLossConfig::new()
                    .init(&device)
                    .forward(output.into_tensor::<2>()?, ids)
            }
        })
    }
}

impl<M> Task<M> {
    fn ids(&self, batch: &MicroBatch<'_>, tokens: usize, offset: u64) -> Vec<i32> {
        let Data::Text { vocabulary, .. } = self.data else {
            return Vec::new();
        };
        batch
            .samples
            .iter()
            .flat_map(|s| {
                (0..tokens as u64).map(move |i| {
                    let at = s + i + offset;
                    ((at * at / 7 + at) % vocabulary as u64) as i32
                })
            })
            .collect()
    }
}

/// The same task on one device, without any of the hybrid machinery: all blocks one after the other, trained by the data-parallel executor on one rank.
#[derive(Debug, Clone)]
pub(crate) struct OneDevice<M>(pub(crate) Task<M>);

impl<M: BlockModel> Workload for OneDevice<M> {
    type Model = Sequential<M::Block>;

    fn init(&self, device: &Device) -> Result<Self::Model, BoxError> {
        Ok(init_whole(&self.0.model, device, SEED)?)
    }

    fn loss(
        &self,
        model: &Self::Model,
        batch: &MicroBatch<'_>,
        device: &Device,
    ) -> Result<Tensor<1>, BoxError> {
        let context = StageContext {
            batch: *batch,
            group: &TensorParallel::alone(),
        };
        let output = model.forward(self.0.input(batch, device)?, &context)?;
        self.0.loss(output, &context)
    }
}

/// A GPT small enough for debug builds: four layers, heads that 1, 2, 3 and 4 divide.
pub(crate) fn gpt(tied: bool) -> Task<BlockGptConfig> {
    gpt_of(
        BlockGptConfig::new(24, 12, 2, 24, 12)
            .with_tied(tied)
            .with_hidden(24),
    )
}

/// The other options: `SwiGLU`, rotary positions, grouped queries.
pub(crate) fn modern_gpt(tied: bool) -> Task<BlockGptConfig> {
    gpt_of(
        BlockGptConfig::new(24, 12, 2, 48, 12)
            .with_kv_heads(6)
            .with_hidden(24)
            .with_activation(Activate::SwiGlu)
            .with_positions(Positions::Rotary)
            .with_tied(tied),
    )
}

pub(crate) fn gpt_of(model: BlockGptConfig) -> Task<BlockGptConfig> {
    let vocabulary = model.vocabulary();
    Task {
        model,
        data: Data::Text {
            tokens: 12,
            vocabulary,
        },
    }
}

pub(crate) fn mlp() -> Task<BlockMlpConfig> {
    Task {
        model: BlockMlpConfig::new(6, 12, 4, 3),
        data: Data::Numbers {
            shape: vec![6],
            classes: 3,
        },
    }
}

pub(crate) fn resnet() -> Task<ResNetConfig> {
    Task {
        model: ResNetConfig::new(1, [4, 8], 3).with_channels_per_group(2),
        data: Data::Numbers {
            shape: vec![1, 8, 8],
            classes: 3,
        },
    }
}

pub(crate) fn vit() -> Task<VitConfig> {
    Task {
        model: VitConfig::new([1, 8, 4], [2, 16, 4], 3),
        data: Data::Numbers {
            shape: vec![1, 8, 8],
            classes: 3,
        },
    }
}

pub(crate) fn optimizer() -> OptimizerConfig {
    AdamWConfig::new().into()
}

/// The samples of step `step`.
pub(crate) fn samples(step: usize, size: usize) -> Vec<u64> {
    (0..size)
        .map(|i| (step * size + i) as u64 * 13 % 1009)
        .collect()
}

/// What a run gives: the losses, the gradient norms, and the parameters by canonical name.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) parameters: BTreeMap<String, Vec<f32>>,
}

/// The greatest relative difference of the losses and gradient norms of two runs.
pub(crate) fn difference_of_losses(a: &Trace, b: &Trace) -> f64 {
    assert_eq!(a.losses.len(), b.losses.len());
    let scalars = (a.losses.iter().zip(&b.losses)).chain(a.norms.iter().zip(&b.norms));
    scalars
        .map(|(x, y)| (x - y).abs() / y.abs())
        .fold(0.0, f64::max)
}

/// The greatest difference of the parameters of two runs, relative to the largest of the same tensor.
pub(crate) fn difference_of_parameters(a: &Trace, b: &Trace) -> f64 {
    assert!(a.parameters.keys().eq(b.parameters.keys()));
    let mut worst = 0.0_f64;
    for (name, x) in &a.parameters {
        let y = &b.parameters[name];
        assert_eq!(x.len(), y.len(), "{name}");
        let size = y.iter().fold(1e-3_f32, |size, y| size.max(y.abs()));
        for (x, y) in x.iter().zip(y) {
            assert!(x.is_finite(), "{name}");
            worst = worst.max(f64::from((x - y).abs() / size));
        }
    }
    worst
}

/// The greatest difference of two runs in anything.
pub(crate) fn difference(a: &Trace, b: &Trace) -> f64 {
    difference_of_losses(a, b).max(difference_of_parameters(a, b))
}

pub(crate) struct Run {
    pub(crate) steps: usize,
    pub(crate) learning_rate: f64,
    pub(crate) clip: Option<f64>,
    pub(crate) optimizer: OptimizerConfig,
}

impl Run {
    pub(crate) fn new(steps: usize, learning_rate: f64) -> Self {
        Self {
            steps,
            learning_rate,
            clip: None,
            optimizer: optimizer(),
        }
    }

    /// On one device, with as many micro-batches of `local_batch` samples.
    pub(crate) fn one_device<M: BlockModel + Clone>(
        &self,
        task: &Task<M>,
        local_batch: usize,
        micro_batches: usize,
    ) -> Trace {
        let mut config =
            ExecutorConfig::new(vec![WorkerLayout::new(local_batch, 1, micro_batches)])
                .with_optimizer(self.optimizer)
                .with_seed(SEED);
        if let Some(norm) = self.clip {
            config = config.with_clip_norm(norm);
        }
        let mut executor: Executor<OneDevice<M>> = config
            .init(OneDevice(task.clone()))
            .expect("the configuration is valid");
        let mut trace = Trace {
            losses: Vec::new(),
            norms: Vec::new(),
            parameters: BTreeMap::new(),
        };
        for step in 0..self.steps {
            let batch = samples(step, executor.global_batch());
            let output = executor
                .step(&batch, self.learning_rate)
                .expect("the step succeeds");
            trace.losses.push(output.loss);
            trace.norms.push(output.gradient_norm);
        }
        let flat = executor.parameters().expect("the ranks answer");
        for slot in executor.layout().slots() {
            trace
                .parameters
                .insert(plain_name(&slot.path), flat[slot.range()].to_vec());
        }
        trace
    }

    /// On a mesh.
    pub(crate) fn hybrid<M: BlockModel + Clone>(
        &self,
        task: &Task<M>,
        config: HybridConfig,
    ) -> (Trace, HybridExecutor<Task<M>>) {
        let mut config = config.with_optimizer(self.optimizer).with_seed(SEED);
        if let Some(norm) = self.clip {
            config = config.with_clip_norm(norm);
        }
        let mut executor = config
            .init(task.clone())
            .expect("the configuration is valid");
        let trace = self.go_on(&mut executor);
        (trace, executor)
    }

    /// On a mesh that is there, from step 0.
    pub(crate) fn go_on<M: BlockModel>(&self, executor: &mut HybridExecutor<Task<M>>) -> Trace {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..self.steps {
            let batch = samples(step, executor.global_batch());
            let output = executor
                .step(&batch, self.learning_rate)
                .expect("the step succeeds");
            losses.push(output.loss);
            norms.push(output.gradient_norm);
        }
        let state = executor.state().expect("the ranks answer");
        Trace {
            losses,
            norms,
            parameters: values(&state),
        }
    }
}

pub(crate) fn values(state: &HybridState) -> BTreeMap<String, Vec<f32>> {
    (state.parameters.iter())
        .map(|(name, parameter)| (name.clone(), parameter.values.clone()))
        .collect()
}

/// A path without the variants of enums: `blocks.0.Embedding.tokens.weight` becomes `blocks.0.tokens.weight`.
pub(crate) fn plain_name(path: &str) -> String {
    let parts: Vec<&str> = path
        .split('.')
        .filter(|part| !part.starts_with(char::is_uppercase))
        .collect();
    parts.join(".")
}

/// One virtual worker per replica, `micro_batches` in all.
pub(crate) fn even(dims: ParallelDims, local_batch: usize, micro_batches: usize) -> HybridConfig {
    let each = WorkerLayout::new(local_batch, 1, micro_batches / dims.dp);
    HybridConfig::new(dims, vec![each; dims.dp])
}

pub(crate) fn parameter_count<M: BlockModel>(model: &M) -> usize {
    init_whole(model, &Device::flex(), 0)
        .expect("the model can be made")
        .num_params()
}
