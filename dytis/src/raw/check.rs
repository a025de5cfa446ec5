//! Tests of the structure against a plain model, with every invariant checked along the way.

use super::RawMap;
use super::directory::{CROWD, MAX_LEVELS, Slot};
use super::params::Params;
use super::search::{PAD, flip, unflip};
use super::segment::{MAX_BUCKETS, Segment};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use proptest::prelude::*;

impl<V> RawMap<V> {
    /// Panics unless all invariants of the structure hold.
    pub(crate) fn check(&self) {
        if self.len == 0 {
            assert!(
                self.root.is_empty()
                    && self.head.is_null()
                    && self.tail.is_null()
                    && self.segments == 0
            );
            assert_eq!(self.pool.used(), 0);
            return;
        }
        let (mut starts, mut prev, mut segment) = (Vec::new(), core::ptr::null_mut(), self.head);
        let (mut len, mut buckets, mut start) = (0, 0, Some(0));
        while !segment.is_null() {
            // SAFETY: segments of the chain are live.
            unsafe {
                assert_eq!((*segment).prev, prev);
                let (low, high) = (
                    start.expect("ranges follow each other"),
                    unflip((*segment).high()),
                );
                assert!(low <= high);
                self.check_segment(segment, low, high);
                starts.push((low, segment));
                len += (*segment).count as usize;
                buckets += (*segment).buckets();
                start = high.checked_add(1);
                (prev, segment) = (segment, (*segment).next);
            }
        }
        assert_eq!(start, None, "the last segment ends with the keys");
        assert_eq!((prev, starts.len()), (self.tail, self.segments));
        assert_eq!((len, buckets), (self.len, self.pool.used()));
        Self::check_slot(self.root, (0, u64::MAX), 0, &starts);
        assert!(self.stats().levels <= MAX_LEVELS);
    }

    /// Checks what `slot` leads to, for keys in a range; `shift` is that of the directory above, 0 for none.
    fn check_slot(
        slot: Slot,
        (start, end): (u64, u64),
        shift: u32,
        starts: &[(u64, *mut Segment)],
    ) {
        let inside = starts
            .iter()
            .filter(|&&(low, _)| start < low && low <= end)
            .count();
        let Some(directory) = slot.as_directory() else {
            let first = starts[starts.partition_point(|&(low, _)| low <= start) - 1].1;
            assert_eq!(
                slot.as_segment(),
                first,
                "a slot leads to the segment of its start"
            );
            assert!(inside <= CROWD);
            return;
        };
        // SAFETY: slots lead to live directories.
        let directory = unsafe { &*directory };
        assert_eq!(inside, directory.beginnings());
        assert!(shift == 0 || directory.shift() + 6 <= shift || directory.shift() == 0);
        for (index, &slot) in directory.slots().iter().enumerate() {
            let range = (directory.start(index, start), directory.end(index, end));
            assert!(range.0 <= range.1);
            Self::check_slot(slot, range, directory.shift(), starts);
        }
    }

    unsafe fn check_segment(&self, segment: *mut Segment, low: u64, high: u64) {
        // SAFETY: the segment is live, says the caller.
        let segment = unsafe { &*segment };
        assert!(
            segment.buckets() >= 1 && segment.buckets() <= usize::from(self.params.segment_buckets)
        );
        let (mut count, mut previous) = (0, None);
        for number in 0..segment.buckets() {
            let len = segment.len(number);
            assert!(
                len >= 1 && len <= self.capacity(),
                "no bucket is empty or too full"
            );
            count += len;
            // SAFETY: a bucket of a live segment.
            let bucket = unsafe { self.pool.bucket(segment.ids[number]) };
            for pos in 0..super::bucket::Shape::<V>::SLOTS {
                // SAFETY: all places are readable.
                let key = unsafe { bucket.key(pos) };
                if pos >= len {
                    assert_eq!(key, PAD);
                    continue;
                }
                assert!(previous < Some(key), "keys ascend");
                assert!(
                    key <= segment.bound(number),
                    "keys lie below their bucket's bound"
                );
                assert!(
                    number == 0 || key > segment.bound(number - 1),
                    "keys lie above the bound before"
                );
                assert!(
                    (low..=high).contains(&unflip(key)),
                    "keys lie within their segment's slots"
                );
                previous = Some(key);
            }
        }
        assert_eq!(count, segment.count as usize);
        let end = flip(high);
        assert!((segment.buckets() - 1..MAX_BUCKETS).all(|number| segment.bound(number) == end));
    }
}

