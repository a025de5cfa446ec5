//! Tests of the structure against a plain model, with every invariant checked along the way.

use super::RawMap;
use super::directory::{Child, Slot};
use super::params::Params;
use super::search::{PAD, unflip};
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
        let mut chain = Vec::new();
        self.check_slot(self.root, 0, u64::MAX, &mut chain);
        assert_eq!(chain.len(), self.segments);
        assert_eq!(chain.first(), Some(&self.head));
        assert_eq!(chain.last(), Some(&self.tail));
        let (mut prev, mut len, mut buckets) = (core::ptr::null_mut(), 0, 0);
        for (i, &segment) in chain.iter().enumerate() {
            // SAFETY: segments reached over slots are live.
            unsafe {
                assert_eq!((*segment).prev, prev);
                assert_eq!(
                    (*segment).next,
                    chain.get(i + 1).copied().unwrap_or(core::ptr::null_mut())
                );
                len += (*segment).count as usize;
                buckets += (*segment).buckets();
            }
            prev = segment;
        }
        assert_eq!((len, buckets), (self.len, self.pool.used()));
    }

    fn check_slot(&self, slot: Slot, low: u64, high: u64, chain: &mut Vec<*mut Segment>) {
        match slot.child() {
            Child::Segment(segment) => {
                // SAFETY: as above.
                unsafe { self.check_segment(segment, low, high) };
                chain.push(segment);
            }
            Child::Directory(directory) => {
                // SAFETY: as above.
                let directory = unsafe { &*directory };
                let (mut start, mut index, mut children) = (low, 0, 0);
                for run in directory.slots().chunk_by(|a, b| a == b) {
                    index += run.len();
                    children += 1;
                    let end = if index == directory.slots().len() {
                        high
                    } else {
                        directory.start(index) - 1
                    };
                    assert!(start <= end, "runs of slots lie within the parent's");
                    self.check_slot(run[0], start, end, chain);
                    start = end.wrapping_add(1);
                }
                assert_eq!(children, directory.children());
                assert!(children >= 2);
            }
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
        assert!((segment.buckets() - 1..MAX_BUCKETS).all(|number| segment.bound(number) == PAD));
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
