//! The ranks that share layers.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;

use super::deferred::DeferredGradients;
use super::exchange::{Exchange, Transfer, exchange};
use crate::Error;
use crate::communicator::{Communicator, shard_range};

/// A rank's handle on its tensor-parallel group. Clones share the communicator.
///
/// The methods that take tensors are collectives: every rank of the group calls them in the same order with tensors of the same shape. Since gradients cannot
/// report errors, a failure is kept: from then on the methods return tensors of the right shape and arbitrary values without communicating, and
/// [`check`](Self::check) returns it. Whoever computes a loss or a gradient calls it afterwards.
///
/// The exchange runs on the flex backend; on another device the methods panic in groups of more than one.
///
/// # Examples
///
/// ```
/// use std::{thread, time::Duration};
/// use burn::tensor::{Device, Tensor};
/// use iidp::LocalCommunicator;
/// use iidp::tensor_parallel::TensorParallel;
///
/// let ranks: Vec<_> = LocalCommunicator::group(2, Duration::from_secs(5))?
///     .into_iter()
///     .map(|end| {
///         thread::spawn(move || {
///             let group = TensorParallel::new(Box::new(end));
///             let device = Device::flex().autodiff();
///             let x = Tensor::<1>::from_floats([1.0 + group.rank() as f32], &device).require_grad();
///             // Forward the sum over ranks, backward the identity.
///             let sum = group.reduce(x.clone());
///             let mut gradients = (sum.clone() * 5.0).sum().backward();
///             group.check()?;
///             Ok::<_, iidp::Error>((sum.into_scalar::<f32>(), x.grad_remove(&mut gradients).unwrap().into_scalar::<f32>()))
///         })
///     })
///     .collect();
/// for rank in ranks {
///     assert_eq!(rank.join().unwrap()?, (3.0, 5.0));
/// }
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Clone)]
pub struct TensorParallel {
    shared: Option<Arc<Shared>>,
    rank: usize,
    size: usize,
    sequence: bool,
    deferred: Option<DeferredGradients>,
}

struct Shared {
    communicator: Mutex<Box<dyn Communicator>>,
    failure: Mutex<Option<Error>>,
}