/// One operation on a map.
#[derive(Clone, Debug)]
enum Op {
    Insert(u64),
    Remove(u64),
    /// Inserts a rising or falling run.
    Run(u64, i8),
    RemoveRange(u64, u64),
    PopFirst(u8),
    PopLast(u8),
    Probe(u64),
    SplitOff(u64),
}

/// Keys that cluster: small ones, ones around powers of two, ones with a common prefix, and the ends.
fn key() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..200_u64,
        2 => (0..64_u32, -3..=3_i64).prop_map(|(bit, off)| (1_u64 << bit).wrapping_add_signed(off)),
        3 => (0..500_u64).prop_map(|low| 0xdead_beef_0000_0000 | low),
        2 => any::<u64>(),
        1 => (0..4_u64).prop_map(|k| u64::MAX - k),
        1 => (0..64_u32).prop_map(|bits| (u64::MAX / 3) ^ (u64::MAX >> bits)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => key().prop_map(Op::Insert),
        4 => (key(), -60..60_i8).prop_map(|(key, run)| Op::Run(key, run)),
        4 => key().prop_map(Op::Remove),
        1 => (key(), key()).prop_map(|(a, b)| Op::RemoveRange(a.min(b), a.max(b))),
        1 => any::<u8>().prop_map(Op::PopFirst),
        1 => any::<u8>().prop_map(Op::PopLast),
        3 => key().prop_map(Op::Probe),
        1 => key().prop_map(Op::SplitOff),
    ]
}

fn params() -> impl Strategy<Value = Params> {
    (
        2..=9_u8,
        2..=9_u8,
        prop_oneof![Just(0), Just(66), Just(90)],
        1..=4_u8,
    )
        .prop_map(
            |(bucket_capacity, segment_buckets, threshold, slack)| Params {
                bucket_capacity,
                segment_buckets,
                threshold,
                slack,
            },
        )
}

fn apply(raw: &mut RawMap<u64>, model: &mut BTreeMap<u64, u64>, op: &Op, stamp: u64) {
    match *op {
        Op::Insert(key) => assert_eq!(raw.insert(key, stamp), model.insert(key, stamp)),
        Op::Remove(key) => assert_eq!(raw.remove(key), model.remove(&key)),
        Op::Run(key, run) => {
            for i in 0..u64::from(run.unsigned_abs()) {
                let key = if run > 0 {
                    key.wrapping_add(i)
                } else {
                    key.wrapping_sub(i)
                };
                assert_eq!(raw.insert(key, stamp + i), model.insert(key, stamp + i));
                raw.check();
            }
        }
        Op::RemoveRange(low, high) => {
            let mut extract = raw.extract(Some(low), Some(high));
            let mut expected = model.extract_if(low..=high, |_, value| *value % 3 != 0);
            loop {
                let pair = extract.next(|_, value| *value % 3 != 0);
                assert_eq!(pair, expected.next());
                if pair.is_none() {
                    break;
                }
            }
        }
        Op::PopFirst(n) => (0..n).for_each(|_| assert_eq!(raw.pop_first(), model.pop_first())),
        Op::PopLast(n) => (0..n).for_each(|_| assert_eq!(raw.pop_last(), model.pop_last())),
        Op::Probe(key) => {
            assert_eq!(raw.get(key), model.get(&key));
            let mut walk = raw.walk_between(Some(key), None);
            for (k, v) in model.range(key..).take(20) {
                assert_eq!(walk.next(), Some((*k, v)));
            }
            let mut walk = raw.walk_between(None, Some(key));
            for (k, v) in model.range(..=key).rev().take(20) {
                assert_eq!(walk.next_back(), Some((*k, v)));
            }
        }
        Op::SplitOff(key) => {
            let right = raw.split_off(key);
            right.check();
            let expected = model.split_off(&key);
            assert!(collect(&right).eq(&expected.clone().into_iter().collect::<Vec<_>>()));
            // Odd stamps keep the right part.
            if stamp % 2 == 1 {
                *raw = right;
                *model = expected;
            }
        }
    }
}

