//! Communication among processes over MPI.
//!
//! Collectives are built from non-blocking point-to-point transfers, which is what makes the promises of the parent module possible: a wait is a loop that polls, looks
//! for notices of failure and ends at the time-out, and sums are taken in rank order. A collective starts with an exchange of its header among all ranks; an all-reduce
//! then moves each rank's slices to the rank that adds them and the sums back, in pipelined rounds as among threads. That is bandwidth-optimal, with
//! O(n) messages per rank: meant for one process per machine or device, not for thousands of ranks in one group.

mod link;
mod world;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::{Collective, CollectiveCall, Communicator, group_of_color, shard_range};
use crate::error::{Error, Loss};
use link::{Link, Transfer};
use world::World;

/// Elements of a buffer that one round moves, over all ranks.
const ROUND: usize = 256 * 1024;

/// Bytes of a long message that travel in one transfer.
const PIECE: usize = 64 << 20;

/// Words of a header: operation, sequence number, length, two that the operation defines.
const HEADER: usize = 5;

/// What a message is. Messages of one kind between two ranks keep their order.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Header = 2,
    Part,
    Result,
    Envelope,
    Letter,
}

/// Messages by sender and tag.
type Inbox = BTreeMap<(usize, u64), VecDeque<Vec<f32>>>;

/// A process among those that `mpirun`, Slurm or an MPI operator started together.
///
/// A rank that panics or aborts tells the others; a rank that is killed ends the others by their time-out, unless the launcher ends them first (as `mpirun` does by
/// default). After a failure MPI is not finalised, since that would wait for the dead: let the process end with an error code.
///
/// When the last communicator of a process is dropped it waits, up to the time-out, for the other ranks to do the same, and finalises MPI. Drop it on the thread that
/// started the world where the MPI library insists on being finalised there.
#[derive(Debug)]
pub struct MpiCommunicator {
    /// None only while it is dropped.
    link: Option<Link>,
    /// World ranks of the members.
    members: Vec<usize>,
    rank: usize,
    sequence: Cell<u64>,
    /// Transfers that nobody waits for.
    outgoing: RefCell<Vec<Transfer>>,
    /// Buffers of earlier transfers, by length.
    spare: RefCell<BTreeMap<usize, Vec<Box<[u8]>>>>,
    /// Point-to-point messages that came before they were asked for, by sender and tag.
    inbox: RefCell<Inbox>,
    world: Arc<World>,
}

impl MpiCommunicator {
    /// Initialises MPI and returns this process's end of the group of all processes. No wait will take longer than `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the time-out is zero, when MPI was initialised before, or when the library does not support calls from many threads.
    pub fn world(timeout: Duration) -> Result<Self, Error> {
        if timeout.is_zero() {
            return Err(Error::Invalid {
                what: "communicator time-out",
                problem: "0 s, expected more than the longest step of the slowest rank".into(),
            });
        }
        let (world, link) = World::start(timeout)?;
        let members = (0..link.size()).collect();
        Ok(Self::new(link, members, Arc::new(world)))
    }

    fn new(link: Link, members: Vec<usize>, world: Arc<World>) -> Self {
        let rank = link.rank();
        Self {
            link: Some(link),
            members,
            rank,
            sequence: Cell::new(0),
            outgoing: RefCell::default(),
            spare: RefCell::default(),
            inbox: RefCell::default(),
            world,
        }
    }

