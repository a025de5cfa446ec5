//! Carrying a plan out.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;

use super::layout::Component;
use super::plan::{Move, ReshardPlan};
use super::region::{Strided, copy};
use super::schedule::{MESSAGE, Message, Turn, WINDOW, turns};
use super::state::{RankState, buffers_of};
use crate::Error;
use crate::communicator::Communicator;

/// Tag of the messages.
const DATA: u64 = 0x7265_7368_6172_6401;

/// Tag of what a receiver gives back for each message: its buffer, emptied.
const TAKEN: u64 = 0x7265_7368_6172_6402;

impl ReshardPlan {
    /// Moves this rank's state into the new layout; every rank of `communicator` calls it with the same plan and its own state. Ranks that hold nothing before give a default state, ranks that hold nothing
    /// afterwards get one.
    ///
    /// The old state is not touched: it is the caller's to drop once this has returned, and to go on with if it fails. When one rank fails, all do.
    /// Beside the new state, a rank needs four messages of 256 KiB for each rank that it exchanges something with. Values arrive bit for bit.
    ///
    /// # Errors
    ///
    /// [`Error::ReshardRefused`] on every rank, with the communicator as good as before, when the ranks have different plans or a rank's state does not fit
    /// the plan; communication errors when a rank is lost, late, or sends something torn: the communicator is of no more use then.
    /// A rank can only be lost unnoticed by the others after all of them have everything: then those return the new state.
    pub fn apply(
        &self,
        communicator: &dyn Communicator,
        state: &RankState,
    ) -> Result<RankState, Error> {
        let rank = communicator.rank();
        let steps = self.agree(communicator, state)?;
        let mut next = self.begin(rank, state);
        self.exchange(communicator, state, &mut next)?;
        communicator.barrier()?;
        Ok(self.finish(rank, next, &steps))
    }

    /// Moves the states of all ranks, where one process has them all: everything is copied once, straight to its place. `states` are by rank; ranks that they
    /// leave out at the end hold nothing. The copies are shared among the threads of the current rayon pool.
    ///
    /// # Errors
    ///
    /// [`Error::ReshardRefused`] when a state does not fit the plan.
    pub fn apply_in_process(&self, states: &[RankState]) -> Result<Vec<RankState>, Error> {
        let nothing = RankState::default();
        let state = |rank: usize| states.get(rank).unwrap_or(&nothing);
        let world = self.world_size().max(states.len());
        let mut steps = Steps::default();
        for rank in 0..world {
            state(rank)
                .check(&self.from, rank)
                .and_then(|()| steps.add(self, rank, &state(rank).steps))
                .map_err(|error| refused(rank, error.to_string()))?;
        }
        let mut incoming: Vec<Vec<&Move>> = vec![Vec::new(); world];
        for movement in self.moves() {
            incoming[movement.to].push(movement);
        }
        let moments = self.from.model().moments().len();
        let work = incoming.into_par_iter().enumerate();
        let done = work.map(|(rank, moves)| {
            let mut next = self.begin(rank, state(rank));
            for movement in moves {
                let source = state(movement.from).slices();
                for buffer in buffers_of(movement.component, moments) {
                    next.copy(movement, source[buffer], buffer);
                }
            }
            self.finish(rank, next, &steps)
        });
        Ok(done.collect())
    }

