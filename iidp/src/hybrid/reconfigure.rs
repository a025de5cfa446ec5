//! Another layout between two steps: the state moves, the run goes on.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::config::{HybridConfig, local_world};
use super::partition::{block_of, canonical_name};
use super::rank::{Command, Payload};
use super::state::LocalTensor;
use super::{BlockModel, HybridExecutor, HybridWorkload};
use crate::reshard::{
    ModelSpec, Piece, RankLayout, RankState, ReshardPlan, StateLayout, TensorSpec,
};
use crate::{Error, ParallelDims, WorkerLayout};

impl<W: HybridWorkload> HybridExecutor<W> {
    /// Goes on with another mesh, other micro-batches and workers, other ranks: [`Self::reconfigure_with`] and the present settings. Stages are cut evenly.
    ///
    /// # Errors
    ///
    /// As [`Self::reconfigure_with`].
    pub fn reconfigure(
        &mut self,
        dims: ParallelDims,
        layouts: Vec<WorkerLayout>,
    ) -> Result<ReshardPlan, Error> {
        let mut config = self.settings();
        config.cuts = None;
        config.dims = dims;
        config.layouts = layouts;
        self.reconfigure_with(config)
    }

    /// Goes on under other settings: batch, workers, mesh, schedule, cuts, number of ranks. Parameters, buffers, the optimizer's state and the number of
    /// steps stay; the update of the next step is the one that it would have been. Returns what had to move.
    ///
    /// The ranks of the new layout are made beside the old ones, and the state is copied from rank to rank, each part straight to its new place. Only then are the old ranks
    /// ended: after a failure the executor goes on as before. Observers are made anew, by the present factory unless the
    /// settings have one.
    ///
    /// # Errors
    ///
    /// As [`HybridConfig::init`], and [`Error::Invalid`] for an optimizer that keeps other moments, or when the ranks' communicators were given from outside: then save a
    /// [`StateDict`](crate::StateDict) and start anew from it. Nothing has changed then.
    pub fn reconfigure_with(&mut self, mut config: HybridConfig) -> Result<ReshardPlan, Error> {
        if !self.local {
            return Err(Error::Invalid {
                what: "reconfiguration",
                problem: "the ranks' communicators were given from outside, expected ranks that the executor has started itself".into(),
            });
        }
        config.validate(self.workload.model())?;
        if config.observers.is_none() {
            config.observers.clone_from(&self.config.observers);
        }
        let (old, before) = self.held()?;
        let world = local_world(config.dims.world_size(), config.timeout)?;
        let mut next = Self::start(config, Arc::clone(&self.workload), world, true)?;
        let (new, _) = next.held()?;
        let model = model_of(&*self.workload, old.iter().chain(&new), &before)?;
        let plan = ReshardPlan::new(&layout_of(&model, &old)?, &layout_of(&model, &new)?)?;
        let mut states = plan.apply_in_process(&before)?;
        states.truncate(next.ranks.len());
        next.import(states, self.step)?;
        *self = next;
        Ok(plan)
    }

    /// A copy of the settings, to change and to give to [`Self::reconfigure_with`].
    pub fn settings(&self) -> HybridConfig {
        self.config.clone()
    }

    /// What each rank holds, and its values.
    fn held(&mut self) -> Result<(Vec<Held>, Vec<RankState>), Error> {
        let dims = self.config.dims;
        let mut found = (Vec::new(), Vec::new());
        for payload in self.ask_all(|_| Command::Export)? {
            if let Payload::Exported(mut tensors, state) = payload {
                for tensor in &mut tensors {
                    // Both ends of a tie are the same tensor.
                    if let Some(owner) = tensor.tied_to.take() {
                        tensor.name = owner;
                    }
                }
                let rank = found.0.len();
                found.0.push(Held {
                    tensors,
                    tp: (dims.tp, rank % dims.tp),
                });
                found.1.push(*state);
            }
        }
        Ok(found)
    }

    fn import(&mut self, states: Vec<RankState>, step: u64) -> Result<(), Error> {
        let states = Arc::new(states);
        self.ask_all(|_| Command::Import {
            states: Arc::clone(&states),
            step,
        })?;
        self.step = step;
        Ok(())
    }
}

/// The tensors of a rank, in the order of its flat buffers, without values.
struct Held {
    tensors: Vec<LocalTensor>,
    /// Ranks that share its layers, and its place among them.
    tp: (usize, usize),
}

/// All tensors of the model, by name, and the moments that the ranks keep.
fn model_of<'a, W: HybridWorkload>(
    workload: &W,
    ranks: impl Iterator<Item = &'a Held>,
    states: &[RankState],
) -> Result<Arc<ModelSpec>, Error> {
    let mut tensors: BTreeMap<&str, TensorSpec> = BTreeMap::new();
    for tensor in ranks.flat_map(|held| &held.tensors) {
        let block = block_of(&tensor.name).unwrap_or(0);
        let spec = TensorSpec {
            trainable: tensor.trainable,
            ..TensorSpec::new(
                tensor.name.clone(),
                tensor.shape.clone(),
                tensor.spec.clone(),
                block,
            )
        };
        tensors.insert(&tensor.name, spec);
    }
    for tie in workload.model().ties() {
        let owner = canonical_name(tie.owner_block, &tie.owner_path);
        if let Some(owner) = tensors.get_mut(owner.as_str()) {
            owner.blocks.push(tie.alias_block);
        }
    }
    let moments = states.first().map(|state| state.moments.keys().cloned());
    ModelSpec::new(
        tensors.into_values().collect(),
        moments.into_iter().flatten(),
    )
    .map(Arc::new)
}

fn layout_of(model: &Arc<ModelSpec>, ranks: &[Held]) -> Result<StateLayout, Error> {
    let position: BTreeMap<&str, usize> = (model.tensors().iter().enumerate())
        .map(|(index, tensor)| (tensor.name.as_str(), index))
        .collect();
    let mut layouts = Vec::with_capacity(ranks.len());
    for held in ranks {
        let mut pieces = Vec::with_capacity(held.tensors.len());
        let mut trained = 0;
        for tensor in &held.tensors {
            let Some(&index) = position.get(tensor.name.as_str()) else {
                continue;
            };
            let (tp, rank) = held.tp;
            let mut ranges = tensor.spec.ranges(&tensor.shape, tp, rank)?;
            if tensor.spec.dim().is_none() {
                ranges.push(0..1);
            }
            if tensor.trainable {
                let local = tensor.spec.local_shape(&tensor.shape, tp)?;
                trained += local.iter().product::<usize>();
            }
            pieces.push(Piece {
                tensor: index,
                ranges,
            });
        }
        layouts.push(RankLayout {
            pieces,
            moments: 0..trained,
        });
    }
    StateLayout::new(model, layouts)
}
