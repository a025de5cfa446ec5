//! Training whose layout changes between steps, and whose state moves over the ranks' communicator, is training on one device.
//!
//! The model is a small network computed by hand. Ranks keep their parts of the state as a layout says; for a step each gathers
//! the parameters, computes its micro-batches, and updates the part that it keeps.

#[path = "common/state.rs"]
mod state;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use iidp::communicator::shard_range;
use iidp::reshard::{ModelSpec, RankState, StateLayout, TensorSpec};
use iidp::{
    AdamWConfig, Communicator, Error, LocalCommunicator, OptimizerConfig, ParallelDims,
    ReshardPlan, ShardSpec, Topology,
};
use state::{Random, on_ranks};

const INPUTS: usize = 6;
const HIDDEN: usize = 12;
const OUTPUTS: usize = 3;
const RATE: f64 = 0.02;

fn model() -> Arc<ModelSpec> {
    let tensors = vec![
        TensorSpec::new("up.weight", [INPUTS, HIDDEN], ShardSpec::split(1), 0),
        TensorSpec::new("up.bias", [HIDDEN], ShardSpec::split(0), 0),
        TensorSpec::new("down.weight", [HIDDEN, OUTPUTS], ShardSpec::split(0), 1),
        TensorSpec::new("down.bias", [OUTPUTS], ShardSpec::Replicated, 1),
    ];
    Arc::new(ModelSpec::new(tensors, ["moment_1", "moment_2"]).unwrap())
}

/// Adds the gradient of the squared error of one sample; returns the error.
fn sample(parameters: &[f32], gradient: &mut [f32], id: u64, weight: f32) -> f64 {
    let (up, rest) = parameters.split_at(INPUTS * HIDDEN);
    let (up_bias, rest) = rest.split_at(HIDDEN);
    let (down, down_bias) = rest.split_at(HIDDEN * OUTPUTS);
    let mut random = Random(id);
    let x: Vec<f32> = (0..INPUTS)
        .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
        .collect();
    let hidden: Vec<f32> = (0..HIDDEN)
        .map(|h| (up_bias[h] + (0..INPUTS).map(|i| x[i] * up[i * HIDDEN + h]).sum::<f32>()).tanh())
        .collect();
    let mut loss = 0.0;
    let mut back = [0.0; HIDDEN];
    for o in 0..OUTPUTS {
        let y = down_bias[o]
            + (0..HIDDEN)
                .map(|h| hidden[h] * down[h * OUTPUTS + o])
                .sum::<f32>();
        let off = y - (x[o] * x[o + 1] + 0.3 * x[o + 3]);
        loss += f64::from(off * off);
        let slope = 2.0 * off * weight;
        let start = INPUTS * HIDDEN + HIDDEN;
        gradient[start + HIDDEN * OUTPUTS + o] += slope;
        for h in 0..HIDDEN {
            gradient[start + h * OUTPUTS + o] += slope * hidden[h];
            back[h] += slope * down[h * OUTPUTS + o];
        }
    }
    for h in 0..HIDDEN {
        let slope = back[h] * (1.0 - hidden[h] * hidden[h]);
        gradient[INPUTS * HIDDEN + h] += slope;
        for i in 0..INPUTS {
            gradient[i * HIDDEN + h] += slope * x[i];
        }
    }
    loss
}

/// A mesh, and whether moments are sharded over its replicas.
#[derive(Debug, Clone, Copy)]
struct Mesh {
    dims: ParallelDims,
    sharded: bool,
}

impl Mesh {
    fn layout(self, model: &Arc<ModelSpec>) -> StateLayout {
        let stages = [0, self.dims.pp - 1];
        let layout = StateLayout::mesh(model, self.dims, &stages).unwrap();
        if self.sharded {
            layout.with_sharded_moments().unwrap()
        } else {
            layout
        }
    }
}

