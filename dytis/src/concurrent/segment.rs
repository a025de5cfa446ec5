//! A range of keys behind its own lock.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::sync::{AtomicUsize, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::{DytisMap, Key};

/// What a segment's lock protects, in the order in which a lookup asks for it.
#[repr(C)]
pub(super) struct State<K, V> {
    /// Lowest and highest bits that the segment covers, both inclusive.
    pub(super) low: u64,
    pub(super) high: u64,
    /// `false` once the segment was merged into its neighbour; it covers nothing then.
    pub(super) live: bool,
    pub(super) map: DytisMap<K, V>,
}

impl<K: Key, V> State<K, V> {
    pub(super) fn covers(&self, bits: u64) -> bool {
        self.live && self.low <= bits && bits <= self.high
    }
}

/// A segment. Aligned so that the locks of two segments never share a cache line, nor a pair of
/// lines that the hardware fetches together.
#[repr(align(128))]
pub(super) struct Segment<K, V> {
    state: RwLock<State<K, V>>,
    /// Entries, for readers that hold no lock: a hint while writers run.
    len: AtomicUsize,
}

impl<K: Key, V> Segment<K, V> {
    pub(super) fn new(map: DytisMap<K, V>, low: u64, high: u64) -> Self {
        let len = AtomicUsize::new(map.len());
        Self {
            state: RwLock::new(State {
                map,
                low,
                high,
                live: true,
            }),
            len,
        }
    }

    /// Locks for reading. A thread that panicked under the lock left the state whole, because
    /// every change of a state is made after the last call of foreign code; so poison is ignored.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, State<K, V>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks for writing; poison is ignored as in [`read`](Self::read).
    pub(super) fn write(&self) -> RwLockWriteGuard<'_, State<K, V>> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn into_map(self) -> DytisMap<K, V> {
        self.state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .map
    }

    pub(super) fn len_hint(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Brings the hint up to date; called with the state locked exclusively.
    pub(super) fn note_len(&self, state: &State<K, V>) {
        self.len.store(state.map.len(), Ordering::Relaxed);
    }
}
