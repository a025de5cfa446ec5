//! How ranks add up their scalars.

use std::sync::{Arc, Barrier, Mutex, PoisonError};

use crate::error::Result;

/// A group of ranks that can add up a few numbers: all that this crate asks of a communication library.
///
/// Every rank of the group must call [`all_reduce_sum`](Gather::all_reduce_sum) the same number of times, with slices of
/// the same length. All ranks must receive the same bits, or they could decide differently.
pub trait Gather {
    /// Replaces each scalar by its sum over all ranks.
    ///
    /// # Errors
    /// [`Error::Gather`](crate::Error::Gather) with the communicator's own error as its source.
    fn all_reduce_sum(&mut self, scalars: &mut [f64]) -> Result<()>;
}

impl<T: Gather + ?Sized> Gather for &mut T {
    fn all_reduce_sum(&mut self, scalars: &mut [f64]) -> Result<()> {
        (**self).all_reduce_sum(scalars)
    }
}

impl<T: Gather + ?Sized> Gather for Box<T> {
    fn all_reduce_sum(&mut self, scalars: &mut [f64]) -> Result<()> {
        (**self).all_reduce_sum(scalars)
    }
}

/// The only rank there is: its sums are what it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SingleRank;

impl Gather for SingleRank {
    fn all_reduce_sum(&mut self, _scalars: &mut [f64]) -> Result<()> {
        Ok(())
    }
}

/// Ranks that are threads of one process. Sums are added in the order of the ranks, so they do not depend on which
/// thread comes first.
///
/// # Examples
/// ```
/// use adaptive_batch::{Gather, ThreadGather};
/// let sums: Vec<f64> = std::thread::scope(|scope| {
///     let ranks: Vec<_> = ThreadGather::group(3)
///         .into_iter()
///         .enumerate()
///         .map(|(rank, mut gather)| {
///             scope.spawn(move || {
///                 let mut scalars = [rank as f64];
///                 gather.all_reduce_sum(&mut scalars).map(|()| scalars[0])
///             })
///         })
///         .collect();
///     ranks.into_iter().map(|r| r.join().unwrap().unwrap()).collect()
/// });
/// assert_eq!(sums, [3.0; 3]);
/// ```
#[derive(Debug)]
pub struct ThreadGather {
    rank: usize,
    meeting: Arc<Meeting>,
}

#[derive(Debug)]
struct Meeting {
    parts: Mutex<Vec<Vec<f64>>>,
    barrier: Barrier,
}

impl ThreadGather {
    /// One handle per rank, to be moved into the threads.
    pub fn group(ranks: usize) -> Vec<Self> {
        let meeting = Arc::new(Meeting {
            parts: Mutex::new(vec![Vec::new(); ranks]),
            barrier: Barrier::new(ranks),
        });
        (0..ranks)
            .map(|rank| Self {
                rank,
                meeting: Arc::clone(&meeting),
            })
            .collect()
    }
}

impl Gather for ThreadGather {
    fn all_reduce_sum(&mut self, scalars: &mut [f64]) -> Result<()> {
        let parts = || {
            self.meeting
                .parts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        parts()[self.rank] = scalars.to_vec();
        self.meeting.barrier.wait();
        let lengths_agree = {
            let parts = parts();
            let agree = parts.iter().all(|part| part.len() == scalars.len());
            if agree {
                for (i, scalar) in scalars.iter_mut().enumerate() {
                    *scalar = parts.iter().map(|part| part[i]).sum();
                }
            }
            agree
        };
        // No rank may hand in the next part before all have read this one.
        self.meeting.barrier.wait();
        if lengths_agree {
            Ok(())
        } else {
            Err(crate::Error::Gather(
                "ranks came with different numbers of scalars".into(),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_differ_are_an_error_on_every_rank() {
        let results: Vec<bool> = std::thread::scope(|scope| {
            let handles: Vec<_> = ThreadGather::group(2)
                .into_iter()
                .enumerate()
                .map(|(rank, mut gather)| {
                    scope.spawn(move || gather.all_reduce_sum(&mut vec![1.0; rank + 1]).is_err())
                })
                .collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        assert_eq!(results, [true, true]);
    }
}
