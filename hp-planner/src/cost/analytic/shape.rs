//! Replicas of one shape: what is known before their number, their share of the batch, the schedule and the `ZeRO` stage are
//! chosen, and what follows from each choice.
//!
//! The search asks about the same stages thousands of times with other numbers; here everything that does not depend on these
//! is computed once. [`AnalyticCost::estimate`](crate::CostModel::estimate) goes the same way with a shape of its own, so
//! that both give the same bits.

use super::{AnalyticCost, StageTime, distinct_blocks, shard};
use crate::cluster::Link;
use crate::cost::collective::{Fabric, Ring};
use crate::cost::compute::{Device, Shard};
use crate::cost::constants::Constants;
use crate::cost::memory::{self, MemoryUnits};
use crate::cost::{Problem, ReplicaKind, ShapeChoice, ShapeCost};
use crate::plan::{
    Configuration, DeviceMemory, MemoryBreakdown, ParallelDims, Stage, TimeBreakdown,
};
use crate::training::{Recompute, Schedule, TrainingSpec};

/// A node group of the allocation.
#[derive(Debug)]
struct Group {
    index: usize,
    constants: Constants,
    device: Device,
    links: (Link, Link),
    /// Bytes of device memory that may be used.
    usable: f64,
}

/// A stage: everything that is the same for all numbers of replicas.
#[derive(Debug, Clone, PartialEq)]
struct Part {
    /// Position in the shape's list of groups.
    group: usize,
    layers: u32,
    tp: u32,
    time: StageTime,
    /// Parameters on one GPU: dense ones, and those of routed experts.
    dense: f64,
    experts: f64,
    /// What one micro-batch keeps, and what exists once besides; the state is filled in by choice.
    units: MemoryUnits,
}

/// A kind of replica.
#[derive(Debug)]
struct Kind {
    parts: Vec<Part>,
    streams: u32,
    /// Sums over the stages of a round, and of the transfers between them.
    through: f64,
    transfers: f64,
    /// The busiest stage and its seconds.
    busiest: usize,
    slowest: f64,
    /// Stages that differ from the one before: their position, and the seconds by which their last backward pass ends before
    /// that of the first stage. Among equal neighbours the first ends last and holds the most activations.
    heads: Vec<(usize, f64)>,
}

impl Kind {
    fn new(parts: Vec<Part>, streams: u32) -> Self {
        let one = |part: &Part| part.time.compute() + part.time.collectives();
        let (mut busiest, mut slowest) = (0, 0.0);
        let mut heads: Vec<(usize, f64)> = Vec::new();
        let mut earlier = 0.0;
        for (index, part) in parts.iter().enumerate() {
            if one(part) > slowest {
                (busiest, slowest) = (index, one(part));
            }
            if index == 0 || parts[index - 1] != *part {
                heads.push((index, earlier));
            }
            earlier += part.time.backward + part.time.backward_collectives;
        }
        Self {
            through: parts.iter().map(one).sum(),
            transfers: parts.iter().map(|part| part.time.transfer).sum(),
            streams,
            busiest,
            slowest,
            heads,
            parts,
        }
    }
}

/// Rings of the data-parallel ranks, one per group of the allocation: for dense parameters and for experts.
#[derive(Debug, Default)]
struct Rings {
    /// Ranks and tensor-parallel degree they were made for.
    of: Option<(u32, u32)>,
    dense: Vec<Ring>,
    experts: Vec<Ring>,
}

/// Kinds of replicas with their cost model.
#[derive(Debug)]
pub(crate) struct Shape<'a> {
    cost: &'a AnalyticCost,
    problem: Problem<'a>,
    /// Degrees, of which the number of replicas is not used.
    dims: ParallelDims,
    groups: Vec<Group>,
    kinds: Vec<Kind>,
    overhead: f64,
    jitter: f64,
    rings: Rings,
}

