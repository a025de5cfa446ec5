//! What the threads of a local group share: the meeting point, the failure, the mailboxes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use crate::communicator::{Collective, CollectiveCall};
use crate::error::{Error, Loss};

/// Turns of the loop that a rank spins before it sleeps; a few microseconds, about what a wake-up costs.
const SPINS: u32 = 2_000;

/// Locks, also after a panic elsewhere: nothing that the locks of this module guard is ever left half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The failure of a world, shared by its first group and all groups split from it.
#[derive(Debug, Default)]
pub(super) struct World {
    failure: OnceLock<Error>,
    groups: Mutex<Vec<Weak<Group>>>,
}

impl World {
    pub(super) fn register(&self, group: &Arc<Group>) {
        let mut groups = lock(&self.groups);
        groups.retain(|known| known.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Records `error` unless there was an earlier failure, wakes every rank of every group, returns the failure that counts.
    pub(super) fn fail(&self, error: Error) -> Error {
        let first = self.failure.get_or_init(|| error).clone();
        let groups: Vec<_> = lock(&self.groups)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for group in groups {
            group.wake_all();
        }
        first
    }
}

/// Point-to-point messages that wait for one rank, by sender and tag.
type Inbox = BTreeMap<(usize, u64), VecDeque<Vec<f32>>>;

/// Where one rank stands. Padded to a cache line, since each is written by a thread of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Seat {
    /// Phases this rank has arrived at.
    arrived: AtomicU64,
    /// Whether the rank has dropped its communicator.
    gone: AtomicBool,
    /// The calls that the rank entered at an even and at an odd phase.
    calls: [Mutex<Option<Entry>>; 2],
}

/// A collective as a rank announces it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) call: CollectiveCall,
    pub(super) sequence: u64,
    /// Colour and key of a split.
    pub(super) place: (usize, usize),
}

/// A group that not all of its members have fetched yet.
#[derive(Debug)]
struct Birth {
    group: Arc<Group>,
    waiting: usize,
}

/// A group of ranks.
///
/// Ranks meet in *phases*, numbered from 1: a rank writes to its buffers of that phase's parity, arrives, waits for all others, and reads what they wrote
/// before it arrives at the next phase. Two buffers per purpose are enough: a rank that writes in phase p + 2 has seen everybody arrive at
/// p + 1, hence be done with reading phase p.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) world: Arc<World>,
    /// World ranks of the members.
    pub(super) members: Vec<usize>,
    pub(super) timeout: Duration,
    seats: Vec<Seat>,
    /// Sum of `arrived` over the seats: phase p is complete when it reaches p times the size.
    total: AtomicU64,
    sleepers: AtomicUsize,
    gate: Mutex<()>,
    bell: Condvar,
    inboxes: Vec<(Mutex<Inbox>, Condvar)>,
    /// Groups being made by a split, by the split's number and colour.
    births: Mutex<BTreeMap<(u64, usize), Birth>>,
    pub(super) f32s: Staging<f32>,
    pub(super) f64s: Staging<f64>,
    pub(super) bytes: [Vec<RwLock<Vec<u8>>>; 2],
    spin: bool,
}

/// Buffers through which elements travel, reused from call to call.
#[derive(Debug)]
pub(super) struct Staging<T> {
    /// `[parity][from * size + to]`: what `from` wants `to` to add.
    pub(super) parts: [Vec<Mutex<Vec<T>>>; 2],
    /// `[parity][from]`: what `from` shows to everybody.
    pub(super) shown: [Vec<RwLock<Vec<T>>>; 2],
}

impl<T> Staging<T> {
    fn new(size: usize) -> Self {
        let parts = || (0..size * size).map(|_| Mutex::default()).collect();
        let shown = || (0..size).map(|_| RwLock::default()).collect();
        Self {
            parts: [parts(), parts()],
            shown: [shown(), shown()],
        }
    }
}

