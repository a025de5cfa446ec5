//! Execution of one rank's part of a schedule.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Pass, Schedule, Task};
use crate::Error;
use crate::communicator::Communicator;

/// A tensor on its way between stages: an activation, or the gradient of one.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Elements in row-major order.
    pub values: Vec<f32>,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
}

impl Message {
    /// The elements, the sizes of the dimensions, and their number: f32 holds whole numbers up to 2^24 exactly.
    fn encode(self) -> Result<Vec<f32>, Error> {
        let Self { mut values, shape } = self;
        if let Some(size) = shape.iter().find(|size| **size > 1 << 24) {
            return Err(Error::Invalid {
                what: "pipeline message",
                problem: format!(
                    "a dimension of {size} in shape {shape:?}, expected at most {}",
                    1 << 24
                ),
            });
        }
        values.extend(shape.iter().map(|size| *size as f32));
        values.push(shape.len() as f32);
        Ok(values)
    }

    fn decode(mut values: Vec<f32>) -> Result<Self, Error> {
        let broken = |got: usize| Error::LengthMismatch {
            what: "pipeline message".to_owned(),
            got,
            expected: 1,
        };
        let rank = values.pop().ok_or_else(|| broken(0))? as usize;
        let at = values
            .len()
            .checked_sub(rank)
            .ok_or_else(|| broken(values.len()))?;
        let shape: Vec<usize> = values
            .split_off(at)
            .into_iter()
            .map(|size| size as usize)
            .collect();
        let expected = shape.iter().product();
        if values.len() != expected {
            return Err(Error::LengthMismatch {
                what: format!("pipeline message of shape {shape:?}"),
                got: values.len(),
                expected,
            });
        }
        Ok(Self { values, shape })
    }
}

/// What a rank computes in a schedule.
pub trait StageTasks {
    /// Passes a micro-batch through a chunk: `input` is what the position before it gave, `None` for the first. Returns what the next position gets,
    /// `None` at the last.
    ///
    /// # Errors
    ///
    /// Whatever keeps the task from being done; the schedule ends there.
    fn forward(
        &mut self,
        chunk: usize,
        micro_batch: usize,
        input: Option<Message>,
    ) -> Result<Option<Message>, Error>;

    /// Passes the gradient of a chunk's output back: `gradient` is `None` at the last position. Returns the gradient of the chunk's input, `None` for the
    /// first. For [`Pass::BackwardInput`] the gradients of the weights may be left to [`Self::backward_weight`].
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    fn backward(&mut self, task: Task, gradient: Option<Message>)
    -> Result<Option<Message>, Error>;

    /// The gradients of the weights that [`Self::backward`] left out.
    ///
    /// # Errors
    ///
    /// As [`Self::forward`].
    fn backward_weight(&mut self, chunk: usize, micro_batch: usize) -> Result<(), Error>;
}

/// When a rank did a task.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TaskTiming {
    /// The task.
    pub task: Task,
    /// Since the rank began the schedule.
    pub start: Duration,
    /// Without the wait for its input.
    pub duration: Duration,
}

/// Does all tasks of this rank, which is stage `link.rank()` of the schedule, in their order. Messages travel over `link`, whose ranks are the stages.
///
/// # Errors
///
/// [`Error::LengthMismatch`] if `link` has another number of ranks than the schedule; the tasks' and the communicator's errors.
pub fn run(
    schedule: &Schedule,
    link: &dyn Communicator,
    tasks: &mut dyn StageTasks,
) -> Result<Vec<TaskTiming>, Error> {
    if link.size() != schedule.stages() {
        return Err(Error::LengthMismatch {
            what: "ranks of a pipeline (one per stage)".to_owned(),
            got: link.size(),
            expected: schedule.stages(),
        });
    }
    let mut post = Post {
        link,
        schedule,
        kept: BTreeMap::new(),
    };
    let begin = Instant::now();
    let mut timings = Vec::with_capacity(schedule.tasks(link.rank()).len());
    for &task in schedule.tasks(link.rank()) {
        let message = post.fetch(task)?;
        let start = Instant::now();
        let answer = match task.pass {
            Pass::Forward => tasks.forward(task.chunk, task.micro_batch, message)?,
            Pass::Backward | Pass::BackwardInput => tasks.backward(task, message)?,
            Pass::BackwardWeight => {
                tasks.backward_weight(task.chunk, task.micro_batch)?;
                None
            }
        };
        timings.push(TaskTiming {
            task,
            start: start.saturating_duration_since(begin),
            duration: start.elapsed(),
        });
        post.send(task, answer)?;
    }
    Ok(timings)
}

/// Where messages come from and go to.
struct Post<'a> {
    link: &'a dyn Communicator,
    schedule: &'a Schedule,
    /// Messages from one chunk of this rank to another, by the receiver's tag.
    kept: BTreeMap<u64, Message>,
}

impl Post<'_> {
    /// The rank and chunk before (`forward`) or after a chunk of this rank in the model.
    fn neighbour(&self, chunk: usize, before: bool) -> Option<(usize, usize)> {
        let (rank, stages) = (self.link.rank(), self.link.size());
        let position = chunk * stages + rank;
        let other = if before {
            position.checked_sub(1)?
        } else {
            (position + 1 < stages * self.schedule.chunks).then_some(position + 1)?
        };
        Some((other % stages, other / stages))
    }

    /// Identifies the message to a chunk in a direction.
    fn tag(&self, forward: bool, chunk: usize, micro_batch: usize) -> u64 {
        ((micro_batch * self.schedule.chunks + chunk) * 2 + usize::from(forward)) as u64
    }

    fn fetch(&mut self, task: Task) -> Result<Option<Message>, Error> {
        let forward = match task.pass {
            Pass::Forward => true,
            Pass::Backward | Pass::BackwardInput => false,
            Pass::BackwardWeight => return Ok(None),
        };
        let Some((from, _)) = self.neighbour(task.chunk, forward) else {
            return Ok(None);
        };
        let tag = self.tag(forward, task.chunk, task.micro_batch);
        if from == self.link.rank() {
            return Ok(self.kept.remove(&tag));
        }
        Message::decode(self.link.recv(from, tag)?).map(Some)
    }

    fn send(&mut self, task: Task, message: Option<Message>) -> Result<(), Error> {
        let forward = task.pass == Pass::Forward;
        let neighbour = self.neighbour(task.chunk, !forward);
        let (Some(message), Some((to, chunk))) = (message, neighbour) else {
            return Ok(());
        };
        let tag = self.tag(forward, chunk, task.micro_batch);
        if to == self.link.rank() {
            self.kept.insert(tag, message);
            return Ok(());
        }
        self.link.send(to, tag, message.encode()?)
    }
}
