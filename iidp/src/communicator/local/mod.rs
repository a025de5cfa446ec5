//! Communication among the threads of one process.
//!
//! Large sums run as a reduce-scatter followed by an all-gather, cut into rounds of [`ROUND`] elements that are pipelined: in one phase a rank hands out its
//! parts of round k, adds up its own slice of round k - 1 in rank order, and collects round k - 2. What travels stays in the cache, so
//! memory sees each rank's buffer read once and written once, and the ranks share the additions evenly.
//!
//! Rust's aliasing rules keep a rank's `&mut` buffer from being read by another thread, so elements travel through buffers of the group:
//! uncontended locks, one per pair of ranks, taken once per round. There is no unsafe code.

mod world;

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::{Collective, CollectiveCall, Communicator, group_of_color, shard_range};
use crate::error::Error;
use world::{Entry, Group, Staging, World, lock, parity};

/// Elements of a buffer that one round moves, over all ranks: 512 KiB of f32, so that both parities of a pair's share stay in a core's second-level cache.
const ROUND: usize = 128 * 1024;

/// Buffers up to this many elements are shown whole to every rank, which adds them up itself: one meeting instead of two.
const SHORT: usize = 4 * 1024;

/// A rank of a group of threads.
///
/// # Examples
///
/// ```
/// use std::{thread, time::Duration};
/// use iidp::communicator::{Communicator, LocalCommunicator};
///
/// let group = LocalCommunicator::group(3, Duration::from_secs(5))?;
/// let ranks: Vec<_> = group
///     .into_iter()
///     .map(|comm| {
///         thread::spawn(move || {
///             let mut data = [comm.rank() as f32, 1.0];
///             comm.all_reduce_sum(&mut data).map(|()| data)
///         })
///     })
///     .collect();
/// for rank in ranks {
///     assert_eq!(rank.join().expect("no panic")?, [3.0, 3.0]);
/// }
/// # Ok::<(), iidp::Error>(())
/// ```
#[derive(Debug)]
pub struct LocalCommunicator {
    group: Arc<Group>,
    rank: usize,
    /// The last phase this rank arrived at.
    phase: Cell<u64>,
    /// Number of the next collective.
    sequence: Cell<u64>,
}

impl LocalCommunicator {
    /// The communicators of `size` ranks, in rank order, to be moved to as many threads. No wait will take longer than `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when `size` or `timeout` is zero.
    pub fn group(size: usize, timeout: Duration) -> Result<Vec<Self>, Error> {
        if size == 0 {
            return Err(Error::Invalid {
                what: "communicator size",
                problem: "0 ranks, expected at least 1".into(),
            });
        }
        if timeout.is_zero() {
            return Err(Error::Invalid {
                what: "communicator time-out",
                problem: "0 s, expected more than the longest step of the slowest rank".into(),
            });
        }
        let group = Group::new(Arc::new(World::default()), (0..size).collect(), timeout);
        Ok((0..size)
            .map(|rank| Self::new(Arc::clone(&group), rank))
            .collect())
    }

    fn new(group: Arc<Group>, rank: usize) -> Self {
        Self {
            group,
            rank,
            phase: Cell::new(0),
            sequence: Cell::new(0),
        }
    }

    /// Starts a collective; its first meeting is to be [`meet_first`](Self::meet_first).
    fn enter(
        &self,
        collective: Collective,
        length: usize,
        place: (usize, usize),
    ) -> Result<(), Error> {
        self.check_world()?;
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let entry = Entry {
            call: CollectiveCall { collective, length },
            sequence,
            place,
        };
        self.group.announce(self.rank, self.phase.get() + 1, entry);
        Ok(())
    }

    fn check_world(&self) -> Result<(), Error> {
        self.group
            .world
            .failure()
            .map_or(Ok(()), |failure| Err(failure.clone()))
    }

    /// Parity of the phase that the next meeting completes.
    fn side(&self) -> usize {
        parity(self.phase.get() + 1)
    }

    /// Arrives at the next phase and waits for everybody.
    fn meet(&self, collective: Collective) -> Result<(), Error> {
        let phase = self.phase.get() + 1;
        self.phase.set(phase);
        self.group.arrive(self.rank, phase);
        self.group.wait(self.rank, phase, collective)
    }

    /// [`meet`](Self::meet), then compares what the ranks have entered.
    fn meet_first(&self, collective: Collective) -> Result<Vec<Entry>, Error> {
        self.meet(collective)?;
        self.group.agreed(self.phase.get())
    }

    /// A collective in which the ranks only compare what they have called.
    #[cfg(feature = "cuda")]
    pub(super) fn agree(&self, collective: Collective, length: usize) -> Result<(), Error> {
        self.enter(collective, length, (0, 0))?;
        self.meet_first(collective).map(drop)
    }