impl<'a> Shape<'a> {
    /// The shape of `template`, whose allocation says which groups are in use and whose replicas are not looked at.
    pub(crate) fn new<'k>(
        cost: &'a AnalyticCost,
        problem: &Problem<'a>,
        template: &Configuration,
        kinds: impl Iterator<Item = ReplicaKind<'k>>,
    ) -> Self {
        let mut overhead = 0.0_f64;
        let mut jitter = 0.0_f64;
        let groups: Vec<Group> = template
            .allocation
            .groups()
            .map(|(index, _)| {
                let constants = cost.constants(problem.cluster, index);
                let gpu = problem.cluster.gpu_type(index);
                overhead = overhead.max(constants.overhead);
                jitter = jitter.max(constants.jitter);
                Group {
                    index,
                    constants,
                    device: Device::new(gpu, problem.training.precision, &constants),
                    links: cost.links(problem, index),
                    usable: gpu.memory_bytes() * (1.0 - problem.training.memory_margin),
                }
            })
            .collect();
        let mut shape = Self {
            cost,
            problem: *problem,
            dims: template.dims,
            groups,
            kinds: Vec::new(),
            overhead,
            jitter,
            rings: Rings::default(),
        };
        shape.kinds = kinds
            .map(|kind| {
                let parts = shape.parts(template, kind.stages, kind.virtual_workers);
                Kind::new(parts, kind.virtual_workers)
            })
            .collect();
        shape
    }

    /// The stages of a kind of replica; those in the middle that are alike are computed once.
    fn parts(&self, template: &Configuration, stages: &[Stage], streams: u32) -> Vec<Part> {
        let uniform = self
            .problem
            .model
            .transformer
            .as_ref()
            .is_some_and(|shape| shape.experts == 0);
        let mut parts: Vec<Part> = Vec::with_capacity(stages.len());
        for (index, stage) in stages.iter().enumerate() {
            let like = |other: &Stage| {
                (other.group, other.layers, other.tp) == (stage.group, stage.layers, stage.tp)
            };
            let middle = uniform && index > 1 && index + 1 < stages.len();
            parts.push(if middle && like(&stages[index - 1]) {
                parts[index - 1].clone()
            } else {
                self.part(template, stage, streams)
            });
        }
        parts
    }

    fn part(&self, template: &Configuration, stage: &Stage, streams: u32) -> Part {
        let problem = &self.problem;
        let time = self.cost.stage_time(problem, template, stage, streams);
        let shard = shard(problem, template, stage);
        let (dense, experts) = AnalyticCost::stage_parameters(problem, template, stage);
        let end = stage.first_layer + stage.layers;
        let mut units = MemoryUnits::default();
        let whole = Shard {
            recompute: Recompute::None,
            ..shard
        };
        if let Some(shape) = &problem.model.transformer {
            let mut weights = 0.0_f64;
            for (layer, times) in distinct_blocks(shape, stage) {
                units.kept += times * memory::block_activations(shape, layer, &shard);
                // While a recomputed block is in its backward pass all its activations exist once.
                let recomputed = memory::block_activations(shape, layer, &whole);
                units.recomputed = units.recomputed.max(recomputed);
                weights =
                    weights.max(shape.attention_parameters() + shape.shared_ffn_parameters(layer));
            }
            if end == shape.layers {
                units.logits = memory::logits(shape, &shard);
                weights += f64::from(shape.vocab) * f64::from(shape.hidden);
            }
            units.weights = weights / shard.tp * shard.element;
            units.selective = shard.flash && template.recompute == Recompute::Selective;
            let stream = shard.tokens() * f64::from(shape.hidden) * shard.element;
            units.stream = stream;
            if template.sequence_parallel {
                units.stream = stream / shard.tp;
                units.gathered = stream;
            }
        } else {
            for layer in &problem.model.layers[stage.first_layer as usize..end as usize] {
                units.kept += memory::layer_activations(layer, &shard);
                let recomputed = memory::layer_activations(layer, &whole);
                units.recomputed = units.recomputed.max(recomputed);
                units.weights = units
                    .weights
                    .max(layer.parameters / shard.tp * shard.element);
            }
        }
        if template.recompute != Recompute::Full {
            units.recomputed = 0.0;
        }
        Part {
            group: self
                .groups
                .iter()
                .position(|group| group.index == stage.group)
                .unwrap_or(0),
            layers: stage.layers,
            tp: stage.tp,
            time,
            dense,
            experts,
            units,
        }
    }

    /// Seconds of one iteration by cause.
    pub(crate) fn time(&mut self, choice: &ShapeChoice<'_>) -> TimeBreakdown {
        let mut slowest = (0.0, 0.0, 0.0);
        let mut tail = (0.0, 0.0);
        for &(kind, rounds) in choice.rounds {
            let time = self.replica_time(choice.schedule, kind, rounds);
            if time.0 + time.1 + time.2 > slowest.0 + slowest.1 + slowest.2 {
                slowest = time;
            }
            let after = self.tail(choice, kind, rounds);
            if after.0 + after.1 > tail.0 + tail.1 {
                tail = after;
            }
        }
        let (compute, model_parallel, bubble) = slowest;
        let gpus = u64::from(choice.dp) * self.dims.replica_gpus();
        let mut overhead = self.overhead;
        if self.jitter > 0.0 {
            overhead += self.jitter * (gpus as f64).log2() * (compute + model_parallel + bubble);
        }
        TimeBreakdown {
            compute,
            model_parallel,
            bubble,
            data_parallel: tail.0,
            update: tail.1,
            overhead,
        }
    }

    /// Iteration time of one kind of replica until all gradients are there, as (compute, collectives, bubble).
    fn replica_time(&self, schedule: Schedule, kind: usize, rounds: u32) -> (f64, f64, f64) {
        let kind = &self.kinds[kind];
        // The busiest stage works all the time between fill and drain, which take every other stage once.
        let idle = (kind.through - kind.slowest) * super::fill(schedule, self.dims.vpp);
        let bubble = idle + 2.0 * kind.transfers;
        let time = &kind.parts[kind.busiest].time;
        let rounds = f64::from(rounds);
        (rounds * time.compute(), rounds * time.collectives(), bubble)
    }

    /// Seconds between the first stage's last backward pass and the end of the iteration, as (reduction, update): every stage
    /// reduces and updates when its own last backward pass is done, the later stages earlier.
    fn tail(&mut self, choice: &ShapeChoice<'_>, kind: usize, rounds: u32) -> (f64, f64) {
        let mut worst = (0.0, 0.0);
        for head in 0..self.kinds[kind].heads.len() {
            let (index, earlier) = self.kinds[kind].heads[head];
            self.prepare_rings(choice.dp, self.kinds[kind].parts[index].tp);
            let (kind, part) = (&self.kinds[kind], &self.kinds[kind].parts[index]);
            let update = self.update(choice, kind, part);
            let reduction = self.reduction(choice, kind, part, rounds);
            let visible = reduction + update - earlier;
            if visible > worst.0 + worst.1 {
                worst = (visible - update.min(visible), update.min(visible));
            }
        }
        worst
    }

    /// The ring is as slow as the slowest group in it.
    fn prepare_rings(&mut self, dp: u32, tp: u32) {
        let ranks = dp * self.dims.cp;
        if ranks <= 1 || self.rings.of == Some((ranks, tp)) {
            return;
        }
        let mixed = self.groups.len() > 1;
        let (cluster, groups) = (self.problem.cluster, &self.groups);
        let ring = move |ranks: u32| {
            groups.iter().map(move |group| {
                let node = cluster.groups[group.index].gpus_per_node;
                let (intra, inter) = group.links;
                let mut fabric = Fabric::strided(intra, inter, node, ranks, tp);
                if mixed {
                    // Ranks of several groups are never all in one node.
                    fabric.ranks_per_node = fabric.ranks_per_node.min(ranks.div_ceil(2));
                }
                fabric.ring(ranks)
            })
        };
        self.rings.dense.clear();
        self.rings.dense.extend(ring(ranks));
        self.rings.experts.clear();
        self.rings
            .experts
            .extend(ring((ranks / self.dims.ep).max(1)));
        self.rings.of = Some((ranks, tp));
    }

    /// Seconds of data-parallel communication of one stage that do not hide behind its work.
    fn reduction(&self, choice: &ShapeChoice<'_>, kind: &Kind, part: &Part, rounds: u32) -> f64 {
        if choice.dp * self.dims.cp <= 1 {
            return 0.0;
        }
        let training = self.problem.training;
        let gather = |rings: &[Ring], bytes: f64| {
            rings
                .iter()
                .map(|ring| ring.all_gather(bytes))
                .fold(0.0, f64::max)
        };
        // Of the communication that has work to run beside, a part hides: the rest competes with the work for memory and cores.
        let overlap = if training.overlap_reduce {
            self.groups[part.group].constants.overlap
        } else {
            0.0
        };
        let visible = |seconds: f64, work: f64| seconds - overlap * seconds.min(work);
        let gradient = training.gradient_element_bytes();
        let weight = training.precision.bytes();
        let both = |bytes: f64| {
            let mut seconds = gather(&self.rings.dense, part.dense * bytes);
            if part.experts > 0.0 {
                seconds += gather(&self.rings.experts, part.experts * bytes);
            }
            seconds
        };
        if choice.zero == 3 {
            // For every micro-batch parameters are gathered forwards and backwards and gradients scattered.
            let pieces = f64::from(part.layers) + 1.0;
            let layered = |bytes: f64| {
                let ring = |rings: &[Ring], bytes: f64| {
                    rings
                        .iter()
                        .map(|ring| ring.gather_parts(bytes, pieces))
                        .fold(0.0, f64::max)
                };
                ring(&self.rings.dense, part.dense * bytes)
                    + ring(&self.rings.experts, part.experts * bytes)
            };
            let seconds = 2.0 * layered(weight) + layered(gradient);
            return f64::from(rounds) * visible(seconds, part.time.compute());
        }
        // A reduction, or its two halves: gradients scattered, updated parameters gathered.
        let second = if choice.zero == 0 { gradient } else { weight };
        let seconds = both(gradient) + both(second);
        // Virtual workers are aggregated first, so only the last of them leaves time to hide behind.
        let last = part.time.backward / f64::from(kind.streams);
        visible(seconds, last)
    }

    /// Optimizer update of one stage: state, gradient and parameters cross memory.
    fn update(&self, choice: &ShapeChoice<'_>, kind: &Kind, part: &Part) -> f64 {
        let training = self.problem.training;
        let ranks = f64::from(choice.dp * self.dims.cp);
        let per_parameter = 2.0 * training.optimizer_bytes()
            + training.gradient_element_bytes()
            + 2.0 * training.precision.bytes();
        let sharded = if choice.zero > 0 { ranks } else { 1.0 };
        let device = &self.groups[part.group].device;
        let parameters = part.dense + part.experts;
        // Local aggregation adds the gradients of the other virtual workers and hands the parameters back.
        let copies = f64::from(kind.streams - 1)
            * parameters
            * (3.0 * training.gradient_element_bytes() + 2.0 * training.precision.bytes());
        let bytes = parameters / sharded * per_parameter + copies;
        (bytes / device.memory).max(4.0 * device.launch)
    }

    /// Memory of the devices, one entry per stage of each entry of the choice.
    pub(crate) fn memory(&self, choice: &ShapeChoice<'_>) -> Vec<DeviceMemory> {
        let mut memory = Vec::new();
        for (replicas, &(kind, rounds)) in choice.rounds.iter().enumerate() {
            for (stage, part) in self.kinds[kind].parts.iter().enumerate() {
                let group = &self.groups[part.group];
                memory.push(DeviceMemory {
                    replicas,
                    stage,
                    group: group.index,
                    bytes: self.stage_memory(choice, kind, stage, rounds),
                    usable: group.usable,
                });
            }
        }
        memory
    }

    /// Memory of one GPU of stage `index`.
    fn stage_memory(
        &self,
        choice: &ShapeChoice<'_>,
        kind: usize,
        index: usize,
        rounds: u32,
    ) -> MemoryBreakdown {
        let units = self.units(choice, kind, index, rounds);
        self.cost.memory_constants.bytes(&units)
    }

    /// Tensors on one GPU of stage `index`.
    fn units(
        &self,
        choice: &ShapeChoice<'_>,
        kind: usize,
        index: usize,
        rounds: u32,
    ) -> MemoryUnits {
        let training: &TrainingSpec = self.problem.training;
        let kind = &self.kinds[kind];
        let part = &kind.parts[index];
        let ranks = f64::from(choice.dp) * f64::from(self.dims.cp);
        let copies = f64::from(kind.streams);
        let mut state = memory::model_state(part.dense, choice.zero, ranks, copies, training);
        if part.experts > 0.0 {
            let expert_ranks = (ranks / f64::from(self.dims.ep)).max(1.0);
            let experts =
                memory::model_state(part.experts, choice.zero, expert_ranks, copies, training);
            state.parameters += experts.parameters;
            state.gradients += experts.gradients;
            state.optimizer += experts.optimizer;
        }
        // Two layers' parameters are gathered at a time.
        if choice.zero == 3 {
            let layer = part.dense / f64::from(part.layers.max(1));
            state.buffers += 2.0 * layer * training.precision.bytes();
        }
        let flight = in_flight(choice.schedule, &self.dims, rounds, index);
        MemoryUnits {
            state,
            kept: copies * part.units.kept * flight,
            recomputed: copies * part.units.recomputed,
            logits: copies * part.units.logits,
            stream: copies * part.units.stream,
            gathered: copies * part.units.gathered,
            ..part.units
        }
    }

    /// Tensors of the devices, one entry per stage of each entry of the choice.
    pub(crate) fn all_units(&self, choice: &ShapeChoice<'_>) -> Vec<MemoryUnits> {
        let mut units = Vec::new();
        for &(kind, rounds) in choice.rounds {
            for index in 0..self.kinds[kind].parts.len() {
                units.push(self.units(choice, kind, index, rounds));
            }
        }
        units
    }
}