    fn link(&self) -> &Link {
        self.link
            .as_ref()
            .expect("a communicator has its link until it is dropped")
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.members.len()).filter(move |other| *other != rank)
    }

    /// A buffer of `length` bytes with any contents.
    fn buffer(&self, length: usize) -> Box<[u8]> {
        let spare = self.spare.borrow_mut().get_mut(&length).and_then(Vec::pop);
        spare.unwrap_or_else(|| vec![0; length].into())
    }

    /// Keeps a buffer for later; enough of them for the rounds of an all-reduce that are on their way.
    fn recycle(&self, buffer: Box<[u8]>) {
        let mut spare = self.spare.borrow_mut();
        if spare.len() > 16 {
            spare.clear();
        }
        let same = spare.entry(buffer.len()).or_default();
        if same.len() < 8 * self.members.len() {
            same.push(buffer);
        }
    }

    fn post(&self, to: usize, kind: Kind, bytes: Box<[u8]>) {
        let transfer = self.link().send(to, kind as i32, bytes);
        self.outgoing.borrow_mut().push(transfer);
    }

    fn expect(&self, from: usize, kind: Kind, length: usize) -> (usize, Transfer) {
        (
            from,
            self.link().receive(from, kind as i32, self.buffer(length)),
        )
    }

    /// Ends the transfers that are complete.
    fn progress(&self) {
        let mut outgoing = self.outgoing.borrow_mut();
        let mut at = 0;
        while at < outgoing.len() {
            if outgoing[at].poll() {
                if let Some(buffer) = outgoing.swap_remove(at).into_buffer() {
                    self.recycle(buffer);
                }
            } else {
                at += 1;
            }
        }
    }

    /// Waits until `done` gives something. `missing` tells whom it waits for.
    fn wait<R>(
        &self,
        operation: &dyn Fn() -> String,
        missing: impl Fn() -> Vec<usize>,
        mut done: impl FnMut() -> Option<R>,
    ) -> Result<R, Error> {
        let deadline = Instant::now() + self.world.timeout;
        for turn in 1_u32.. {
            if let Some(result) = done() {
                return Ok(result);
            }
            self.progress();
            // Notices are rare, and looking for them is not free.
            if turn.is_multiple_of(16) {
                self.world.check()?;
                let missing = || {
                    missing()
                        .into_iter()
                        .map(|rank| self.members[rank])
                        .collect::<Vec<_>>()
                };
                if let Some(lost) = self.world.lost(&missing()) {
                    let noticed = format!("in {} by rank {}", operation(), self.members[self.rank]);
                    return Err(self.world.fail(&Error::RankLost {
                        rank: lost,
                        loss: Loss::Left,
                        noticed,
                    }));
                }
                if Instant::now() >= deadline {
                    return Err(self.world.fail(&Error::Timeout {
                        rank: self.members[self.rank],
                        missing: missing(),
                        operation: operation(),
                        timeout: self.world.timeout,
                    }));
                }
            }
            thread::yield_now();
        }
        unreachable!("the loop ends by its deadline")
    }

    /// Waits for all transfers; their buffers in the same order.
    fn finish(
        &self,
        operation: &dyn Fn() -> String,
        transfers: Vec<(usize, Transfer)>,
    ) -> Result<Vec<Box<[u8]>>, Error> {
        let transfers = RefCell::new(transfers);
        let pending = || {
            transfers
                .borrow_mut()
                .iter_mut()
                .filter_map(|(from, transfer)| (!transfer.poll()).then_some(*from))
                .collect::<Vec<_>>()
        };
        self.wait(operation, pending, || pending().is_empty().then_some(()))?;
        Ok(transfers
            .into_inner()
            .into_iter()
            .filter_map(|(_, transfer)| transfer.into_buffer())
            .collect())
    }

    /// Starts a collective: tells the others its header.
    fn enter(
        &self,
        collective: Collective,
        length: usize,
        place: [u64; 2],
    ) -> Result<Entered, Error> {
        self.world.check()?;
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let header = [
            code(collective),
            sequence,
            length as u64,
            place[0],
            place[1],
        ];
        let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
        for to in self.others() {
            self.post(to, Kind::Header, bytes.clone().into());
        }
        let replies = self
            .others()
            .map(|from| self.expect(from, Kind::Header, 8 * HEADER))
            .collect();
        Ok(Entered {
            collective,
            header,
            replies,
        })
    }

    /// Waits for the headers of all ranks and compares them; they are returned in rank order.
    fn agree(&self, entered: Entered) -> Result<Vec<[u64; HEADER]>, Error> {
        let Entered {
            collective,
            header,
            replies,
        } = entered;
        let replies = self.finish(&|| collective.to_string(), replies)?;
        let mut headers: Vec<[u64; HEADER]> = replies.iter().map(|bytes| words(bytes)).collect();
        headers.insert(self.rank, header);
        let first = headers[0];
        for (rank, header) in headers.iter().enumerate() {
            // The last two words of a split and of gathered bytes differ by rank; for a broadcast the first of them is the root.
            let root = collective_of(header)
                .is_some_and(|collective| matches!(collective, Collective::Broadcast { .. }));
            if header[..3] != first[..3] || (root && header[3] != first[3]) {
                let call = |header: &[u64; HEADER]| CollectiveCall {
                    collective: collective_of(header).unwrap_or(collective),
                    length: header[2] as usize,
                };
                return Err(self.world.fail(&Error::CollectiveMismatch {
                    sequence: first[1],
                    rank: self.members[rank],
                    got: call(header),
                    expected_rank: self.members[0],
                    expected: call(&first),
                }));
            }
        }
        Ok(headers)
    }

    fn check_rank(&self, got: usize, operation: &str) -> Result<(), Error> {
        let size = self.members.len();
        if got < size {
            return Ok(());
        }
        let rank = self.members[self.rank];
        Err(self.world.fail(&Error::RankOutOfRange {
            rank,
            got,
            size,
            operation: operation.into(),
        }))
    }

    /// Hands out the elements of each other rank's range.
    fn hand_out<T: Element>(&self, data: &[T], ranges: &[Range<usize>]) {
        for to in self.others().filter(|to| !ranges[*to].is_empty()) {
            self.post(to, Kind::Part, self.encode(&data[ranges[to].clone()]));
        }
    }

    /// What the others hand out of this rank's range. Nothing may be expected before the lengths are agreed on: a longer message would be fatal in MPI.
    fn expect_parts<T: Element>(&self, ranges: &[Range<usize>]) -> Vec<(usize, Transfer)> {
        let bytes = ranges[self.rank].len() * size_of::<T>();
        let others = self.others().filter(|_| bytes > 0);
        others
            .map(|from| self.expect(from, Kind::Part, bytes))
            .collect()
    }

    /// Replaces this rank's elements by the sum over all ranks, in rank order.
    fn add_up<T: Element>(
        &self,
        collective: Collective,
        own: &mut [T],
        parts: Vec<(usize, Transfer)>,
    ) -> Result<(), Error> {
        if own.is_empty() {
            return Ok(());
        }
        let parts = self.finish(&|| collective.to_string(), parts)?;
        let (before, after) = parts.split_at(self.rank);
        if let Some((first, rest)) = before.split_first() {
            let mine = own.to_vec();
            T::decode(own, first);
            for part in rest {
                T::add(own, part);
            }
            own.iter_mut()
                .zip(mine)
                .for_each(|(sum, mine)| *sum += mine);
        }
        for part in after {
            T::add(own, part);
        }
        for part in parts {
            self.recycle(part);
        }
        Ok(())
    }

    /// Shows this rank's elements to all others.
    fn show<T: Element>(&self, data: &[T], ranges: &[Range<usize>]) {
        let own = &data[ranges[self.rank].clone()];
        for to in self.others().filter(|_| !own.is_empty()) {
            self.post(to, Kind::Result, self.encode(own));
        }
    }

    /// What the others show, once the lengths are agreed on.
    fn expect_shown<T: Element>(&self, ranges: &[Range<usize>]) -> Vec<(usize, Transfer)> {
        let shown = self.others().filter(|from| !ranges[*from].is_empty());
        shown
            .map(|from| self.expect(from, Kind::Result, ranges[from].len() * size_of::<T>()))
            .collect()
    }

    /// Puts what the others show in its place.
    fn collect<T: Element>(
        &self,
        collective: Collective,
        data: &mut [T],
        ranges: &[Range<usize>],
        shown: Vec<(usize, Transfer)>,
    ) -> Result<(), Error> {
        let from: Vec<usize> = shown.iter().map(|(from, _)| *from).collect();
        for (from, bytes) in from
            .into_iter()
            .zip(self.finish(&|| collective.to_string(), shown)?)
        {
            T::decode(&mut data[ranges[from].clone()], &bytes);
            self.recycle(bytes);
        }
        Ok(())
    }

    fn encode<T: Element>(&self, data: &[T]) -> Box<[u8]> {
        let mut bytes = self.buffer(size_of_val(data));
        T::encode(data, &mut bytes);
        bytes
    }

    fn all_reduce<T: Element>(&self, collective: Collective, data: &mut [T]) -> Result<(), Error> {
        let entered = self.enter(collective, data.len(), [0; 2])?;
        let size = self.members.len();
        let ranges = |round: usize| -> Vec<Range<usize>> {
            let start = round * ROUND;
            let len = ROUND.min(data.len() - start);
            let slice = |rank| shard_range(len, size, rank);
            (0..size)
                .map(|rank| start + slice(rank).start..start + slice(rank).end)
                .collect()
        };
        let rounds: Vec<_> = (0..data.len().div_ceil(ROUND)).map(ranges).collect();
        let mut entered = Some(entered);
        // What is expected of round k - 1 to be added, and of round k - 2 to be collected.
        let (mut parts, mut shown) = (Vec::new(), Vec::new());
        for step in 0..rounds.len() + 2 {
            let round = |back: usize| step.checked_sub(back).and_then(|round| rounds.get(round));
            if let Some(ranges) = round(0) {
                self.hand_out(data, ranges);
            }
            if let Some(entered) = entered.take() {
                self.agree(entered)?;
            }
            let next = round(0)
                .map(|ranges| self.expect_parts::<T>(ranges))
                .unwrap_or_default();
            let now = std::mem::replace(&mut parts, next);
            if let Some(ranges) = round(1) {
                self.add_up(collective, &mut data[ranges[self.rank].clone()], now)?;
                self.show(data, ranges);
            }
            let next = round(1)
                .map(|ranges| self.expect_shown::<T>(ranges))
                .unwrap_or_default();
            let now = std::mem::replace(&mut shown, next);
            if let Some(ranges) = round(2) {
                self.collect(collective, data, ranges, now)?;
            }
        }
        Ok(())
    }

    /// Ranges of all shards in one round of a collective that works shard by shard.
    fn shard_rounds(&self, len: usize) -> Vec<Vec<Range<usize>>> {
        let size = self.members.len();
        let each = (ROUND / size).max(1);
        let part = |round: usize, rank: usize| {
            let shard = shard_range(len, size, rank);
            let start = (shard.start + round * each).min(shard.end);
            start..(start + each).min(shard.end)
        };
        let rounds = len.div_ceil(size).div_ceil(each);
        (0..rounds)
            .map(|round| (0..size).map(|rank| part(round, rank)).collect())
            .collect()
    }

    /// Sends a message of any length, in pieces that MPI can count.
    fn post_long(&self, to: usize, kind: Kind, bytes: &[u8]) {
        for piece in bytes.chunks(PIECE) {
            self.post(to, kind, piece.into());
        }
    }

    fn expect_long(&self, from: usize, kind: Kind, length: usize) -> Vec<(usize, Transfer)> {
        let pieces = (0..length)
            .step_by(PIECE)
            .map(|start| PIECE.min(length - start));
        pieces.map(|piece| self.expect(from, kind, piece)).collect()
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_reduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        self.all_reduce(Collective::AllReduceSum, data)
    }

    fn all_reduce_sum_f64(&self, data: &mut [f64]) -> Result<(), Error> {
        self.all_reduce(Collective::AllReduceSumF64, data)
    }

    fn reduce_scatter_sum(&self, data: &mut [f32]) -> Result<Range<usize>, Error> {
        let collective = Collective::ReduceScatterSum;
        let mut entered = Some(self.enter(collective, data.len(), [0; 2])?);
        let rounds = self.shard_rounds(data.len());
        let mut parts = Vec::new();
        for step in 0..=rounds.len() {
            if let Some(ranges) = rounds.get(step) {
                self.hand_out(data, ranges);
            }
            if let Some(entered) = entered.take() {
                self.agree(entered)?;
            }
            let next = rounds
                .get(step)
                .map(|ranges| self.expect_parts::<f32>(ranges))
                .unwrap_or_default();
            let now = std::mem::replace(&mut parts, next);
            if let Some(ranges) = step.checked_sub(1).and_then(|round| rounds.get(round)) {
                self.add_up(collective, &mut data[ranges[self.rank].clone()], now)?;
            }
        }
        Ok(shard_range(data.len(), self.members.len(), self.rank))
    }

    fn all_gather(&self, data: &mut [f32]) -> Result<(), Error> {
        let collective = Collective::AllGather;
        let mut entered = Some(self.enter(collective, data.len(), [0; 2])?);
        let rounds = self.shard_rounds(data.len());
        let mut shown = Vec::new();
        for step in 0..=rounds.len() {
            if let Some(ranges) = rounds.get(step) {
                self.show(data, ranges);
            }
            if let Some(entered) = entered.take() {
                self.agree(entered)?;
            }
            let next = rounds
                .get(step)
                .map(|ranges| self.expect_shown::<f32>(ranges))
                .unwrap_or_default();
            let now = std::mem::replace(&mut shown, next);
            if let Some(ranges) = step.checked_sub(1).and_then(|round| rounds.get(round)) {
                self.collect(collective, data, ranges, now)?;
            }
        }
        Ok(())
    }

    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let collective = Collective::AllGatherBytes;
        let entered = self.enter(collective, 0, [bytes.len() as u64, 0])?;
        self.others()
            .for_each(|to| self.post_long(to, Kind::Result, bytes));
        let headers = self.agree(entered)?;
        let mut messages = Vec::with_capacity(headers.len());
        for (from, header) in headers.iter().enumerate() {
            if from == self.rank {
                messages.push(bytes.to_vec());
            } else {
                let pieces = self.expect_long(from, Kind::Result, header[3] as usize);
                messages.push(self.finish(&|| collective.to_string(), pieces)?.concat());
            }
        }
        Ok(messages)
    }

    fn broadcast(&self, data: &mut [f32], root: usize) -> Result<(), Error> {
        self.check_rank(root, "broadcast")?;
        let collective = Collective::Broadcast { root };
        let entered = self.enter(collective, data.len(), [root as u64, 0])?;
        self.agree(entered)?;
        let operation = || collective.to_string();
        let mut expected = VecDeque::new();
        for chunk in data.chunks(ROUND) {
            if self.rank == root {
                self.others()
                    .for_each(|to| self.post(to, Kind::Result, self.encode(chunk)));
            } else {
                expected.push_back(self.expect(root, Kind::Result, size_of_val(chunk)));
            }
        }
        for chunk in data.chunks_mut(ROUND) {
            if let Some(transfer) = expected.pop_front() {
                for bytes in self.finish(&operation, vec![transfer])? {
                    f32::decode(chunk, &bytes);
                    self.recycle(bytes);
                }
            }
        }
        Ok(())
    }

    fn send(&self, to: usize, tag: u64, data: Vec<f32>) -> Result<(), Error> {
        self.world.check()?;
        self.check_rank(to, "send")?;
        if to == self.rank {
            self.inbox
                .borrow_mut()
                .entry((to, tag))
                .or_default()
                .push_back(data);
            return Ok(());
        }
        if let Some(lost) = self.world.lost(&[self.members[to]]) {
            let noticed = format!("in send(tag {tag}) by rank {}", self.members[self.rank]);
            return Err(self.world.fail(&Error::RankLost {
                rank: lost,
                loss: Loss::Left,
                noticed,
            }));
        }
        self.progress();
        let envelope = [tag.to_ne_bytes(), (data.len() as u64).to_ne_bytes()].concat();
        self.post(to, Kind::Envelope, envelope.into());
        self.post_long(to, Kind::Letter, &self.encode(&data));
        Ok(())
    }

    fn recv(&self, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        self.world.check()?;
        self.check_rank(from, "recv")?;
        let operation = || format!("recv(tag {tag})");
        loop {
            // A message that waits, or the envelope of the next one.
            let found = self.wait(
                &operation,
                || vec![from],
                || {
                    let mut inbox = self.inbox.borrow_mut();
                    if let Some(message) = inbox.get_mut(&(from, tag)).and_then(VecDeque::pop_front)
                    {
                        return Some(Some(message));
                    }
                    let envelope = from != self.rank
                        && self
                            .link()
                            .probe(Some(from), Kind::Envelope as i32)
                            .is_some();
                    envelope.then_some(None)
                },
            )?;
            if let Some(message) = found {
                return Ok(message);
            }
            let envelope = self
                .finish(&operation, vec![self.expect(from, Kind::Envelope, 16)])?
                .concat();
            let [other, length] = words(&envelope);
            let mut message = vec![0.0; length as usize];
            let pieces = self.expect_long(from, Kind::Letter, 4 * length as usize);
            for (part, bytes) in message
                .chunks_mut(PIECE / 4)
                .zip(self.finish(&operation, pieces)?)
            {
                f32::decode(part, &bytes);
                self.recycle(bytes);
            }
            self.inbox
                .borrow_mut()
                .entry((from, other))
                .or_default()
                .push_back(message);
        }
    }

    fn barrier(&self) -> Result<(), Error> {
        let entered = self.enter(Collective::Barrier, 0, [0; 2])?;
        self.agree(entered).map(drop)
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>, Error> {
        let entered = self.enter(Collective::Split, 0, [color as u64, key as u64])?;
        let headers = self.agree(entered)?;
        let places: Vec<[usize; 2]> = headers
            .iter()
            .map(|header| [header[3] as usize, header[4] as usize])
            .collect();
        let ranks = group_of_color(&places, color);
        let mut colors: Vec<usize> = places.iter().map(|[color, _]| *color).collect();
        colors.sort_unstable();
        colors.dedup();
        let place = ranks.iter().take_while(|rank| **rank != self.rank).count();
        let index = colors.iter().take_while(|other| **other != color).count();
        let link = self
            .link()
            .split(index, place)
            .ok_or_else(|| Error::Invalid {
                what: "MPI",
                problem: "a split returned no communicator".into(),
            })?;
        let members = ranks.into_iter().map(|rank| self.members[rank]).collect();
        Ok(Box::new(Self::new(link, members, Arc::clone(&self.world))))
    }

    fn abort(&self, reason: &str) -> Error {
        self.world.fail(&Error::Aborted {
            rank: self.members[self.rank],
            reason: reason.into(),
        })
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        if thread::panicking() {
            self.world.fail(&Error::RankLost {
                rank: self.members[self.rank],
                loss: Loss::Panicked,
                noticed: "as its thread unwound".into(),
            });
        }
        // What was sent is still on its way.
        let deadline = Instant::now() + self.world.timeout;
        while !self.outgoing.borrow().is_empty()
            && self.world.check().is_ok()
            && Instant::now() < deadline
        {
            self.progress();
            thread::yield_now();
        }
        if self.world.has_failed() {
            // Freeing a communicator may wait for its other members.
            std::mem::forget(self.link.take());
        }
    }
}

