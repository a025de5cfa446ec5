//! The communicators of a rank.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::partition::{Cuts, Placement, canonical_name};
use super::rank::RankSettings;
use super::traffic::Metered;
use super::workload::Tie;
use crate::communicator::{Communicator, LocalCommunicator};
use crate::tensor_parallel::TensorParallel;
use crate::{Coordinates, Error, ParameterLayout};

/// All communicators of a rank.
#[derive(Debug)]
pub(super) struct Groups {
    pub(super) world: Box<dyn Communicator>,
    /// The ranks that hold the same shard of the same stage, if there are replicas.
    pub(super) replicas: Option<Box<dyn Communicator>>,
    pub(super) workers: Vec<WorkerGroup>,
    pub(super) ties: Vec<TieLink>,
    all_ties: Vec<TiePlan>,
}

/// The communicators of one virtual worker: the same worker of the other ranks of its replica.
#[derive(Debug)]
pub(super) struct WorkerGroup {
    /// Along the stages.
    pub(super) link: Box<dyn Communicator>,
    pub(super) tensor: TensorParallel,
}

/// A tie between two stages, as all ranks know it.
#[derive(Debug, Clone)]
struct TiePlan {
    owner_stage: usize,
    /// Where the parameter lies, on the ranks of the two stages.
    place: Option<TiePlace>,
}

#[derive(Debug, Clone)]
struct TiePlace {
    owns: bool,
    slot: usize,
    chunk: usize,
    range: Range<usize>,
    owner_name: String,
    alias_name: String,
}

/// This rank's end of a tie.
pub(super) struct TieLink {
    /// Two ranks, the owner first.
    pub(super) link: Box<dyn Communicator>,
    pub(super) owns: bool,
    pub(super) slot: usize,
    pub(super) chunk: usize,
    pub(super) range: Range<usize>,
    pub(super) owner_name: String,
    pub(super) alias_name: String,
}

impl fmt::Debug for TieLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TieLink")
            .field("owns", &self.owns)
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

impl TieLink {
    /// Brings the two parts of a micro-batch's gradient together: the sum on the owner, nothing on the other side.
    pub(super) fn exchange(
        &self,
        mut own: Vec<f32>,
        micro_batch: usize,
    ) -> Result<Option<Vec<f32>>, Error> {
        if !self.owns {
            return self.link.send(0, micro_batch as u64, own).map(|()| None);
        }
        let other = self.link.recv(1, micro_batch as u64)?;
        for (sum, part) in own.iter_mut().zip(other) {
            *sum += part;
        }
        Ok(Some(own))
    }
}