impl ShapeCost for Shape<'_> {
    fn round(&self, kind: usize) -> (f64, f64) {
        (self.kinds[kind].slowest, self.kinds[kind].through)
    }

    fn after(&mut self, zero: u8, dp: u32) -> f64 {
        let choice = ShapeChoice {
            schedule: Schedule::default(),
            zero,
            dp,
            rounds: &[],
        };
        // Only sharded parameters are communicated in every round; at least one there is.
        let tail = (0..self.kinds.len()).map(|kind| {
            let (reduction, update) = self.tail(&choice, kind, 1);
            reduction + update
        });
        tail.fold(0.0, f64::max) + self.overhead
    }

    fn seconds(&mut self, choice: &ShapeChoice<'_>) -> f64 {
        self.time(choice).total()
    }

    fn fits(&self, choice: &ShapeChoice<'_>) -> bool {
        choice.rounds.iter().all(|&(kind, rounds)| {
            self.kinds[kind].heads.iter().all(|&(index, _)| {
                let usable = self.groups[self.kinds[kind].parts[index].group].usable;
                self.stage_memory(choice, kind, index, rounds).total() <= usable
            })
        })
    }
}

/// Micro-batches of which stage `index` keeps activations at the fullest moment, in units of the stage's layers; never
/// more than on the stage before.
fn in_flight(schedule: Schedule, dims: &ParallelDims, rounds: u32, index: usize) -> f64 {
    let pp = f64::from(dims.pp);
    let rounds = f64::from(rounds);
    let behind = pp - index as f64;
    match schedule {
        Schedule::GPipe => rounds,
        Schedule::OneFOneB | Schedule::ZbH1 => {
            let chunks = f64::from(dims.vpp);
            if chunks > 1.0 {
                // Warm-up of the interleaved schedule: (v - 1) p + 2 (p - index - 1) chunks, and one running.
                let warm = (chunks - 1.0) * pp + 2.0 * (behind - 1.0) + 1.0;
                (warm / chunks).min(rounds)
            } else {
                behind.min(rounds)
            }
        }
        Schedule::Zb2p => (2.0 * behind - 1.0).min(rounds),
        Schedule::ZbV => pp.min(rounds),
    }
}