    /// [`Communicator::split`], with the members of the new group by their ranks here.
    pub(super) fn split_off(&self, color: usize, key: usize) -> Result<(Self, Vec<usize>), Error> {
        let sequence = self.sequence.get();
        self.enter(Collective::Split, 0, (color, key))?;
        let entries = self.meet_first(Collective::Split)?;
        let places: Vec<[usize; 2]> = entries.iter().map(|entry| entry.place.into()).collect();
        let ranks = group_of_color(&places, color);
        let group = self.group.child(sequence, color, &ranks);
        let rank = ranks.iter().take_while(|rank| **rank != self.rank).count();
        Ok((Self::new(group, rank), ranks))
    }

    fn check_rank(&self, got: usize, operation: &str) -> Result<(), Error> {
        let size = self.size();
        if got < size {
            return Ok(());
        }
        let rank = self.group.members[self.rank];
        Err(self.group.world.fail(Error::RankOutOfRange {
            rank,
            got,
            size,
            operation: operation.into(),
        }))
    }

    fn all_reduce<T: Element>(&self, collective: Collective, data: &mut [T]) -> Result<(), Error> {
        self.enter(collective, data.len(), (0, 0))?;
        if self.size() == 1 {
            return Ok(());
        }
        if data.len() <= SHORT {
            return self.all_reduce_short(collective, data);
        }
        let staging = T::staging(&self.group);
        let rounds = data.len().div_ceil(ROUND);
        let slice = |round: usize, rank: usize| {
            let start = round * ROUND;
            let range = shard_range(ROUND.min(data.len() - start), self.size(), rank);
            start + range.start..start + range.end
        };
        let slice = |round: usize| {
            (0..self.size())
                .map(|rank| slice(round, rank))
                .collect::<Vec<_>>()
        };
        let slices: Vec<_> = (0..rounds).map(slice).collect();
        for step in 0..rounds + 2 {
            let side = self.side();
            if let Some(ranges) = slices.get(step) {
                self.hand_out(staging, side, data, ranges);
            }
            if let Some(ranges) = step.checked_sub(1).and_then(|round| slices.get(round)) {
                let own = &mut data[ranges[self.rank].clone()];
                self.add_up(staging, 1 - side, own);
                show(staging, side, self.rank, own);
            }
            if let Some(ranges) = step.checked_sub(2).and_then(|round| slices.get(round)) {
                self.collect(staging, 1 - side, data, ranges);
            }
            match step {
                0 => drop(self.meet_first(collective)?),
                _ if step <= rounds => self.meet(collective)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn all_reduce_short<T: Element>(
        &self,
        collective: Collective,
        data: &mut [T],
    ) -> Result<(), Error> {
        let staging = T::staging(&self.group);
        let side = self.side();
        show(staging, side, self.rank, data);
        self.meet_first(collective)?;
        for from in 0..self.size() {
            let shown = staging.shown[side][from]
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            if from == 0 {
                data.copy_from_slice(&shown);
            } else {
                add(data, &shown);
            }
        }
        Ok(())
    }

    /// Puts the elements of each other rank's range where that rank will add them.
    fn hand_out<T: Element>(
        &self,
        staging: &Staging<T>,
        side: usize,
        data: &[T],
        ranges: &[Range<usize>],
    ) {
        for (to, range) in ranges.iter().enumerate().filter(|(to, _)| *to != self.rank) {
            let mut part = lock(&staging.parts[side][self.rank * self.size() + to]);
            part.clear();
            part.extend_from_slice(&data[range.clone()]);
        }
    }

    /// Replaces this rank's elements by the sum over all ranks, in rank order.
    fn add_up<T: Element>(&self, staging: &Staging<T>, side: usize, own: &mut [T]) {
        /// Elements that stay in the first-level cache while all ranks' parts are added.
        const BLOCK: usize = 2048;
        let parts: Vec<_> = (0..self.size())
            .filter(|from| *from != self.rank)
            .map(|from| lock(&staging.parts[side][from * self.size() + self.rank]))
            .collect();
        let mut sum = [T::default(); BLOCK];
        for (block, own) in own.chunks_mut(BLOCK).enumerate() {
            let range = block * BLOCK..block * BLOCK + own.len();
            let sum = &mut sum[..own.len()];
            let (before, after) = parts.split_at(self.rank);
            match before.split_first() {
                None => add_all(own, after, &range),
                Some((first, rest)) => {
                    sum.copy_from_slice(&first[range.clone()]);
                    add_all(sum, rest, &range);
                    // own + sum has the same bits as sum + own.
                    add(own, sum);
                    add_all(own, after, &range);
                }
            }
        }
    }

    /// Reads what the other ranks show into their ranges.
    fn collect<T: Element>(
        &self,
        staging: &Staging<T>,
        side: usize,
        data: &mut [T],
        ranges: &[Range<usize>],
    ) {
        for (from, range) in ranges
            .iter()
            .enumerate()
            .filter(|(from, _)| *from != self.rank)
        {
            let shown = staging.shown[side][from]
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            data[range.clone()].copy_from_slice(&shown);
        }
    }

    /// Ranges of all shards in one round of a collective that works shard by shard.
    fn shard_rounds(&self, len: usize) -> Vec<Vec<Range<usize>>> {
        let each = (ROUND / self.size()).max(1);
        let rounds = len.div_ceil(self.size()).div_ceil(each);
        let part = |round: usize, rank: usize| {
            let shard = shard_range(len, self.size(), rank);
            let start = (shard.start + round * each).min(shard.end);
            start..(start + each).min(shard.end)
        };
        (0..rounds.max(1))
            .map(|round| (0..self.size()).map(|rank| part(round, rank)).collect())
            .collect()
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.all_reduce(Collective::AllReduceSum, data)
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.all_reduce(Collective::AllReduceSumF64, data)
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        let collective = Collective::ReduceScatterSum;
        self.enter(collective, data.len(), (0, 0))?;
        let shard = shard_range(data.len(), self.size(), self.rank);
        if self.size() == 1 {
            return Ok(shard);
        }
        let staging = &self.group.f32s;
        let rounds = self.shard_rounds(data.len());
        for step in 0..=rounds.len() {
            let side = self.side();
            if let Some(ranges) = rounds.get(step) {
                self.hand_out(staging, side, data, ranges);
            }
            if let Some(ranges) = step.checked_sub(1).and_then(|round| rounds.get(round)) {
                self.add_up(staging, 1 - side, &mut data[ranges[self.rank].clone()]);
            }
            match step {
                0 => drop(self.meet_first(collective)?),
                _ if step < rounds.len() => self.meet(collective)?,
                _ => {}
            }
        }
        Ok(shard)
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        let collective = Collective::AllGather;
        self.enter(collective, data.len(), (0, 0))?;
        if self.size() == 1 {
            return Ok(());
        }
        let staging = &self.group.f32s;
        for (step, ranges) in self.shard_rounds(data.len()).iter().enumerate() {
            let side = self.side();
            show(staging, side, self.rank, &data[ranges[self.rank].clone()]);
            if step == 0 {
                self.meet_first(collective)?;
            } else {
                self.meet(collective)?;
            }
            self.collect(staging, side, data, ranges);
        }
        Ok(())
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let collective = Collective::AllGatherBytes;
        self.enter(collective, 0, (0, 0))?;
        let slots = &self.group.bytes[self.side()];
        *slots[self.rank]
            .write()
            .unwrap_or_else(PoisonError::into_inner) = bytes.to_vec();
        self.meet_first(collective)?;
        Ok(slots
            .iter()
            .map(|slot| slot.read().unwrap_or_else(PoisonError::into_inner).clone())
            .collect())
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        self.check_rank(root, "broadcast")?;
        let collective = Collective::Broadcast { root };
        self.enter(collective, data.len(), (0, 0))?;
        if self.size() == 1 {
            return Ok(());
        }
        let staging = &self.group.f32s;
        let mut first = true;
        let rounds = data.len().div_ceil(ROUND).max(1);
        for round in 0..rounds {
            let end = data.len().min((round + 1) * ROUND);
            let chunk = &mut data[round * ROUND..end];
            let side = self.side();
            if self.rank == root {
                show(staging, side, root, chunk);
            }
            if std::mem::take(&mut first) {
                self.meet_first(collective)?;
            } else {
                self.meet(collective)?;
            }
            if self.rank != root {
                chunk.copy_from_slice(
                    &staging.shown[side][root]
                        .read()
                        .unwrap_or_else(PoisonError::into_inner),
                );
            }
        }
        Ok(())
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        self.check_world()?;
        self.check_rank(to, "send")?;
        self.group.post(self.rank, to, tag, data)
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        self.check_world()?;
        self.check_rank(from, "recv")?;
        self.group.fetch(self.rank, from, tag)
    }

    fn barrier(&self) -> Result<(), Error> {
        self.enter(Collective::Barrier, 0, (0, 0))?;
        self.meet_first(Collective::Barrier).map(drop)
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        let (end, _) = self.split_off(color, key)?;
        Ok(Box::new(end))
    }

    fn abort(&self, reason: &str) -> Error {
        let rank = self.group.members[self.rank];
        self.group.world.fail(Error::Aborted {
            rank,
            reason: reason.into(),
        })
    }
}

impl Drop for LocalCommunicator {
    fn drop(&mut self) {
        self.group.leave(self.rank, std::thread::panicking());
    }
}

/// Shows `data` to all ranks.
fn show<T: Element>(staging: &Staging<T>, side: usize, rank: usize, data: &[T]) {
    let mut shown = staging.shown[side][rank]
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    shown.clear();
    shown.extend_from_slice(data);
}

fn add<T: Element>(sum: &mut [T], other: &[T]) {
    for (sum, other) in sum.iter_mut().zip(other) {
        *sum += *other;
    }
}

fn add_all<T: Element>(
    sum: &mut [T],
    parts: &[impl std::ops::Deref<Target = Vec<T>>],
    range: &Range<usize>,
) {
    for part in parts {
        add(sum, &part[range.clone()]);
    }
}

/// What can be summed.
trait Element: Copy + Default + std::ops::AddAssign + 'static {
    fn staging(group: &Group) -> &Staging<Self>;
}

impl Element for f32 {
    fn staging(group: &Group) -> &Staging<Self> {
        &group.f32s
    }
}

impl Element for f64 {
    fn staging(group: &Group) -> &Staging<Self> {
        &group.f64s
    }
}
