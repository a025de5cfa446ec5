//! The state of a run, whatever its layout.

use std::collections::BTreeMap;

use burn::module::ParamId;
use serde::{Deserialize, Serialize};

use super::partition::Placement;
use crate::bucket::ParameterSlot;
use crate::communicator::Communicator;
use crate::optimizer::OptimizerState;
use crate::{Error, ParameterLayout, ShardSpec};

/// Parameters, optimizer moments and step number of a run, by canonical name: `blocks.i.p` for parameter `p` of block `i`. It does not depend on the
/// layout that it was gathered from.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct HybridState {
    /// Steps taken.
    pub step: u64,
    /// Trainable tensors. A tied parameter has one entry, that of the block nearer to the input.
    pub parameters: BTreeMap<String, ParameterState>,
    /// Frozen tensors and running statistics.
    pub buffers: BTreeMap<String, ParameterState>,
}

/// A whole tensor and what the optimizer remembers of it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ParameterState {
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Elements in row-major order.
    pub values: Vec<f32>,
    /// The optimizer's moments by name, each as long as the values; none for a buffer.
    pub moments: BTreeMap<String, Vec<f32>>,
    /// Updates that the parameter has seen.
    pub updates: u64,
}

impl HybridState {
    /// The trainable tensors one after the other, in the order of their names.
    pub fn flat_parameters(&self) -> Vec<f32> {
        self.parameters
            .values()
            .flat_map(|parameter| parameter.values.iter().copied())
            .collect()
    }
}

/// A rank's shard of a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LocalTensor {
    /// Canonical name.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// How the whole tensor is cut.
    pub spec: ShardSpec,
    /// Whether the rank speaks for this shard: of several ranks that hold it, one does.
    pub owned: bool,
    /// The parameter on another stage that this is a copy of, by its canonical name.
    pub tied_to: Option<String>,
    /// Whether it is trained.
    pub trainable: bool,
    /// Elements that the rank holds, in row-major order of the shard.
    #[serde(skip)]
    pub values: Vec<f32>,
    /// Their moments.
    #[serde(skip)]
    pub moments: BTreeMap<String, Vec<f32>>,
    /// Updates that the parameter has seen.
    pub updates: u64,
}

/// Everything that a rank knows of its tensors, without their values.
pub(super) struct LocalIndex {
    /// By slot of the layout.
    pub(super) slots: Vec<LocalTensor>,
    /// By buffer of the layout.
    pub(super) buffers: Vec<LocalTensor>,
}

impl LocalIndex {
    /// `tied_to` gives the owner on another stage of a tied parameter, by canonical names; `first_of_group` says whether the rank speaks for replicated tensors.
    pub(super) fn new(
        layout: &ParameterLayout,
        placements: &[Placement],
        first_of_group: bool,
        tied_to: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        let by_id: BTreeMap<ParamId, &Placement> = placements
            .iter()
            .rev()
            .map(|placement| (placement.id, placement))
            .collect();
        let local = |slot: &ParameterSlot, trainable: bool| {
            let placement = by_id.get(&slot.id).ok_or_else(|| Error::Invalid {
                what: "parameter",
                problem: format!("{} is in no block", slot.path),
            })?;
            let split = placement.spec.dim().is_some();
            let tied_to = tied_to(&placement.name);
            Ok(LocalTensor {
                name: placement.name.clone(),
                shape: placement.shape.clone(),
                spec: placement.spec.clone(),
                owned: (split || first_of_group) && tied_to.is_none(),
                tied_to,
                trainable,
                values: Vec::new(),
                moments: BTreeMap::new(),
                updates: 0,
            })
        };
        let all = |slots: &[ParameterSlot], trainable| {
            slots
                .iter()
                .map(|slot| local(slot, trainable))
                .collect::<Result<Vec<_>, Error>>()
        };
        Ok(Self {
            slots: all(layout.slots(), true)?,
            buffers: all(layout.buffers(), false)?,
        })
    }

    /// The rank's tensors with their values.
    pub(super) fn export(
        &self,
        layout: &ParameterLayout,
        parameters: &[f32],
        buffers: &[f32],
        optimizer: &OptimizerState,
    ) -> Vec<LocalTensor> {
        let trained = self.slots.iter().zip(layout.slots()).enumerate();
        let trained = trained.map(|(index, (local, slot))| LocalTensor {
            values: parameters[slot.range()].to_vec(),
            moments: optimizer
                .moments
                .iter()
                .map(|(name, moment)| (name.clone(), moment[slot.range()].to_vec()))
                .collect(),
            updates: optimizer.steps[index],
            ..local.clone()
        });
        let frozen = self.buffers.iter().zip(layout.buffers());
        let frozen = frozen.map(|(local, slot)| LocalTensor {
            values: buffers[slot.range()].to_vec(),
            ..local.clone()
        });
        trained.chain(frozen).collect()
    }