    /// Checks on every rank that all can go ahead; returns the step counts of all tensors.
    fn agree(&self, communicator: &dyn Communicator, state: &RankState) -> Result<Steps, Error> {
        let (rank, size) = (communicator.rank(), communicator.size());
        let problem = if size < self.world_size() {
            format!(
                "{size} ranks communicate, expected at least the {} of the plan",
                self.world_size()
            )
        } else {
            state
                .check(&self.from, rank)
                .err()
                .map_or_else(String::new, |error| error.to_string())
        };
        let greeting = Greeting {
            fingerprint: self.fingerprint(),
            steps: if problem.is_empty() {
                state.steps.clone()
            } else {
                Vec::new()
            },
            problem,
        };
        let greetings: Vec<Greeting> = communicator
            .all_gather_bytes(&greeting.encode())?
            .iter()
            .map(|bytes| Greeting::decode(bytes))
            .collect();
        let mut steps = Steps::default();
        for (other, greeting) in greetings.iter().enumerate() {
            if greeting.fingerprint != greetings[0].fingerprint {
                return Err(refused(other, "its plan is another than rank 0's".into()));
            }
            if !greeting.problem.is_empty() {
                return Err(refused(other, greeting.problem.clone()));
            }
            steps
                .add(self, other, &greeting.steps)
                .map_err(|error| refused(other, error.to_string()))?;
        }
        Ok(steps)
    }

    /// The new buffers of `rank`, with what it keeps in them.
    fn begin(&self, rank: usize, state: &RankState) -> Next {
        let moments = self.from.model().moments().len();
        let old = state.slices();
        let mut buffers = Vec::with_capacity(2 + moments);
        for component in Component::ALL {
            let elements = match component {
                Component::Parameters => self.to.trained_elements(rank),
                Component::Buffers => self.to.buffer_elements(rank),
                Component::Moments => self.to.moment_elements(rank),
            };
            for index in buffers_of(component, moments) {
                buffers.push(match old.get(index) {
                    Some(same) if self.is_unchanged(rank, component) => {
                        Buffer::Unchanged(Arc::clone(same))
                    }
                    _ => Buffer::Fresh(vec![0.0; elements]),
                });
            }
        }
        let mut next = Next(buffers);
        for movement in self.kept(rank) {
            for buffer in buffers_of(movement.component, moments) {
                next.copy(movement, old[buffer], buffer);
            }
        }
        next
    }

    fn finish(&self, rank: usize, next: Next, steps_of_all: &Steps) -> RankState {
        let buffers = next.0.into_iter().map(|buffer| match buffer {
            Buffer::Unchanged(values) => values,
            Buffer::Fresh(values) => Arc::new(values),
        });
        let layout = self.to.ranks().get(rank);
        if layout.is_none_or(|layout| layout.pieces.is_empty()) {
            return RankState::default();
        }
        let steps = self.to.trained_tensors(rank);
        let steps = steps.map(|tensor| steps_of_all.get(tensor)).collect();
        RankState::from_buffers(buffers.collect(), self.from.model().moments(), steps)
    }

    fn exchange(
        &self,
        communicator: &dyn Communicator,
        state: &RankState,
        next: &mut Next,
    ) -> Result<(), Error> {
        let old = state.slices();
        let mut spare = Vec::new();
        // Messages sent to each rank whose buffers have not come back yet.
        let mut out: BTreeMap<usize, usize> = BTreeMap::new();
        for turn in turns(self, communicator.rank()) {
            match turn {
                Turn::Send(to, number, message) => {
                    if number >= WINDOW {
                        spare.push(communicator.recv(to, TAKEN)?);
                    } else {
                        *out.entry(to).or_default() += 1;
                    }
                    let buffer = spare.pop().unwrap_or_default();
                    communicator.send(to, DATA, packed(&message, &old, buffer))?;
                }
                Turn::Receive(from, message) => {
                    let mut data = communicator.recv(from, DATA)?;
                    if data.len() != message.elements {
                        return Err(communicator.abort(&format!(
                            "re-sharding: a message from rank {from} has {} elements, expected {}",
                            data.len(),
                            message.elements
                        )));
                    }
                    next.unpack(&message, &data);
                    data.clear();
                    communicator.send(from, TAKEN, data)?;
                }
            }
        }
        // Nothing of this exchange is left behind for whoever uses the tag next.
        for (to, count) in out {
            for _ in 0..count {
                communicator.recv(to, TAKEN)?;
            }
        }
        Ok(())
    }
}

