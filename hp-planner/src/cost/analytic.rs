//! The analytic cost model: kernels, collectives, pipeline, reduction and update put together.

mod shape;
mod timeline;

use crate::cluster::ClusterSpec;
use crate::cost::collective::Fabric;
use crate::cost::compute::{self, Device, PassTime, Shard};
use crate::cost::constants::Constants;
use crate::cost::memory::{MemoryConstants, MemoryUnits};
use crate::cost::shapes::{ShapeFactors, ShapeKey, ShapeTable};
use crate::cost::{CostModel, Problem, ReplicaKind, ShapeChoice, ShapeCost};
use crate::error::Infeasible;
use crate::plan::{Configuration, DeviceMemory, Estimate, ParallelDims, Stage, TimeBreakdown};
use crate::training::{Recompute, Schedule};
use shape::Shape;

/// Predicts time and memory from the model's shape and the data sheets, with a few [`Constants`] per GPU type.
///
/// Complexity: O(replica groups x stages) per configuration for transformers without leading dense blocks,
/// O(layers) for others.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AnalyticCost {
    constants: Vec<(String, Constants)>,
    /// For GPU types without an entry.
    every: Option<Constants>,
    shapes: ShapeTable,
    /// For shapes that the table does not know.
    other: ShapeFactors,
    memory_constants: MemoryConstants,
}

/// Time of one round of micro-batches, one per virtual worker, on one stage, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct StageTime {
    /// Kernels of the forward pass.
    pub forward: f64,
    /// Kernels of the backward pass.
    pub backward: f64,
    /// Collectives of tensor, context and expert parallelism in the forward pass.
    pub forward_collectives: f64,
    /// The same in the backward pass, with those of recomputation.
    pub backward_collectives: f64,
    /// Transfer of the activations to the next stage.
    pub transfer: f64,
}

impl StageTime {
    /// Adds a part of the model: launches and work compete within a part, not across parts.
    fn add(&mut self, part: PassTime, streams: u32, times: f64) {
        self.forward += times * part.forward.shared(streams);
        self.backward += times * part.backward.shared(streams);
    }

    pub(crate) fn compute(&self) -> f64 {
        self.forward + self.backward
    }

    pub(crate) fn collectives(&self) -> f64 {
        self.forward_collectives + self.backward_collectives
    }
}

impl AnalyticCost {
    /// The model with the catalogue's constants.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the constants of one GPU type.
    #[must_use]
    pub fn with_constants(mut self, gpu: impl Into<String>, constants: Constants) -> Self {
        let gpu = gpu.into();
        self.constants.retain(|(name, _)| *name != gpu);
        self.constants.push((gpu, constants));
        self
    }

    /// Replaces the factors of shapes that have been measured.
    #[must_use]
    pub fn with_shapes(mut self, shapes: ShapeTable) -> Self {
        self.shapes = shapes;
        self
    }

    /// Replaces the constants of the memory model.
    #[must_use]
    pub fn with_memory_constants(mut self, constants: MemoryConstants) -> Self {
        self.memory_constants = constants;
        self
    }

    /// The same constants for every GPU type and the same factors for every shape.
    pub(crate) fn uniform(constants: Constants, factors: ShapeFactors) -> Self {
        Self {
            every: Some(constants),
            other: factors,
            ..Self::default()
        }
    }

    fn factors(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
    ) -> ShapeFactors {
        if self.shapes.is_empty() {
            return self.other;
        }
        ShapeKey::new(problem, configuration, stage)
            .map_or(self.other, |key| self.shapes.factors(&key))
    }