/// A collective whose headers are on their way.
#[derive(Debug)]
struct Entered {
    collective: Collective,
    header: [u64; HEADER],
    replies: Vec<(usize, Transfer)>,
}

fn code(collective: Collective) -> u64 {
    match collective {
        Collective::AllReduceSum => 0,
        Collective::AllReduceSumF64 => 1,
        Collective::ReduceScatterSum => 2,
        Collective::AllGather => 3,
        Collective::AllGatherBytes => 4,
        Collective::Broadcast { .. } => 5,
        Collective::Barrier => 6,
        Collective::Split => 7,
    }
}

fn collective_of(header: &[u64; HEADER]) -> Option<Collective> {
    Some(match header[0] {
        0 => Collective::AllReduceSum,
        1 => Collective::AllReduceSumF64,
        2 => Collective::ReduceScatterSum,
        3 => Collective::AllGather,
        4 => Collective::AllGatherBytes,
        5 => Collective::Broadcast {
            root: header[3] as usize,
        },
        6 => Collective::Barrier,
        7 => Collective::Split,
        _ => return None,
    })
}

fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u64::from_ne_bytes(*word));
    std::array::from_fn(|_| words.next().unwrap_or_default())
}

/// What can be summed and sent.
trait Element: Copy + std::ops::AddAssign + 'static {
    fn encode(data: &[Self], bytes: &mut [u8]);
    fn decode(data: &mut [Self], bytes: &[u8]);
    fn add(data: &mut [Self], bytes: &[u8]);
}

macro_rules! element {
    ($($float:ty),*) => {$(
        impl Element for $float {
            fn encode(data: &[Self], bytes: &mut [u8]) {
                for (bytes, value) in bytes.as_chunks_mut().0.iter_mut().zip(data) {
                    *bytes = value.to_ne_bytes();
                }
            }

            fn decode(data: &mut [Self], bytes: &[u8]) {
                for (value, bytes) in data.iter_mut().zip(bytes.as_chunks().0) {
                    *value = Self::from_ne_bytes(*bytes);
                }
            }

            fn add(data: &mut [Self], bytes: &[u8]) {
                for (value, bytes) in data.iter_mut().zip(bytes.as_chunks().0) {
                    *value += Self::from_ne_bytes(*bytes);
                }
            }
        }
    )*};
}

element!(f32, f64);