/// One step of one rank on its share of the global batch, `shares` of it by rank. Returns the new state and the mean loss.
fn step(
    communicator: &dyn Communicator,
    mesh: Mesh,
    model: &Arc<ModelSpec>,
    state: &RankState,
    batch: &[u64],
    shares: &[usize],
) -> Result<(RankState, f64), Error> {
    let rank = communicator.rank();
    let layout = mesh.layout(model);
    let everywhere = StateLayout::mesh(model, ParallelDims::new(shares.len(), 1, 1), &[0, 0])?;
    let gathered = ReshardPlan::new(&layout, &everywhere)?.apply(communicator, state)?;
    let whole: usize = shares.iter().sum();
    let start = shares[..rank].iter().sum::<usize>() * batch.len() / whole;
    let end = shares[..=rank].iter().sum::<usize>() * batch.len() / whole;
    let mut gradient = vec![0.0; model.elements()];
    let mut loss = [0.0];
    for id in &batch[start..end] {
        let weight = 1.0 / batch.len() as f32;
        loss[0] += sample(&gathered.parameters, &mut gradient, *id, weight);
    }
    communicator.all_reduce_sum(&mut gradient)?;
    communicator.all_reduce_sum_f64(&mut loss)?;
    // The gradient of what this rank keeps: every rank has all of it, so nothing is sent.
    let scatter = ReshardPlan::new(&everywhere, &layout)?;
    assert_eq!(scatter.bytes_sent(), 0);
    let full = RankState {
        parameters: gradient.into(),
        ..gathered
    };
    let local = scatter.apply(communicator, &full)?;
    let mut next = state.clone();
    update(
        mesh,
        model,
        &layout.ranks()[rank],
        &local.parameters,
        &mut next,
    );
    // Under sharded moments each replica has updated its shard.
    let at = Topology::new(mesh.dims, shares.len())?.coordinates(rank)?;
    let replicas = communicator.split(at.pp * mesh.dims.tp + at.tp, at.dp)?;
    if mesh.sharded {
        let parameters: &mut Vec<f32> = Arc::make_mut(&mut next.parameters);
        replicas.all_gather(parameters)?;
    }
    Ok((next, loss[0] / batch.len() as f64))
}

fn update(
    mesh: Mesh,
    model: &ModelSpec,
    held: &iidp::reshard::RankLayout,
    gradient: &[f32],
    state: &mut RankState,
) {
    let kept = held.moments.clone();
    let mut end = 0;
    let ranges: Vec<Range<usize>> = held
        .pieces
        .iter()
        .map(|piece| {
            let tensor = &model.tensors()[piece.tensor];
            let elements: usize = match tensor.shard.dim() {
                Some(dim) => {
                    let held: usize = piece.ranges.iter().map(Range::len).sum();
                    tensor.elements() / tensor.shape[dim] * held
                }
                None => tensor.elements(),
            };
            let start = end;
            end += elements;
            let local = |at: usize| at.clamp(kept.start, kept.end) - kept.start;
            local(start)..local(end)
        })
        .collect();
    assert!(mesh.sharded || kept == (0..end));
    let config: OptimizerConfig = AdamWConfig::new().into();
    let mut optimizer = config.init(&ranges).unwrap();
    optimizer.restore(&state.optimizer()).unwrap();
    let parameters = Arc::make_mut(&mut state.parameters);
    optimizer
        .step(&mut parameters[kept.clone()], &gradient[kept], RATE)
        .unwrap();
    let parameters = std::mem::take(parameters);
    *state = RankState::new(parameters, Vec::new()).with_optimizer(optimizer.state());
}

/// A step of all ranks.
fn train(
    mesh: Mesh,
    model: &Arc<ModelSpec>,
    states: &mut Vec<RankState>,
    batch: &[u64],
    shares: &[usize],
) -> f64 {
    let group = LocalCommunicator::group(shares.len(), Duration::from_secs(30)).unwrap();
    let before = std::mem::take(states);
    let mut loss = f64::NAN;
    for result in on_ranks(group, |communicator| {
        let state = &before[communicator.rank()];
        step(&communicator, mesh, model, state, batch, shares)
    }) {
        let (state, of_rank) = result.expect("no rank panics").unwrap();
        assert!(loss.is_nan() || loss == of_rank, "ranks agree on the loss");
        loss = of_rank;
        states.push(state);
    }
    loss
}

fn batch(step: usize, size: usize) -> Vec<u64> {
    (0..size).map(|i| (step * 1000 + i) as u64).collect()
}