    /// The constants in use for a node group.
    pub fn constants(&self, cluster: &ClusterSpec, group: usize) -> Constants {
        let gpu = cluster.gpu_type(group);
        self.constants
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(&gpu.name))
            .map(|(_, constants)| *constants)
            .or(self.every)
            .unwrap_or_else(|| Constants::of(gpu))
    }

    /// Time of a round of `streams` micro-batches on one stage of a configuration.
    pub(crate) fn stage_time(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        streams: u32,
    ) -> StageTime {
        let constants = self.constants(problem.cluster, stage.group);
        let gpu = problem.cluster.gpu_type(stage.group);
        let device = Device::new(gpu, problem.training.precision, &constants);
        let shard = shard(problem, configuration, stage);
        let last = problem.model.depth();
        let end = stage.first_layer + stage.layers;
        let factors = self.factors(problem, configuration, stage);
        let mut time = StageTime::default();
        if let Some(shape) = &problem.model.transformer {
            for (layer, times) in distinct_blocks(shape, stage) {
                let block = compute::block(shape, layer, &shard, &device);
                time.add(block, streams, times * factors.block);
            }
            if stage.first_layer == 0 {
                time.add(
                    compute::embedding(shape, &shard, &device),
                    streams,
                    factors.ends,
                );
            }
            if end == last {
                time.add(compute::head(shape, &shard, &device), streams, factors.ends);
            }
            let moe = (stage.first_layer..end)
                .filter(|&layer| shape.is_moe(layer))
                .count() as f64;
            self.collectives(problem, configuration, stage, &shard, moe, &mut time);
            if configuration.dims.pp > 1 && end < last {
                let split = if configuration.sequence_parallel {
                    shard.tp
                } else {
                    1.0
                };
                let bytes = shard.tokens() * f64::from(shape.hidden) * shard.element / split;
                time.transfer = self.transfer(problem, configuration, stage, bytes);
            }
        } else {
            let layers = &problem.model.layers[stage.first_layer as usize..end as usize];
            for layer in layers {
                time.add(compute::explicit(layer, &shard, &device), streams, 1.0);
            }
            if configuration.dims.pp > 1 && end < last {
                let output = layers.last().map_or(0.0, |layer| layer.output_bytes);
                let bytes = output * shard.samples * shard.element / 2.0;
                time.transfer = self.transfer(problem, configuration, stage, bytes);
            }
            if stage.tp > 1 {
                let fabric = self.fabric(problem, stage.group, stage.tp, 1);
                let output: f64 = layers.iter().map(|layer| layer.output_bytes).sum();
                let bytes = output * shard.samples * shard.element / 2.0;
                let seconds = fabric.all_reduce(bytes, stage.tp);
                time.forward_collectives += seconds;
                time.backward_collectives += seconds;
            }
        }
        time
    }

    /// Collectives inside the blocks of a transformer stage.
    fn collectives(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        shard: &Shard,
        moe_layers: f64,
        time: &mut StageTime,
    ) {
        let Some(shape) = &problem.model.transformer else {
            return;
        };
        let dims = &configuration.dims;
        let layers = f64::from(stage.layers);
        let constants = self.constants(problem.cluster, stage.group);
        let mut forward = 0.0;
        let mut backward = 0.0;
        if stage.tp > 1 {
            // Shoeybi et al. 2019: two all-reduces forward and two backward per block; with sequence parallelism each is a
            // reduce-scatter and an all-gather of the same volume, and the backward pass gathers the inputs once more.
            let fabric = self.fabric(problem, stage.group, stage.tp, 1);
            let bytes = shard.tokens() * f64::from(shape.hidden) * shard.element;
            let one = fabric.all_reduce(bytes, stage.tp) * (1.0 - constants.tensor_overlap);
            forward += 2.0 * layers * one;
            let extra = if configuration.sequence_parallel {
                1.0
            } else {
                0.0
            };
            backward += (2.0 + extra) * layers * one;
        }
        if dims.cp > 1 {
            // Keys and values of the whole sequence pass every rank; their gradients return.
            let fabric = self.fabric(problem, stage.group, dims.cp, stage.tp);
            let kv = f64::from(shape.kv_heads() * shape.head_dim()) / shard.tp;
            let bytes = 2.0 * shard.samples * shard.seq * kv * shard.element;
            forward += layers * fabric.all_gather(bytes, dims.cp);
            backward += 2.0 * layers * fabric.all_gather(bytes, dims.cp);
        }
        if dims.ep > 1 && moe_layers > 0.0 {
            // Tokens travel to their experts and back.
            let fabric = self.fabric(problem, stage.group, dims.ep, 1);
            let split = if configuration.sequence_parallel {
                shard.tp
            } else {
                1.0
            };
            let bytes = shard.tokens() / split
                * f64::from(shape.experts_per_token)
                * f64::from(shape.hidden)
                * shard.element;
            let one = fabric.all_to_all(bytes, dims.ep);
            forward += 2.0 * moe_layers * one;
            backward += 2.0 * moe_layers * one;
        }
        if configuration.recompute == Recompute::Full {
            backward += constants.recompute * forward;
        }
        let factors = self.factors(problem, configuration, stage);
        time.forward_collectives += forward * factors.block;
        time.backward_collectives += backward * factors.block;
    }

    /// Seconds of sending a stage's output onwards: through the node's outer link if the next stage is in another node.
    fn transfer(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        bytes: f64,
    ) -> f64 {
        let node = problem.cluster.groups[stage.group].gpus_per_node;
        let replica = configuration.dims.replica_gpus();
        let link = if replica <= u64::from(node) && configuration.allocation.groups().count() == 1 {
            self.links(problem, stage.group).0
        } else {
            // All GPUs of a tensor-parallel group send at the same time.
            let mut link = self.links(problem, stage.group).1;
            link.bandwidth_gb_s /= f64::from(stage.tp.min(node));
            link
        };
        link.seconds(bytes)
    }

    /// Links inside and between nodes of a group at the bandwidth that is reached.
    fn links(&self, problem: &Problem<'_>, group: usize) -> (crate::Link, crate::Link) {
        let constants = self.constants(problem.cluster, group);
        let mut intra = problem.cluster.intra(group);
        let mut inter = problem.cluster.inter(group);
        intra.bandwidth_gb_s *= constants.intra_efficiency;
        inter.bandwidth_gb_s *= constants.inter_efficiency;
        intra.latency_us *= constants.latency;
        inter.latency_us *= constants.latency;
        (intra, inter)
    }

    fn fabric(&self, problem: &Problem<'_>, group: usize, ranks: u32, stride: u32) -> Fabric {
        let (intra, inter) = self.links(problem, group);
        let node = problem.cluster.groups[group].gpus_per_node;
        Fabric::strided(intra, inter, node, ranks, stride)
    }

    /// Parameters on one GPU of a stage: dense ones, and those of routed experts.
    pub(crate) fn stage_parameters(
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
    ) -> (f64, f64) {
        let tp = f64::from(stage.tp);
        let end = stage.first_layer + stage.layers;
        if let Some(shape) = &problem.model.transformer {
            let mut dense = 0.0;
            let mut experts = 0.0;
            for (layer, times) in distinct_blocks(shape, stage) {
                dense +=
                    times * (shape.attention_parameters() + shape.shared_ffn_parameters(layer));
                experts += times * shape.expert_parameters(layer);
            }
            if stage.first_layer == 0 {
                dense += shape.embedding_parameters();
            }
            if end == shape.layers {
                dense += shape.head_parameters();
                if stage.first_layer > 0 && shape.tied_embeddings && shape.patch_inputs == 0 {
                    // The last stage holds its own copy of the tied embedding.
                    dense += f64::from(shape.vocab) * f64::from(shape.hidden);
                }
            }
            (
                dense / tp,
                experts / (tp * f64::from(configuration.dims.ep)),
            )
        } else {
            let layers = &problem.model.layers[stage.first_layer as usize..end as usize];
            let sum: f64 = layers.iter().map(|layer| layer.parameters).sum();
            (sum / tp, 0.0)
        }
    }
}

