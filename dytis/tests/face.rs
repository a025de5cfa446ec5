//! The public face against std's, operation by operation, for every key type.

use dytis::map::{
    IntoIter, IntoKeys, IntoValues, Iter, IterMut, Keys, Range, RangeMut, Values, ValuesMut,
};
use dytis::{DytisMap, DytisSet, Error, Key, TotalF64};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::iter::FusedIterator;
use std::net::Ipv4Addr;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Checks every read-only view of a map against the model.
fn check<K: Key + Debug>(map: &DytisMap<K, u32>, model: &BTreeMap<K, u32>, probes: &[K]) {
    let pairs = |it: std::collections::btree_map::Iter<'_, K, u32>| {
        it.map(|(k, v)| (*k, *v)).collect::<Vec<_>>()
    };
    assert_eq!(map.len(), model.len());
    assert_eq!(map.is_empty(), model.is_empty());
    assert_eq!(
        map.iter().map(|(k, v)| (k, *v)).collect::<Vec<_>>(),
        pairs(model.iter())
    );
    assert!(
        map.iter()
            .rev()
            .map(|(k, _)| k)
            .eq(model.keys().rev().copied())
    );
    assert!(map.keys().eq(model.keys().copied()) && map.values().eq(model.values()));
    assert_eq!(map.iter().len(), model.len());
    assert_eq!(
        map.first_key_value().map(|(k, v)| (k, *v)),
        model.first_key_value().map(|(k, v)| (*k, *v))
    );
    assert_eq!(
        map.last_key_value().map(|(k, v)| (k, *v)),
        model.last_key_value().map(|(k, v)| (*k, *v))
    );
    assert_eq!(format!("{map:?}"), format!("{model:?}"));
    let mut found = vec![None; probes.len()];
    map.get_many(probes, &mut found);
    for (i, probe) in probes.iter().enumerate() {
        assert_eq!(map.get(probe), model.get(probe));
        assert_eq!(found[i], model.get(probe));
        assert_eq!(map.contains_key(probe), model.contains_key(probe));
        assert_eq!(
            map.get_key_value(probe),
            model.get_key_value(probe).map(|(k, v)| (*k, v))
        );
        for bound in [
            Bound::Included(probe),
            Bound::Excluded(probe),
            Bound::Unbounded,
        ] {
            let expected = model
                .range((bound, Bound::Unbounded))
                .next()
                .map(|(k, v)| (*k, v));
            assert_eq!(map.lower_bound(bound).peek_next(), expected);
            let expected = model
                .range((Bound::Unbounded, bound))
                .next_back()
                .map(|(k, v)| (*k, v));
            assert_eq!(map.upper_bound(bound).peek_prev(), expected);
        }
        let mut scanned = Vec::new();
        let seen = map.scan(*probe, 7, |k, v| scanned.push((k, *v)));
        assert_eq!(seen, scanned.len());
        assert_eq!(
            scanned,
            model
                .range(*probe..)
                .take(7)
                .map(|(k, v)| (*k, *v))
                .collect::<Vec<_>>()
        );
    }
}

/// What iterators compute without going step by step, on a range that has lost its ends.
fn check_shortcuts<K: Key + Debug>(
    map: &mut DytisMap<K, u32>,
    model: &BTreeMap<K, u32>,
    range: (Bound<K>, Bound<K>),
) {
    let mut left: Vec<(K, u32)> = model.range(range).map(|(k, v)| (*k, *v)).collect();
    left.pop();
    left.drain(..left.len().min(1));
    let inner = || {
        let mut inner = map.range(range);
        inner.next_back();
        inner.next();
        inner
    };
    let owned = |(k, v): (K, &u32)| (k, *v);
    assert_eq!(inner().last().map(owned), left.last().copied());
    assert_eq!(inner().min().map(owned), left.first().copied());
    assert_eq!(inner().max().map(owned), left.last().copied());
    let folded = inner().fold(Vec::new(), |mut seen, pair| {
        seen.push(owned(pair));
        seen
    });
    assert_eq!(folded, left);
    let mut folded = Vec::new();
    let mut inner = map.range_mut(range);
    inner.next_back();
    inner.next();
    inner.for_each(|(k, v)| folded.push((k, *v)));
    assert_eq!(folded, left);
    let last = |it: RangeMut<'_, K, u32>| it.last().map(|(k, v)| (k, *v));
    let expected = model.range(range).next_back().map(|(k, v)| (*k, *v));
    assert_eq!(last(map.range_mut(range)), expected);
}