fn collect(raw: &RawMap<u64>) -> Vec<(u64, u64)> {
    let mut pairs = Vec::new();
    raw.walk().visit(|bits, value| {
        pairs.push((bits, *value));
        true
    });
    pairs
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn behaves_like_a_btree_map_and_keeps_its_invariants(params in params(), ops in prop::collection::vec(op(), 1..120)) {
        let mut raw = RawMap::new(params);
        let mut model = BTreeMap::new();
        for (stamp, op) in ops.iter().enumerate() {
            apply(&mut raw, &mut model, op, stamp as u64);
            raw.check();
            prop_assert_eq!(raw.len(), model.len());
        }
        prop_assert_eq!(collect(&raw), model.into_iter().collect::<Vec<_>>());
        let clone = raw.clone();
        clone.check();
        prop_assert_eq!(collect(&clone), collect(&raw));
    }
}

#[test]
fn a_falling_run_behind_a_gap() {
    let params = Params {
        bucket_capacity: 2,
        segment_buckets: 5,
        threshold: 0,
        slack: 1,
    };
    let mut raw = RawMap::new(params);
    for key in [132, 0, 15, 16].into_iter().chain((4046..=4096).rev()) {
        raw.insert(key, key);
        raw.check();
    }
}

#[test]
fn tiny_parameters_go_through_every_structure_change() {
    let params = Params {
        bucket_capacity: 3,
        segment_buckets: 4,
        threshold: 66,
        slack: 2,
    };
    let mut raw = RawMap::new(params);
    let mut seed = 1_u64;
    for _ in 0..20_000 {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // Half of the keys uniform, half in a narrow band.
        raw.insert(
            if seed & 1 == 0 {
                seed >> 8
            } else {
                1 << 40 | seed >> 48
            },
            seed,
        );
    }
    raw.check();
    let full = raw.stats();
    assert!(
        full.remaps > 100 && full.expansions > 100 && full.splits > 100 && full.doublings > 3,
        "{full:?}"
    );
    assert!(full.directories > 1 && full.levels > 1, "{full:?}");
    while raw.len() > 100 {
        let first = raw.walk().next().map_or(0, |(bits, _)| bits);
        raw.remove(first);
    }
    raw.check();
    let rest = raw.stats();
    assert!(
        rest.merges > 100 && rest.segments < full.segments / 20,
        "{rest:?}"
    );
}

#[test]
fn chunks_are_given_back() {
    let mut raw = RawMap::new(Params::DEFAULT);
    for i in 0..200_000_u64 {
        raw.insert(i.wrapping_mul(0x9e37_79b9_7f4a_7c15), i);
    }
    let full = raw.memory_usage();
    for i in 0..180_000_u64 {
        raw.remove(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    raw.check();
    let mut fresh = RawMap::new(Params::DEFAULT);
    for i in 180_000..200_000_u64 {
        fresh.insert(i.wrapping_mul(0x9e37_79b9_7f4a_7c15), i);
    }
    assert!(
        raw.memory_usage() * 2 < fresh.memory_usage() * 5,
        "{} {} {full}",
        raw.memory_usage(),
        fresh.memory_usage()
    );
    while raw.pop_first().is_some() {}
    raw.check();
}