impl AnalyticCost {
    /// Seconds of one iteration by cause, whether or not the memory suffices.
    ///
    /// # Errors
    /// The reason if the parts of the configuration contradict each other.
    pub fn time(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<TimeBreakdown, Infeasible> {
        check(problem, configuration)?;
        let (mut shape, rounds) = self.shape_of(problem, configuration);
        Ok(shape.time(&choice(configuration, &rounds)))
    }

    /// Memory of the devices, one entry per stage of each kind of replica.
    ///
    /// # Errors
    /// As [`time`](Self::time).
    pub fn memory(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<Vec<DeviceMemory>, Infeasible> {
        check(problem, configuration)?;
        let (shape, rounds) = self.shape_of(problem, configuration);
        Ok(shape.memory(&choice(configuration, &rounds)))
    }

    /// Tensors of the devices, in the order of [`memory`](Self::memory).
    pub(crate) fn memory_units(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<Vec<MemoryUnits>, Infeasible> {
        check(problem, configuration)?;
        let (shape, rounds) = self.shape_of(problem, configuration);
        Ok(shape.all_units(&choice(configuration, &rounds)))
    }

    /// The shape of a configuration, and for each group of its replicas the kind and the rounds.
    fn shape_of<'a>(
        &'a self,
        problem: &Problem<'a>,
        configuration: &Configuration,
    ) -> (Shape<'a>, Vec<(usize, u32)>) {
        let mut kinds: Vec<ReplicaKind<'_>> = Vec::new();
        let rounds = configuration
            .replicas
            .iter()
            .map(|replicas| {
                let kind = ReplicaKind {
                    stages: &replicas.stages,
                    virtual_workers: replicas.virtual_workers,
                };
                let at = kinds.iter().position(|known| *known == kind);
                let at = at.unwrap_or_else(|| {
                    kinds.push(kind);
                    kinds.len() - 1
                });
                (at, replicas.accumulation_steps)
            })
            .collect();
        (
            Shape::new(self, problem, configuration, kinds.into_iter()),
            rounds,
        )
    }
}

/// What is chosen for the shape of a configuration.
fn choice<'a>(configuration: &Configuration, rounds: &'a [(usize, u32)]) -> ShapeChoice<'a> {
    ShapeChoice {
        schedule: configuration.schedule,
        zero: configuration.zero,
        dp: configuration.dims.dp,
        rounds,
    }
}