impl Group {
    pub(super) fn new(world: Arc<World>, members: Vec<usize>, timeout: Duration) -> Arc<Self> {
        let size = members.len();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let bytes = || (0..size).map(|_| RwLock::default()).collect();
        let group = Arc::new(Self {
            members,
            timeout,
            seats: (0..size).map(|_| Seat::default()).collect(),
            total: AtomicU64::new(0),
            sleepers: AtomicUsize::new(0),
            gate: Mutex::new(()),
            bell: Condvar::new(),
            inboxes: (0..size).map(|_| Default::default()).collect(),
            births: Mutex::default(),
            f32s: Staging::new(size),
            f64s: Staging::new(size),
            bytes: [bytes(), bytes()],
            spin: size <= cores,
            world,
        });
        group.world.register(&group);
        group
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Announces the collective that `rank` enters at `phase`.
    pub(super) fn announce(&self, rank: usize, phase: u64, entry: Entry) {
        *lock(&self.seats[rank].calls[parity(phase)]) = Some(entry);
    }

    /// What all ranks announced at `phase`, once all have arrived there and they agree.
    pub(super) fn agreed(&self, phase: u64) -> Result<Vec<Entry>, Error> {
        let entries: Vec<Entry> = self
            .seats
            .iter()
            .filter_map(|seat| *lock(&seat.calls[parity(phase)]))
            .collect();
        let first = entries[0];
        for (rank, entry) in entries.iter().enumerate() {
            if entry.call != first.call {
                return Err(self.world.fail(Error::CollectiveMismatch {
                    sequence: first.sequence,
                    rank: self.members[rank],
                    got: entry.call,
                    expected_rank: self.members[0],
                    expected: first.call,
                }));
            }
        }
        Ok(entries)
    }

    /// Lets the others know that `rank` has done its part of `phase`.
    pub(super) fn arrive(&self, rank: usize, phase: u64) {
        self.seats[rank].arrived.store(phase, Ordering::Release);
        let total = self.total.fetch_add(1, Ordering::SeqCst) + 1;
        // Only the last to arrive can end a wait.
        if total.is_multiple_of(self.size() as u64) && self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.gate));
            self.bell.notify_all();
        }
    }

    /// Waits until all ranks have arrived at `phase`.
    pub(super) fn wait(
        &self,
        rank: usize,
        phase: u64,
        collective: Collective,
    ) -> Result<(), Error> {
        let goal = phase * self.size() as u64;
        let complete = || self.total.load(Ordering::SeqCst) >= goal;
        if self.spin {
            for _ in 0..SPINS {
                if complete() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
        let deadline = Instant::now() + self.timeout;
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut gate = lock(&self.gate);
        let outcome = loop {
            if complete() {
                break Ok(());
            }
            if let Some(failure) = self.world.failure() {
                break Err(failure.clone());
            }
            let missing = || {
                (0..self.size()).filter(|&r| self.seats[r].arrived.load(Ordering::Acquire) < phase)
            };
            let lost = missing().find(|&r| self.is_gone(r));
            let now = Instant::now();
            if lost.is_some() || now >= deadline {
                // A rank may have arrived and left between the two looks.
                if complete() {
                    break Ok(());
                }
                let missing: Vec<_> = missing().map(|r| self.members[r]).collect();
                drop(gate);
                let failure = match lost {
                    Some(lost) => self.rank_left(rank, lost, &collective.to_string()),
                    None => self.timed_out(rank, missing, collective.to_string()),
                };
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                return Err(self.world.fail(failure));
            }
            gate = self
                .bell
                .wait_timeout(gate, deadline - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        };
        drop(gate);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    fn rank_left(&self, waiting: usize, lost: usize, operation: &str) -> Error {
        Error::RankLost {
            rank: self.members[lost],
            loss: Loss::Left,
            noticed: format!("in {operation} by rank {}", self.members[waiting]),
        }
    }

    fn timed_out(&self, rank: usize, missing: Vec<usize>, operation: String) -> Error {
        Error::Timeout {
            rank: self.members[rank],
            missing,
            operation,
            timeout: self.timeout,
        }
    }

    fn is_gone(&self, rank: usize) -> bool {
        self.seats[rank].gone.load(Ordering::SeqCst)
    }

    /// Marks `rank` as ended. A panic fails the world at once, also where nobody waits for that rank yet.
    pub(super) fn leave(&self, rank: usize, panicked: bool) {
        self.seats[rank].gone.store(true, Ordering::SeqCst);
        if panicked {
            self.world.fail(Error::RankLost {
                rank: self.members[rank],
                loss: Loss::Panicked,
                noticed: "as its thread unwound".into(),
            });
        }
        self.wake_all();
    }

    /// Makes every sleeping rank look again.
    fn wake_all(&self) {
        drop(lock(&self.gate));
        self.bell.notify_all();
        for (inbox, bell) in &self.inboxes {
            drop(lock(inbox));
            bell.notify_all();
        }
    }

    pub(super) fn post(
        &self,
        from: usize,
        to: usize,
        tag: u64,
        data: Vec<f32>,
    ) -> Result<(), Error> {
        if self.is_gone(to) {
            return Err(self
                .world
                .fail(self.rank_left(from, to, &format!("send(tag {tag})"))));
        }
        let (inbox, bell) = &self.inboxes[to];
        lock(inbox).entry((from, tag)).or_default().push_back(data);
        bell.notify_all();
        Ok(())
    }

    pub(super) fn fetch(&self, to: usize, from: usize, tag: u64) -> Result<Vec<f32>, Error> {
        let deadline = Instant::now() + self.timeout;
        let (inbox, bell) = &self.inboxes[to];
        let mut messages = lock(inbox);
        loop {
            // Whether the sender has ended is read first: what it sent before is then visible.
            let gone = self.is_gone(from);
            if let Some(queue) = messages.get_mut(&(from, tag)) {
                let message = queue.pop_front();
                if queue.is_empty() {
                    messages.remove(&(from, tag));
                }
                if let Some(message) = message {
                    return Ok(message);
                }
            }
            if let Some(failure) = self.world.failure() {
                return Err(failure.clone());
            }
            let operation = || format!("recv(tag {tag})");
            let now = Instant::now();
            let failure = if gone {
                self.rank_left(to, from, &operation())
            } else if now >= deadline {
                self.timed_out(to, vec![self.members[from]], operation())
            } else {
                messages = bell
                    .wait_timeout(messages, deadline - now)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            };
            drop(messages);
            return Err(self.world.fail(failure));
        }
    }

    /// The group of the members of `color`, made by the first of them to ask.
    pub(super) fn child(&self, sequence: u64, color: usize, ranks: &[usize]) -> Arc<Self> {
        let mut births = lock(&self.births);
        let birth = births.entry((sequence, color)).or_insert_with(|| {
            let members = ranks.iter().map(|&rank| self.members[rank]).collect();
            Birth {
                group: Self::new(Arc::clone(&self.world), members, self.timeout),
                waiting: ranks.len(),
            }
        });
        let group = Arc::clone(&birth.group);
        birth.waiting -= 1;
        if birth.waiting == 0 {
            births.remove(&(sequence, color));
        }
        group
    }
}

pub(super) fn parity(phase: u64) -> usize {
    (phase & 1) as usize
}