impl Groups {
    #[allow(
        clippy::too_many_arguments,
        reason = "everything a rank knows when it connects"
    )]
    pub(super) fn connect(
        world: Box<dyn Communicator>,
        settings: &RankSettings,
        at: Coordinates,
        ties: &[Tie],
        cuts: &Cuts,
        layout: &ParameterLayout,
        placements: &[Placement],
        sent: &Arc<AtomicU64>,
    ) -> Result<Self, Error> {
        let all_ties = plan_ties(settings, at, ties, cuts, layout, placements)?;
        let mut groups = Self {
            world,
            replicas: None,
            workers: Vec::new(),
            ties: Vec::new(),
            all_ties,
        };
        groups.split(settings, at, sent)?;
        Ok(groups)
    }

    /// Makes all groups anew in another world.
    pub(super) fn reconnect(
        &mut self,
        world: Box<dyn Communicator>,
        settings: &RankSettings,
        at: Coordinates,
        sent: &Arc<AtomicU64>,
    ) -> Result<(), Error> {
        self.world = world;
        self.split(settings, at, sent)
    }

    /// Splits the world. Every rank makes the same splits in the same order; where a rank has no part in a group, it is alone in one.
    fn split(
        &mut self,
        settings: &RankSettings,
        at: Coordinates,
        sent: &Arc<AtomicU64>,
    ) -> Result<(), Error> {
        let dims = settings.dims;
        let world = &*self.world;
        let alone = |world: &dyn Communicator| world.size() + world.rank();
        let metered = |color: usize, key: usize| -> Result<Box<dyn Communicator>, Error> {
            Ok(Metered::wrap(world.split(color, key)?, sent))
        };
        self.replicas = if dims.dp > 1 {
            Some(metered(at.pp * dims.tp + at.tp, at.dp)?)
        } else {
            None
        };
        let mut workers = Vec::new();
        for worker in 0..settings.workers_at_most {
            let present = worker < settings.workers;
            let color = |color: usize| if present { color } else { alone(world) };
            let tensor = if dims.tp > 1 {
                TensorParallel::new(metered(color(at.dp * dims.pp + at.pp), at.tp)?)
            } else {
                TensorParallel::alone()
            };
            let link = if dims.pp > 1 {
                metered(color(at.dp * dims.tp + at.tp), at.pp)?
            } else {
                single()?
            };
            if present {
                workers.push(WorkerGroup {
                    link,
                    tensor: tensor.with_sequence_parallel(settings.sequence_parallel),
                });
            }
        }
        self.workers = workers;
        let mut ties = Vec::new();
        for tie in &self.all_ties {
            let color = match tie.place {
                Some(_) => at.dp * dims.tp + at.tp,
                None => alone(world),
            };
            let link = metered(color, usize::from(at.pp != tie.owner_stage))?;
            if let Some(place) = &tie.place {
                ties.push(TieLink {
                    link,
                    owns: place.owns,
                    slot: place.slot,
                    chunk: place.chunk,
                    range: place.range.clone(),
                    owner_name: place.owner_name.clone(),
                    alias_name: place.alias_name.clone(),
                });
            }
        }
        self.ties = ties;
        Ok(())
    }
}

/// A group of one.
fn single() -> Result<Box<dyn Communicator>, Error> {
    let mut group = LocalCommunicator::group(1, std::time::Duration::from_secs(1))?;
    Ok(Box::new(group.swap_remove(0)))
}

/// The ties whose two ends lie on different stages.
fn plan_ties(
    settings: &RankSettings,
    at: Coordinates,
    ties: &[Tie],
    cuts: &Cuts,
    layout: &ParameterLayout,
    placements: &[Placement],
) -> Result<Vec<TiePlan>, Error> {
    let stages = settings.dims.pp;
    let mut plans = Vec::new();
    for tie in ties {
        let position = |block: usize| {
            cuts.position_of(block).ok_or_else(|| Error::Invalid {
                what: "tied parameter",
                problem: format!("no block {block}"),
            })
        };
        let (owner, alias) = (position(tie.owner_block)?, position(tie.alias_block)?);
        let (owner_stage, alias_stage) = (owner % stages, alias % stages);
        if owner_stage == alias_stage {
            continue;
        }
        let owner_name = canonical_name(tie.owner_block, &tie.owner_path);
        let alias_name = canonical_name(tie.alias_block, &tie.alias_path);
        let owns = at.pp == owner_stage;
        let place = if owns || at.pp == alias_stage {
            let name = if owns {
                owner_name.clone()
            } else {
                alias_name.clone()
            };
            let slot = (placements.iter().find(|placement| placement.name == name))
                .and_then(|placement| {
                    layout
                        .slots()
                        .iter()
                        .position(|slot| slot.id == placement.id)
                })
                .ok_or_else(|| Error::Invalid {
                    what: "tied parameter",
                    problem: format!("{name} is not a trainable parameter"),
                })?;
            Some(TiePlace {
                owns,
                slot,
                chunk: if owns { owner } else { alias } / stages,
                range: layout.slots()[slot].range(),
                owner_name,
                alias_name,
            })
        } else {
            None
        };
        plans.push(TiePlan { owner_stage, place });
    }
    Ok(plans)
}