/// Ranges between two keys, with every pair of bounds: the same pairs, or both panic.
fn check_ranges<K: Key + Debug>(
    map: &mut DytisMap<K, u32>,
    model: &mut BTreeMap<K, u32>,
    a: K,
    b: K,
) {
    let bounds = |key| [Bound::Included(key), Bound::Excluded(key), Bound::Unbounded];
    for start in bounds(a) {
        for end in bounds(b) {
            // Std checks the bounds only where there is a root to search: a map that never held a pair takes them all. What its
            // documentation promises is what any other map of std's does.
            let panics = catch_unwind(AssertUnwindSafe(|| {
                BTreeMap::from([(a, 0)]).range((start, end)).count()
            }))
            .is_err();
            let ours = catch_unwind(AssertUnwindSafe(|| {
                let mut range = map.range((start, end));
                let (first, last) = (range.next(), range.next_back());
                (
                    first.map(|p| p.0),
                    last.map(|p| p.0),
                    range.map(|(k, v)| (k, *v)).collect::<Vec<_>>(),
                )
            }));
            assert_eq!(ours.is_err(), panics, "{start:?} {end:?}");
            if let Ok(ours) = ours {
                let mut range = model.range((start, end));
                let (first, last) = (range.next(), range.next_back());
                let theirs = (
                    first.map(|p| *p.0),
                    last.map(|p| *p.0),
                    range.map(|(k, v)| (*k, *v)).collect::<Vec<_>>(),
                );
                assert_eq!(ours, theirs, "{start:?} {end:?}");
                check_shortcuts(map, model, (start, end));
                let ours = map
                    .range_mut((start, end))
                    .rev()
                    .map(|(k, v)| (k, std::mem::replace(v, *v ^ 1)));
                let theirs = model
                    .range_mut((start, end))
                    .rev()
                    .map(|(k, v)| (*k, std::mem::replace(v, *v ^ 1)));
                assert!(ours.eq(theirs));
            }
        }
    }
}