fn refused(rank: usize, problem: String) -> Error {
    Error::ReshardRefused { rank, problem }
}

/// The buffers of the new state, in the order of [`buffers_of`].
struct Next(Vec<Buffer>);

enum Buffer {
    /// The old one.
    Unchanged(Arc<Vec<f32>>),
    Fresh(Vec<f32>),
}

impl Next {
    /// Writable values of a buffer. A plan moves nothing into one that stays as it is.
    fn values(&mut self, buffer: usize) -> &mut [f32] {
        match &mut self.0[buffer] {
            Buffer::Fresh(values) => values,
            Buffer::Unchanged(values) => Arc::make_mut(values).as_mut_slice(),
        }
    }

    fn copy(&mut self, movement: &Move, from: &[f32], buffer: usize) {
        let (rows, columns) = (movement.region.rows(), movement.region.columns());
        let into = self.values(buffer);
        copy(from, movement.source, into, movement.target, rows, columns);
    }

    fn unpack(&mut self, message: &Message, data: &[f32]) {
        let mut offset = 0;
        for part in &message.parts {
            let source = Strided {
                offset,
                stride: part.columns,
            };
            let into = self.values(part.buffer);
            copy(data, source, into, part.target, part.rows, part.columns);
            offset += part.rows * part.columns;
        }
    }
}

/// The elements of a message, in a buffer that is used again.
fn packed(message: &Message, old: &[&Arc<Vec<f32>>], mut buffer: Vec<f32>) -> Vec<f32> {
    if buffer.capacity() == 0 {
        buffer.reserve_exact(MESSAGE);
    }
    for part in &message.parts {
        let (values, Strided { offset, stride }) = (old[part.buffer], part.source);
        if stride == part.columns {
            buffer.extend_from_slice(&values[offset..offset + part.rows * part.columns]);
            continue;
        }
        for row in 0..part.rows {
            let start = offset + row * stride;
            buffer.extend_from_slice(&values[start..start + part.columns]);
        }
    }
    buffer
}

/// Updates of each tensor, by position.
#[derive(Default)]
struct Steps(BTreeMap<usize, u64>);

impl Steps {
    /// Adds what a rank of the old layout counted; replicas must have counted the same.
    fn add(&mut self, plan: &ReshardPlan, rank: usize, steps: &[u64]) -> Result<(), Error> {
        for (tensor, &count) in plan.from.trained_tensors(rank).zip(steps) {
            let known = *self.0.entry(tensor).or_insert(count);
            if known != count {
                let name = &plan.from.model().tensors()[tensor].name;
                return Err(Error::Invalid {
                    what: "step counts of replicas",
                    problem: format!("{count} updates of {name} on one, {known} on another"),
                });
            }
        }
        Ok(())
    }

    fn get(&self, tensor: usize) -> u64 {
        self.0.get(&tensor).copied().unwrap_or(0)
    }
}

/// What a rank tells all others first: eight bytes of the plan's fingerprint, eight of the length of the step counts, these, and its problem.
struct Greeting {
    fingerprint: u64,
    steps: Vec<u64>,
    problem: String,
}

impl Greeting {
    fn encode(&self) -> Vec<u8> {
        let numbers = [self.fingerprint, self.steps.len() as u64];
        let mut bytes: Vec<u8> = numbers
            .iter()
            .chain(&self.steps)
            .flat_map(|number| number.to_le_bytes())
            .collect();
        bytes.extend_from_slice(self.problem.as_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Self {
        let (numbers, _) = bytes.as_chunks::<8>();
        let number = |index: usize| numbers.get(index).map_or(0, |n| u64::from_le_bytes(*n));
        let count = (number(1) as usize).min(numbers.len().saturating_sub(2));
        Self {
            fingerprint: number(0),
            steps: (2..2 + count).map(number).collect(),
            problem: String::from_utf8_lossy(bytes.get(8 * (2 + count)..).unwrap_or_default())
                .into_owned(),
        }
    }
}