/// Fraction of a round that a pipeline idles for every stage but the busiest: fill and drain take each once, in chunks when
/// interleaved (Narayanan et al. 2021, section 2.2.2); a zero-bubble schedule fills all but the forward pass of it with
/// weight gradients (Qi et al. 2024, table 1).
fn fill(schedule: Schedule, chunks: u32) -> f64 {
    match schedule {
        Schedule::GPipe | Schedule::OneFOneB => 1.0 / f64::from(chunks),
        Schedule::ZbH1 => 1.0 / 3.0,
        Schedule::Zb2p | Schedule::ZbV => 0.0,
    }
}

impl CostModel for AnalyticCost {
    fn round_seconds(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
        stage: &Stage,
        virtual_workers: u32,
    ) -> Option<f64> {
        let time = self.stage_time(problem, configuration, stage, virtual_workers);
        Some(time.compute() + time.collectives())
    }

    fn estimate(
        &self,
        problem: &Problem<'_>,
        configuration: &Configuration,
    ) -> Result<Estimate, Infeasible> {
        check(problem, configuration)?;
        let (mut shape, rounds) = self.shape_of(problem, configuration);
        let choice = choice(configuration, &rounds);
        let memory = shape.memory(&choice);
        if let Some(device) = memory
            .iter()
            .filter(|device| device.bytes.total() > device.usable)
            .max_by(|a, b| {
                let excess = |d: &DeviceMemory| d.bytes.total() / d.usable;
                excess(a).total_cmp(&excess(b))
            })
        {
            return Err(Infeasible::Memory {
                need_gib: device.bytes.total() / crate::cluster::GIB,
                have_gib: device.usable / crate::cluster::GIB,
                at: format!(
                    "stage {} on {}",
                    device.stage, problem.cluster.groups[device.group].gpu
                ),
            });
        }
        Ok(Estimate {
            time: shape.time(&choice),
            memory,
            price_per_hour: price_per_hour(problem.cluster, configuration),
        })
    }

    fn fill(&self, schedule: Schedule, chunks: u32) -> f64 {
        fill(schedule, chunks)
    }

    fn shape<'a>(
        &'a self,
        problem: &Problem<'a>,
        template: &Configuration,
        kinds: &[ReplicaKind<'_>],
    ) -> Option<Result<Box<dyn ShapeCost + 'a>, Infeasible>> {
        let checked = kinds
            .iter()
            .try_for_each(|kind| check_stages(problem, &template.dims, kind.stages));
        Some(checked.map(|()| {
            let kinds = kinds.iter().copied();
            Box::new(Shape::new(self, problem, template, kinds)) as Box<dyn ShapeCost + 'a>
        }))
    }
}

/// Money per hour of the GPUs that a configuration takes.
pub(crate) fn price_per_hour(cluster: &ClusterSpec, configuration: &Configuration) -> f64 {
    configuration
        .allocation
        .groups()
        .map(|(group, gpus)| f64::from(gpus) * cluster.price_per_gpu_hour(group))
        .sum()
}