/// One of each changing operation, on keys taken from `keys`.
fn drive<K: Key + Debug>(keys: &[K], choices: &[(u8, usize, usize)]) {
    let mut map = DytisMap::new();
    let mut model = BTreeMap::new();
    for (step, &(choice, i, j)) in choices.iter().enumerate() {
        let (a, b, stamp) = (keys[i % keys.len()], keys[j % keys.len()], step as u32);
        match choice % 16 {
            0..=4 => assert_eq!(map.insert(a, stamp), model.insert(a, stamp)),
            5 => {
                map.extend(
                    keys.iter()
                        .skip(i % keys.len())
                        .take(j % 40)
                        .map(|k| (*k, stamp)),
                );
                model.extend(
                    keys.iter()
                        .skip(i % keys.len())
                        .take(j % 40)
                        .map(|k| (*k, stamp)),
                );
            }
            6 => assert_eq!(map.remove(&a), model.remove(&a)),
            7 => assert_eq!(map.remove_entry(&a), model.remove_entry(&a)),
            8 => {
                let ours = *map.entry(a).and_modify(|v| *v += 1).or_insert(stamp);
                assert_eq!(
                    ours,
                    *model.entry(a).and_modify(|v| *v += 1).or_insert(stamp)
                );
            }
            9 => assert_eq!(map.entry(a).insert_entry(stamp).remove(), {
                model.insert(a, stamp);
                model.remove(&a).unwrap()
            }),
            10 => {
                assert_eq!(map.pop_first(), model.pop_first());
                assert_eq!(map.pop_last(), model.pop_last());
            }
            11 => {
                map.retain(|k, v| *k != a && *v % 7 != 3);
                model.retain(|k, v| *k != a && *v % 7 != 3);
            }
            12 => {
                let (low, high) = (a.min(b), a.max(b));
                let ours: Vec<_> = map.extract_if(low..=high, |_, v| *v % 2 == 0).collect();
                let theirs: Vec<_> = model.extract_if(low..=high, |_, v| *v % 2 == 0).collect();
                assert_eq!(ours, theirs);
            }
            13 => {
                let (mut right, mut right_model) = (map.split_off(&a), model.split_off(&a));
                check(&right, &right_model, &[b]);
                if j % 2 == 0 {
                    map.append(&mut right);
                    model.append(&mut right_model);
                } else {
                    right.append(&mut map);
                    right_model.append(&mut model);
                    (map, model) = (right, right_model);
                }
            }
            14 => {
                map.values_mut().for_each(|v| *v = v.wrapping_mul(3));
                for v in model.values_mut() {
                    *v = v.wrapping_mul(3);
                }
                if let (Some(mut ours), Some(mut theirs)) = (map.first_entry(), model.first_entry())
                {
                    assert_eq!(ours.insert(stamp), theirs.insert(stamp));
                }
                if let (Some(ours), Some(theirs)) = (map.last_entry(), model.last_entry()) {
                    assert_eq!(ours.remove_entry(), theirs.remove_entry());
                }
            }
            _ => check_ranges(&mut map, &mut model, a, b),
        }
        if step % 8 == 0 {
            check(&map, &model, &[a, b]);
        }
    }
    check(&map, &model, keys);
    let copy = map.clone();
    assert!(copy == map && copy.cmp(&map).is_eq());
    assert!(DytisMap::from_sorted_iter(model.clone()).unwrap() == map);
    assert!(map.clone().into_keys().eq(model.clone().into_keys()));
    assert!(
        map.clone()
            .into_values()
            .rev()
            .eq(model.clone().into_values().rev())
    );
    map.insert(keys[0], 9);
    model.insert(keys[0], 9);
    let mut ours = map.into_iter();
    let mut theirs = model.into_iter();
    while let Some(pair) = theirs.next() {
        assert_eq!(ours.next(), Some(pair));
        assert_eq!(ours.len(), theirs.len());
        assert_eq!(ours.next_back(), theirs.next_back());
    }
    assert!(ours.next().is_none() && ours.next().is_none() && ours.next_back().is_none());
}

fn choices() -> impl Strategy<Value = Vec<(u8, usize, usize)>> {
    prop::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 1..150)
}

macro_rules! key_types {
    ($($name:ident: $strategy:expr;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig::with_cases(24))]
            $(
                #[test]
                fn $name(keys in prop::collection::vec($strategy, 1..600), choices in choices()) {
                    drive(&keys, &choices);
                }
            )*
        }
    };
}

