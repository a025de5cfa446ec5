//! Counts what a rank sends.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Error;
use crate::communicator::Communicator;

/// A communicator that adds the bytes that its rank sends to a counter, as an algorithm that moves the least would: of an all-reduce of `b` bytes over `n` ranks
/// each sends `2 b (n - 1) / n`, of a reduce-scatter or all-gather half of that.
#[derive(Debug)]
pub(super) struct Metered {
    inner: Box<dyn Communicator>,
    sent: Arc<AtomicU64>,
}

impl Metered {
    pub(super) fn wrap(
        inner: Box<dyn Communicator>,
        sent: &Arc<AtomicU64>,
    ) -> Box<dyn Communicator> {
        Box::new(Self {
            inner,
            sent: Arc::clone(sent),
        })
    }

    fn count(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// A rank's share of a collective over all other ranks, `rounds` of which are needed.
    fn count_shared(&self, bytes: usize, rounds: usize) {
        let n = self.inner.size();
        self.count(rounds * bytes * (n - 1) / n);
    }
}

impl Communicator for Metered {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.count_shared(size_of_val(data), 2);
        self.inner.all_reduce_sum(data)
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.count_shared(size_of_val(data), 2);
        self.inner.all_reduce_sum_f64(data)
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        self.count_shared(size_of_val(data), 1);
        self.inner.reduce_scatter_sum(data)
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        self.count_shared(size_of_val(data), 1);
        self.inner.all_gather(data)
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        self.count(bytes.len() * (self.size() - 1));
        self.inner.all_gather_bytes(bytes)
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        if self.rank() == root && self.size() > 1 {
            self.count(size_of_val(data));
        }
        self.inner.broadcast(data, root)
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        self.count(size_of_val(data.as_slice()));
        self.inner.send(to, tag, data)
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        self.inner.recv(from, tag)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.inner.barrier()
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        Ok(Self::wrap(self.inner.split(color, key)?, &self.sent))
    }

    fn abort(&self, reason: &str) -> Error {
        self.inner.abort(reason)
    }
}