#[test]
fn training_goes_on_through_moves_and_failed_moves() {
    let model = model();
    let mesh = |dp, tp, pp, sharded| Mesh {
        dims: ParallelDims::new(dp, tp, pp),
        sharded,
    };
    // What the ranks are, what each does, and the global batch.
    let plans = [
        (mesh(2, 1, 1, false), vec![3, 1], 24),
        (mesh(2, 2, 1, true), vec![1, 2, 1, 2], 24),
        (mesh(1, 3, 2, false), vec![1; 6], 24),
        (mesh(4, 1, 1, true), vec![2, 1, 1, 2], 36),
        (mesh(1, 1, 2, false), vec![5, 1], 36),
        (mesh(2, 2, 2, true), vec![1, 1, 2, 1, 1, 1, 1, 1], 18),
        (mesh(1, 1, 1, false), vec![1], 18),
        (mesh(3, 1, 1, true), vec![1, 1, 1], 27),
    ];
    let single = mesh(1, 1, 1, false);
    let mut random = Random(5);
    let initial: Vec<f32> = (0..model.elements())
        .map(|_| random.below(1001) as f32 / 1000.0 - 0.5)
        .collect();
    let zeros = vec![0.0; model.elements()];
    let start = RankState::new(initial, Vec::new())
        .with_steps(vec![0; 4])
        .with_moment("moment_1", zeros.clone())
        .with_moment("moment_2", zeros);
    let mut expected = vec![start.clone()];
    let mut states = vec![start];
    let mut now = (single, vec![1], 24);
    let mut losses = Vec::new();
    for number in 0..48 {
        if number % 6 == 3 {
            let next = plans[number / 6].clone();
            let plan = ReshardPlan::new(&now.0.layout(&model), &next.0.layout(&model)).unwrap();
            // The first attempt meets a rank that goes away; the step before it was not the last.
            if number % 12 == 3 && plan.world_size() > 1 {
                let outcomes = attempt(&plan, &states, true);
                assert!(outcomes.iter().flatten().all(Result::is_err));
                let loss = train(
                    now.0,
                    &model,
                    &mut states,
                    &batch(900 + number, now.2),
                    &now.1,
                );
                let reference = train(
                    single,
                    &model,
                    &mut expected,
                    &batch(900 + number, now.2),
                    &[1],
                );
                assert!((loss - reference).abs() < 1e-5 * reference);
            }
            let moved = attempt(&plan, &states, false);
            states = moved
                .into_iter()
                .map(|state| state.unwrap().unwrap())
                .collect();
            states.truncate(next.1.len());
            now = next;
        }
        let samples = batch(number, now.2);
        let loss = train(now.0, &model, &mut states, &samples, &now.1);
        let reference = train(single, &model, &mut expected, &samples, &[1]);
        assert!(
            (loss - reference).abs() < 1e-5 * reference,
            "step {number}, {:?}: {loss} and {reference}",
            now.0
        );
        losses.push(loss);
    }
    assert!(losses[47] < 0.5 * losses[0], "it learns: {losses:?}");
    let whole = StateLayout::whole(&model).unwrap();
    let gather = ReshardPlan::new(&now.0.layout(&model), &whole).unwrap();
    let gathered = gather.apply_in_process(&states).unwrap();
    assert_eq!(gathered[0].steps, expected[0].steps);
    for (got, expected) in gathered[0].parameters.iter().zip(&*expected[0].parameters) {
        assert!((got - expected).abs() < 1e-4, "{got} and {expected}");
    }
}

/// Moves the state; the last rank may leave instead.
fn attempt(
    plan: &ReshardPlan,
    states: &[RankState],
    leaves: bool,
) -> Vec<Option<Result<RankState, Error>>> {
    let world = plan.world_size();
    let group = LocalCommunicator::group(world, Duration::from_secs(5)).unwrap();
    let nothing = RankState::default();
    let outcomes = on_ranks(group, |communicator| {
        let rank = communicator.rank();
        if leaves && rank == world - 1 {
            return None;
        }
        Some(plan.apply(&communicator, states.get(rank).unwrap_or(&nothing)))
    });
    outcomes.into_iter().map(Option::flatten).collect()
}

#[test]
fn shards_of_the_moments_are_those_of_the_optimizer() {
    let model = model();
    let layout = Mesh {
        dims: ParallelDims::new(3, 1, 1),
        sharded: true,
    }
    .layout(&model);
    for rank in 0..3 {
        assert_eq!(
            layout.ranks()[rank].moments,
            shard_range(model.elements(), 3, rank)
        );
    }
}