key_types! {
    face_u8: any::<u8>();
    face_u16: any::<u16>();
    face_u32: any::<u32>();
    face_u64: prop_oneof![any::<u64>(), 0..300_u64, (0..300_u64).prop_map(|k| u64::MAX - k)];
    face_usize: any::<usize>();
    face_i8: any::<i8>();
    face_i16: any::<i16>();
    face_i32: any::<i32>();
    face_i64: prop_oneof![any::<i64>(), -200..200_i64];
    face_isize: any::<isize>();
    face_char: any::<char>();
    face_bytes3: any::<[u8; 3]>();
    face_bytes8: any::<[u8; 8]>();
    face_u32_pair: any::<(u32, u32)>();
    face_u16_u16_u32: (0..9_u16, any::<u16>(), any::<u32>());
    face_ipv4: any::<u32>().prop_map(Ipv4Addr::from);
    face_f64: any::<f64>().prop_map(TotalF64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn sets_behave_like_a_btree_set(a in prop::collection::vec(0..400_u16, 0..300), b in prop::collection::vec(0..400_u16, 0..300)) {
        let (x, y): (DytisSet<u16>, DytisSet<u16>) = (a.iter().collect::<Vec<_>>().into_iter().copied().collect(), b.iter().copied().collect());
        let (m, n): (BTreeSet<u16>, BTreeSet<u16>) = (a.iter().copied().collect(), b.iter().copied().collect());
        prop_assert!(x.iter().eq(m.iter().copied()) && x.iter().rev().eq(m.iter().rev().copied()));
        prop_assert!(x.union(&y).eq(m.union(&n).copied()) && x.intersection(&y).eq(m.intersection(&n).copied()));
        prop_assert!(x.difference(&y).eq(m.difference(&n).copied()));
        prop_assert!(x.symmetric_difference(&y).eq(m.symmetric_difference(&n).copied()));
        prop_assert!((&x | &y).iter().eq((&m | &n).into_iter()) && (&x - &y).into_iter().eq((&m - &n).into_iter()));
        prop_assert_eq!(x.is_subset(&y), m.is_subset(&n));
        prop_assert_eq!(x.is_disjoint(&y), m.is_disjoint(&n));
        prop_assert_eq!(x.cmp(&y), m.cmp(&n));
        prop_assert_eq!((x.first(), x.last()), (m.first().copied(), m.last().copied()));
        prop_assert!(x.range(100..300).eq(m.range(100..300).copied()));
        prop_assert_eq!(format!("{x:?}"), format!("{m:?}"));
        let (mut x, mut m) = (x, m);
        for key in &b {
            prop_assert_eq!(x.contains(key), m.contains(key));
            prop_assert_eq!(x.take(key), m.take(key));
            prop_assert_eq!(x.insert(key / 2), m.insert(key / 2));
        }
        x.retain(|k| k % 3 != 0);
        m.retain(|k| k % 3 != 0);
        prop_assert_eq!((x.pop_first(), x.pop_last()), (m.pop_first(), m.pop_last()));
        prop_assert!(x.into_iter().eq(m.into_iter()));
    }
}

#[test]
#[should_panic(expected = "no entry found for key")]
fn index_of_an_absent_key_panics() {
    let _ = DytisMap::from([(1_u64, 2)])[&3];
}

#[test]
fn iterators_have_the_traits_of_std() {
    fn ends<I: DoubleEndedIterator + FusedIterator + Debug + Send + Sync>() {}
    fn exact<I: ExactSizeIterator + DoubleEndedIterator + FusedIterator + Debug + Send + Sync>() {}
    fn shared<T: Send + Sync>() {}
    type K = u64;
    type V = String;
    exact::<Iter<'_, K, V>>();
    exact::<IterMut<'_, K, V>>();
    exact::<IntoIter<K, V>>();
    exact::<Keys<'_, K, V>>();
    exact::<Values<'_, K, V>>();
    exact::<ValuesMut<'_, K, V>>();
    exact::<IntoKeys<K, V>>();
    exact::<IntoValues<K, V>>();
    ends::<Range<'_, K, V>>();
    ends::<RangeMut<'_, K, V>>();
    exact::<dytis::set::Iter<'_, K>>();
    exact::<dytis::set::IntoIter<K>>();
    ends::<dytis::set::Range<'_, K>>();
    shared::<DytisMap<K, V>>();
    shared::<DytisSet<K>>();
}

#[test]
fn pairs_out_of_order_are_refused_with_their_position() {
    let pairs = |keys: &[i32]| keys.iter().map(|&key| (key, ())).collect::<Vec<_>>();
    for (keys, position) in [
        (&[1, 0][..], 1),
        (&[-5, 3, 3], 2),
        (&[1, 2, 3, i32::MIN, 9], 3),
    ] {
        let expected = Err(Error::Unsorted { position });
        assert_eq!(DytisMap::from_sorted_iter(pairs(keys)), expected);
        let set = DytisSet::from_sorted_iter(keys.iter().copied());
        assert_eq!(set, Err(Error::Unsorted { position }));
    }
    let long = (0..50_000_u64).chain([7]).map(|key| (key, key));
    let error = DytisMap::from_sorted_iter(long).unwrap_err();
    assert_eq!(
        error.to_string(),
        "keys must strictly ascend, but the one at position 50000 is not above its predecessor"
    );
    // What a map holds counts as the predecessor, and what came before the fault stays.
    let mut map = DytisMap::from([(10, ())]);
    assert_eq!(
        map.bulk_load(pairs(&[10, 11])),
        Err(Error::Unsorted { position: 0 })
    );
    assert_eq!(
        map.bulk_load(pairs(&[20, 30, 25])),
        Err(Error::Unsorted { position: 2 })
    );
    assert!(map.keys().eq([10, 20, 30]));
    map.bulk_load(pairs(&[])).unwrap();
    assert_eq!(map.len(), 3);
}