impl fmt::Debug for TensorParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorParallel")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("sequence", &self.sequence)
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TensorParallel {
    /// A group of one: every operator is the identity.
    pub const fn alone() -> Self {
        Self {
            shared: None,
            rank: 0,
            size: 1,
            sequence: false,
            deferred: None,
        }
    }

    /// The group that `communicator` connects.
    pub fn new(communicator: Box<dyn Communicator>) -> Self {
        let (rank, size) = (communicator.rank(), communicator.size());
        if size == 1 {
            return Self::alone();
        }
        Self {
            shared: Some(Arc::new(Shared {
                communicator: Mutex::new(communicator),
                failure: Mutex::new(None),
            })),
            rank,
            size,
            sequence: false,
            deferred: None,
        }
    }

    /// Whether the regions between the pairs of cut layers hold only this rank's part of the tokens. Off by default; without effect in a group of one.
    #[must_use]
    pub const fn with_sequence_parallel(mut self, sequence: bool) -> Self {
        self.sequence = sequence && self.size > 1;
        self
    }

    /// A handle with which the linear layers leave the gradients of their weights to `gradients`.
    #[must_use]
    pub fn deferring(&self, gradients: &DeferredGradients) -> Self {
        Self {
            deferred: Some(gradients.clone()),
            ..self.clone()
        }
    }

    pub(super) const fn deferred(&self) -> Option<&DeferredGradients> {
        self.deferred.as_ref()
    }

    /// This rank, in `0..size`.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Whether the group is sequence-parallel.
    pub const fn is_sequence_parallel(&self) -> bool {
        self.sequence
    }

    /// The failure of the group, if there was one.
    ///
    /// # Errors
    ///
    /// The first error of the communicator.
    pub fn check(&self) -> Result<(), Error> {
        match &self.shared {
            Some(shared) => lock(&shared.failure).clone().map_or(Ok(()), Err),
            None => Ok(()),
        }
    }

    /// **f**: the identity; backward the sum over ranks. Where a tensor that all ranks hold enters a layer cut by columns, and around a replicated
    /// parameter of a sequence-parallel region.
    #[must_use]
    pub fn copy<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply(x, Transfer::Keep, Transfer::Sum)
    }

    /// **g**: the sum over ranks; backward the identity. Where the partial results of a layer cut by rows leave it.
    #[must_use]
    pub fn reduce<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply(x, Transfer::Sum, Transfer::Keep)
    }

    /// The ranks' parts of the tokens `[samples, tokens / t, width]` put together; backward the sum over ranks of this rank's part.
    #[must_use]
    pub fn gather_tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.by_tokens(x, Transfer::Gather, Transfer::Scatter)
    }

    /// This rank's part of the tokens of the sum over ranks of `[samples, tokens, width]`; backward the parts put together.
    #[must_use]
    pub fn scatter_tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.by_tokens(x, Transfer::Scatter, Transfer::Gather)
    }

    /// This rank's part of the tokens of a tensor `[samples, tokens, width]` that all ranks hold; backward the parts put together.
    #[must_use]
    pub fn split_tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.by_tokens(x, Transfer::Split, Transfer::Gather)
    }

    /// The ranks' parts of the tokens put together, where every rank then does the same with all of them; backward this rank's part of the
    /// gradient, which is the same on all ranks.
    #[must_use]
    pub fn collect_tokens(&self, x: Tensor<3>) -> Tensor<3> {
        self.by_tokens(x, Transfer::Gather, Transfer::Split)
    }

    /// The largest element over ranks, place by place; no gradient passes.
    #[must_use]
    pub fn max<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.apply(x.detach(), Transfer::Max, Transfer::Keep)
    }

    /// What enters a pair of cut layers: f, or all tokens in a sequence-parallel group.
    #[must_use]
    pub fn enter(&self, x: Tensor<3>) -> Tensor<3> {
        if self.sequence {
            self.gather_tokens(x)
        } else {
            self.copy(x)
        }
    }

    /// What leaves a pair of cut layers: g, or this rank's tokens in a sequence-parallel group.
    #[must_use]
    pub fn leave(&self, x: Tensor<3>) -> Tensor<3> {
        if self.sequence {
            self.scatter_tokens(x)
        } else {
            self.reduce(x)
        }
    }

    /// A replicated parameter as it is used between the pairs: in a sequence-parallel group each rank's tokens give a part of its gradient.
    #[must_use]
    pub fn between<const D: usize>(&self, parameter: Tensor<D>) -> Tensor<D> {
        if self.sequence {
            self.copy(parameter)
        } else {
            parameter
        }
    }

    /// Checks that the ranks can share the tokens of a sequence.
    ///
    /// # Errors
    ///
    /// [`Error::Indivisible`] in a sequence-parallel group whose size does not divide `tokens`.
    pub fn check_tokens(&self, tokens: usize) -> Result<(), Error> {
        if self.sequence {
            crate::shard::check_divides("sequence length", tokens, "tp", self.size)
        } else {
            Ok(())
        }
    }

    fn by_tokens(&self, x: Tensor<3>, forward: Transfer, backward: Transfer) -> Tensor<3> {
        if self.size == 1 {
            return x;
        }
        // Parts are joined along the first dimension, where a rank's part is contiguous.
        self.apply(x.swap_dims(0, 1), forward, backward)
            .swap_dims(0, 1)
    }

    fn apply<const D: usize>(
        &self,
        x: Tensor<D>,
        forward: Transfer,
        backward: Transfer,
    ) -> Tensor<D> {
        if self.size == 1 {
            return x;
        }
        exchange(
            x,
            Exchange {
                group: self.clone(),
                forward,
                backward,
            },
        )
    }

    /// Moves the elements of a tensor. The first dimension of a tensor that is gathered, scattered or split is what is cut.
    pub(super) fn transfer(&self, transfer: Transfer, mut values: Vec<f32>) -> Vec<f32> {
        let Some(shared) = &self.shared else {
            return values;
        };
        let len = values.len();
        let own = shard_range(len, self.size, self.rank);
        if transfer == Transfer::Split {
            return values[own].to_vec();
        }
        let communicator = lock(&shared.communicator);
        let mut failure = lock(&shared.failure);
        let gathered = |values: &[f32]| {
            let mut all = vec![0.0; len * self.size];
            all[self.rank * len..(self.rank + 1) * len].copy_from_slice(values);
            all
        };
        let outcome = match transfer {
            Transfer::Keep | Transfer::Split => Ok(values),
            _ if failure.is_some() => Ok(match transfer {
                Transfer::Gather => gathered(&values),
                Transfer::Scatter => values[own.clone()].to_vec(),
                _ => values,
            }),
            Transfer::Sum => communicator.all_reduce_sum(&mut values).map(|()| values),
            Transfer::Scatter => {
                let result = communicator.reduce_scatter_sum(&mut values);
                result.map(|own| values[own].to_vec())
            }
            Transfer::Gather => {
                let mut all = gathered(&values);
                communicator.all_gather(&mut all).map(|()| all)
            }
            Transfer::Max => {
                let mut all = gathered(&values);
                communicator.all_gather(&mut all).map(|()| {
                    for part in all.chunks(len.max(1)) {
                        for (max, x) in values.iter_mut().zip(part) {
                            *max = max.max(*x);
                        }
                    }
                    values
                })
            }
        };
        outcome.unwrap_or_else(|error| {
            *failure = Some(error);
            vec![
                0.0;
                match transfer {
                    Transfer::Gather => len * self.size,
                    Transfer::Scatter => own.len(),
                    _ => len,
                }
            ]
        })
    }
}
