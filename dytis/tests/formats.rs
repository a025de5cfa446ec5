//! serde and rayon.
#![cfg(all(feature = "serde", feature = "rayon"))]

use dytis::{DytisMap, DytisSet};
use rayon::prelude::*;

fn sample() -> DytisMap<u64, String> {
    (0..5000_u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15), i.to_string()))
        .collect()
}

#[test]
fn maps_and_sets_survive_json_and_postcard() {
    let map = sample();
    let json = serde_json::to_string(&map).unwrap();
    assert_eq!(
        serde_json::from_str::<DytisMap<u64, String>>(&json).unwrap(),
        map
    );
    let bytes = postcard::to_allocvec(&map).unwrap();
    assert_eq!(
        postcard::from_bytes::<DytisMap<u64, String>>(&bytes).unwrap(),
        map
    );
    let set: DytisSet<u64> = map.keys().collect();
    let json = serde_json::to_string(&set).unwrap();
    assert_eq!(serde_json::from_str::<DytisSet<u64>>(&json).unwrap(), set);
    let bytes = postcard::to_allocvec(&set).unwrap();
    assert_eq!(postcard::from_bytes::<DytisSet<u64>>(&bytes).unwrap(), set);
}

#[test]
fn unsorted_and_repeated_keys_are_read_as_a_map_would() {
    let map: DytisMap<u32, char> =
        serde_json::from_str(r#"{"9":"a","3":"b","9":"c","1":"d"}"#).unwrap();
    assert!(map.iter().eq([(1, &'d'), (3, &'b'), (9, &'c')]));
    assert!(serde_json::from_str::<DytisMap<u32, char>>("[1]").is_err());
    assert!(serde_json::from_str::<DytisMap<u32, char>>(r#"{"x":"a"}"#).is_err());
}

#[test]
fn parallel_iterators_see_every_pair_once() {
    let mut map: DytisMap<u64, u64> = (0..100_000_u64).map(|i| (i * i, i)).collect();
    assert_eq!(
        (&map).into_par_iter().map(|(_, v)| *v).sum::<u64>(),
        (0..100_000_u64).sum::<u64>()
    );
    assert_eq!((&map).into_par_iter().count(), map.len());
    (&mut map).into_par_iter().for_each(|(_, v)| *v += 1);
    assert_eq!(map.values().sum::<u64>(), (1..=100_000_u64).sum::<u64>());
    let copy: DytisMap<u64, u64> = map
        .clone()
        .into_par_iter()
        .filter(|(k, _)| k % 2 == 0)
        .collect();
    assert!(copy.iter().eq(map.iter().filter(|(k, _)| k % 2 == 0)));
    assert_eq!((&DytisMap::<u64, u64>::new()).into_par_iter().count(), 0);
    let set: DytisSet<u64> = (0..1000_u64).into_par_iter().map(|i| i / 2).collect();
    assert_eq!(
        (&set).into_par_iter().sum::<u64>(),
        (0..500_u64).sum::<u64>()
    );
    map.par_extend((0..10_u64).into_par_iter().map(|i| (i, 7)));
    assert_eq!(map[&2_u64], 7);
}
