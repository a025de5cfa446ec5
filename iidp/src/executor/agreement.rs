//! How ranks agree whether a step was good, and share the micro-batches' losses.

use crate::Error;
use crate::communicator::Communicator;

/// Why a rank's part of a step failed.
#[derive(Debug)]
pub(crate) struct Failure {
    error: Error,
    micro_batch: usize,
    kind: Kind,
}

/// What the other ranks are told. The discriminants travel over the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Workload = 1,
    Panic = 2,
    NonFiniteLoss = 3,
    NonFiniteGradient = 4,
    Other = 5,
}

impl Kind {
    fn describe(code: f64) -> &'static str {
        [
            (Self::Workload, "the workload failed"),
            (Self::Panic, "the worker panicked"),
            (Self::NonFiniteLoss, "the loss is not finite"),
            (Self::NonFiniteGradient, "the gradient is not finite"),
        ]
        .into_iter()
        .find(|(kind, _)| f64::from(*kind as u8) == code)
        .map_or("the step could not be computed", |(_, text)| text)
    }
}

impl Failure {
    pub(crate) fn of(error: Error, micro_batch: usize) -> Self {
        let kind = match &error {
            Error::Workload { .. } => Kind::Workload,
            Error::WorkerPanicked { .. } => Kind::Panic,
            Error::NonFiniteLoss { .. } => Kind::NonFiniteLoss,
            Error::NonFiniteGradient { .. } => Kind::NonFiniteGradient,
            _ => Kind::Other,
        };
        Self {
            error,
            micro_batch,
            kind,
        }
    }
}

/// Losses of the micro-batches and failures of the ranks, summed over the ranks in one collective: each number has one
/// rank that sets it and is zero elsewhere, so the sum is exact.
#[derive(Debug)]
pub(crate) struct Agreement {
    /// Per rank: kind of failure (0 for none) and micro-batch; then one loss per micro-batch.
    numbers: Vec<f64>,
    ranks: usize,
    rank: usize,
    failure: Option<Failure>,
}

impl Agreement {
    pub(crate) fn new(ranks: usize, rank: usize, micro_batches: usize) -> Self {
        Self {
            numbers: vec![0.0; 2 * ranks + micro_batches],
            ranks,
            rank,
            failure: None,
        }
    }

    pub(crate) fn set_loss(&mut self, micro_batch: usize, loss: f64) {
        self.numbers[2 * self.ranks + micro_batch] = loss;
    }

    /// Records a failure of this rank. The first one counts.
    pub(crate) fn fail(&mut self, failure: Failure) {
        self.failure.get_or_insert(failure);
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Exchanges the numbers. Every rank succeeds, or none does.
    ///
    /// # Errors
    ///
    /// This rank's failure if it has one, otherwise that of the first other rank with one.
    pub(crate) fn settle(&mut self, communicator: &dyn Communicator) -> Result<(), Error> {
        if let Some(failure) = &self.failure {
            self.numbers[2 * self.rank] = f64::from(failure.kind as u8);
            self.numbers[2 * self.rank + 1] = failure.micro_batch as f64;
        }
        communicator.all_reduce_sum_f64(&mut self.numbers)?;
        if let Some(failure) = self.failure.take() {
            return Err(failure.error);
        }
        match (0..self.ranks).find(|rank| self.numbers[2 * rank] != 0.0) {
            None => Ok(()),
            Some(rank) => Err(Error::StepRolledBack {
                rank,
                micro_batch: self.numbers[2 * rank + 1] as usize,
                reason: Kind::describe(self.numbers[2 * rank]),
            }),
        }
    }

    pub(crate) fn into_losses(mut self) -> Vec<f64> {
        self.numbers.split_off(2 * self.ranks)
    }
}