    /// The rank's parts of a state: parameters, buffers, optimizer.
    pub(super) fn import(
        &self,
        layout: &ParameterLayout,
        state: &HybridState,
        tp: (usize, usize),
        moments: &[String],
    ) -> Result<(Vec<f32>, Vec<f32>, OptimizerState), Error> {
        let (size, rank) = tp;
        let find = |local: &LocalTensor| {
            let map = if local.trainable {
                &state.parameters
            } else {
                &state.buffers
            };
            let name = local.tied_to.as_ref().unwrap_or(&local.name);
            let found = map.get(name).ok_or_else(|| Error::Invalid {
                what: "state",
                problem: format!("no tensor {name}"),
            })?;
            if found.shape == local.shape {
                Ok(found)
            } else {
                Err(Error::Invalid {
                    what: "state",
                    problem: format!(
                        "{} has shape {:?}, expected {:?}",
                        local.name, found.shape, local.shape
                    ),
                })
            }
        };
        let cut =
            |local: &LocalTensor, whole: &[f32]| local.spec.cut(whole, &local.shape, size, rank);
        let mut optimizer = OptimizerState::default();
        let mut parameters = Vec::with_capacity(layout.len());
        for local in &self.slots {
            let found = find(local)?;
            parameters.extend(cut(local, &found.values)?);
            optimizer.steps.push(found.updates);
            for name in moments {
                let whole = found.moments.get(name).ok_or_else(|| Error::Invalid {
                    what: "state",
                    problem: format!("no moment {name} of {}", local.name),
                })?;
                let part = cut(local, whole)?;
                optimizer
                    .moments
                    .entry(name.clone())
                    .or_default()
                    .extend(part);
            }
        }
        let mut buffers = Vec::with_capacity(layout.buffer_len());
        for local in &self.buffers {
            buffers.extend(cut(local, &find(local)?.values)?);
        }
        Ok((parameters, buffers, optimizer))
    }
}

/// Puts the shards of all ranks together on every rank. `speaks` is false on ranks that only listen.
pub(super) fn gather(
    world: &dyn Communicator,
    tensors: Vec<LocalTensor>,
    speaks: bool,
    tp: (usize, usize),
    step: u64,
) -> Result<HybridState, Error> {
    let (size, rank) = tp;
    let tensors: Vec<LocalTensor> = tensors
        .into_iter()
        .filter(|tensor| speaks && tensor.owned)
        .collect();
    let mut state = HybridState {
        step,
        ..HybridState::default()
    };
    for message in world.all_gather_bytes(&encode(rank, &tensors)?)? {
        let (rank, tensors) = decode(&message)?;
        for local in tensors {
            let map = if local.trainable {
                &mut state.parameters
            } else {
                &mut state.buffers
            };
            let len = local.shape.iter().product();
            let whole = map
                .entry(local.name.clone())
                .or_insert_with(|| ParameterState {
                    shape: local.shape.clone(),
                    values: vec![0.0; len],
                    moments: BTreeMap::new(),
                    updates: local.updates,
                });
            let place = |part: &[f32], whole: &mut Vec<f32>| {
                whole.resize(len, 0.0);
                local.spec.place(part, whole, &local.shape, size, rank)
            };
            place(&local.values, &mut whole.values)?;
            for (name, moment) in &local.moments {
                place(moment, whole.moments.entry(name.clone()).or_default())?;
            }
        }
    }
    Ok(state)
}

#[derive(Serialize, Deserialize)]
struct Header {
    rank: usize,
    tensors: Vec<LocalTensor>,
    /// Per tensor its length and the names of its moments.
    parts: Vec<(usize, Vec<String>)>,
}

fn broken(problem: String) -> Error {
    Error::Invalid {
        what: "gathered state",
        problem,
    }
}

/// A header in JSON with its length before it, then the numbers in little-endian order.
fn encode(rank: usize, tensors: &[LocalTensor]) -> Result<Vec<u8>, Error> {
    let header = Header {
        rank,
        tensors: tensors.to_vec(),
        parts: tensors
            .iter()
            .map(|tensor| {
                (
                    tensor.values.len(),
                    tensor.moments.keys().cloned().collect(),
                )
            })
            .collect(),
    };
    let header = serde_json::to_vec(&header).map_err(|error| broken(error.to_string()))?;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    for tensor in tensors {
        for values in std::iter::once(&tensor.values).chain(tensor.moments.values()) {
            bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        }
    }
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Result<(usize, Vec<LocalTensor>), Error> {
    let short = || broken(format!("a message of {} bytes ends early", bytes.len()));
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or_else(short)?;
    let (header, mut rest) = rest
        .split_at_checked(u64::from_le_bytes(*length) as usize)
        .ok_or_else(short)?;
    let header: Header =
        serde_json::from_slice(header).map_err(|error| broken(error.to_string()))?;
    let mut take = |len: usize| -> Result<Vec<f32>, Error> {
        let (now, later) = rest.split_at_checked(4 * len).ok_or_else(short)?;
        rest = later;
        Ok(now
            .as_chunks::<4>()
            .0
            .iter()
            .map(|x| f32::from_le_bytes(*x))
            .collect())
    };
    let mut tensors = header.tensors;
    for (tensor, (len, moments)) in tensors.iter_mut().zip(header.parts) {
        tensor.values = take(len)?;
        for name in moments {
            tensor.moments.insert(name, take(len)?);
        }
    }
    Ok((header.rank, tensors))
}