/// Checks that the parts of a configuration fit each other, the model and the cluster.
pub(crate) fn check(
    problem: &Problem<'_>,
    configuration: &Configuration,
) -> Result<(), Infeasible> {
    let dims = &configuration.dims;
    if let Err(error) = dims.validate() {
        return Err(Infeasible::Unsupported(error.to_string()));
    }
    let replicas: u64 = configuration
        .replicas
        .iter()
        .map(|group| u64::from(group.count))
        .sum();
    exact("replicas", replicas, u64::from(dims.dp))?;
    exact(
        "GPUs of the allocation",
        u64::from(configuration.allocation.total()),
        dims.gpus(),
    )?;
    for (group, gpus) in configuration.allocation.groups() {
        let have = problem
            .cluster
            .groups
            .get(group)
            .map_or(0, crate::cluster::NodeGroup::gpus);
        if gpus > have {
            return Err(Infeasible::Exceeds {
                what: format!("GPUs of group {group}"),
                need: u64::from(gpus),
                have: u64::from(have),
            });
        }
    }
    for replicas in &configuration.replicas {
        if replicas.micro_batches() == 0 {
            return Err(Infeasible::Exceeds {
                what: "micro-batches per replica".to_owned(),
                need: 1,
                have: 0,
            });
        }
        check_stages(problem, dims, &replicas.stages)?;
        for stage in &replicas.stages {
            let have = configuration.allocation.gpus.get(stage.group);
            if have.is_none_or(|&gpus| gpus == 0) {
                return Err(Infeasible::Exceeds {
                    what: format!("GPUs allocated from group {}", stage.group),
                    need: u64::from(stage.tp),
                    have: 0,
                });
            }
        }
    }
    if let Some(shape) = &problem.model.transformer
        && dims.ep > 1
    {
        divides("experts", shape.experts, dims.ep, "expert parallelism")?;
    }
    Ok(())
}

/// Checks that the stages of a replica fit each other and the model.
fn check_stages(
    problem: &Problem<'_>,
    dims: &ParallelDims,
    stages: &[Stage],
) -> Result<(), Infeasible> {
    exact("stages", stages.len() as u64, u64::from(dims.pp))?;
    let mut next = 0;
    for stage in stages {
        if stage.layers == 0 || stage.first_layer != next {
            return Err(Infeasible::Exceeds {
                what: "layers for pipeline stages".to_owned(),
                need: u64::from(dims.pp),
                have: u64::from(problem.model.depth()),
            });
        }
        next += stage.layers;
        // Embedding and head can take the place of a block in a chunk each.
        if stage.layers + 1 < dims.vpp {
            return Err(Infeasible::Exceeds {
                what: "layers of a stage for model chunks".to_owned(),
                need: u64::from(dims.vpp),
                have: u64::from(stage.layers),
            });
        }
        check_tensor(problem, stage)?;
    }
    exact(
        "layers in stages",
        u64::from(next),
        u64::from(problem.model.depth()),
    )
}

fn check_tensor(problem: &Problem<'_>, stage: &Stage) -> Result<(), Infeasible> {
    let of = "tensor parallelism";
    if let Some(shape) = &problem.model.transformer {
        divides("heads", shape.heads, stage.tp, of)?;
        divides("ffn", shape.ffn(), stage.tp, of)
    } else {
        let end = (stage.first_layer + stage.layers) as usize;
        problem.model.layers[stage.first_layer as usize..end]
            .iter()
            .try_for_each(|layer| divides("tp_divisor", layer.tp_divisor, stage.tp, of))
    }
}

fn divides(what: &str, value: u32, divisor: u32, of: &str) -> Result<(), Infeasible> {
    if value.is_multiple_of(divisor) {
        Ok(())
    } else {
        Err(Infeasible::Divisibility {
            what: what.to_owned(),
            value: u64::from(value),
            divisor: u64::from(divisor),
            of: of.to_owned(),
        })
    }
}

fn exact(what: &str, have: u64, need: u64) -> Result<(), Infeasible> {
    if have == need {
        Ok(())
    } else {
        Err(Infeasible::Exceeds {
            what: what.to_owned(),
            need,
            have,
        })
    }
}

fn shard(problem: &Problem<'_>, configuration: &Configuration, stage: &Stage) -> Shard {
    let dims = &configuration.dims;
    Shard {
        samples: f64::from(configuration.micro_batch),
        seq: f64::from(problem.training.seq),
        tp: f64::from(stage.tp),
        cp: f64::from(dims.cp),
        ep: f64::from(dims.ep),
        sequence_parallel: configuration.sequence_parallel,
        flash: problem.training.flash_attention,
        element: problem.training.precision.bytes(),
        recompute: configuration.recompute,
    }
}

/// Blocks of a stage as (one of them, how many are like it).
fn distinct_blocks(
    shape: &crate::model::Transformer,
    stage: &Stage,
) -> impl Iterator<Item = (u32, f64)> + use<> {
    let end = stage.first_layer + stage.layers;
    let dense = if shape.experts > 0 {
        shape.dense_layers.clamp(stage.first_layer, end) - stage.first_layer
    } else {
        0
    };
    let first = stage.first_layer;
    [
        (first, f64::from(dense)),
        (end.saturating_sub(1), f64::from(stage.layers - dense)),
    ]
    .into_iter()
    .filter(|&(_, times)| times > 0.0)
}
