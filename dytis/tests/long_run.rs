//! Mixed operations against `BTreeMap` over every generator and key set, and from random bytes.
//!
//! The debug test makes 20,000 operations per stream; the full run is
//! `DYTIS_LONG_OPS=10000000 cargo test --release -p dytis --test long_run`, and `DYTIS_KEYS` names a
//! folder of whole key sets.

#![allow(clippy::print_stdout, reason = "a run of an hour says where it is")]

#[path = "support/keysets.rs"]
mod keysets;
#[path = "support/ops.rs"]
mod ops;
#[path = "support/streams.rs"]
mod streams;

use std::env;
use std::net::Ipv4Addr;

use dytis::{DytisBuilder, DytisMap, TotalF64};
use keysets::{KEY_SETS, key_set};
use ops::{TestKey, TestValue, Walk, check, check_bytes};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use streams::{STREAMS, Stream};

fn steps() -> usize {
    env::var("DYTIS_LONG_OPS").map_or(20_000, |ops| {
        ops.parse()
            .unwrap_or_else(|_| panic!("DYTIS_LONG_OPS must be a number, got {ops}"))
    })
}

/// A map whose buckets, segments and directories are as small as they can be.
fn tiny<K: TestKey, V: TestValue>() -> DytisMap<K, V> {
    DytisBuilder::new()
        .with_bucket_capacity(2)
        .with_segment_buckets(2)
        .with_directory_slack(1)
        .build()
        .unwrap()
}

#[test]
fn every_generator() {
    for stream in STREAMS {
        println!("{}", stream.name);
        let keys = stream.keys(steps().min(1_000_000), 11);
        check::<u64, u64>(DytisMap::new(), &mut Walk::new(&keys, steps(), 12));
    }
}

#[test]
fn every_generator_with_tiny_parameters() {
    for stream in STREAMS {
        println!("{}", stream.name);
        let keys = stream.keys((steps() / 4).clamp(1, 100_000), 13);
        check::<u64, u64>(tiny(), &mut Walk::new(&keys, steps() / 4, 14));
    }
}

#[test]
fn every_key_set() {
    for name in KEY_SETS {
        println!("{name}");
        check::<u64, u64>(DytisMap::new(), &mut Walk::new(&key_set(name), steps(), 15));
    }
}

/// Streams in default and in tiny maps, then random bytes as the fuzz target takes them, which also
/// choose the map's parameters.
fn check_type<K: TestKey, V: TestValue>() {
    let types = [std::any::type_name::<K>(), std::any::type_name::<V>()].join(" to ");
    println!("{types}");
    let steps = (steps() / 4).min(500_000);
    for name in ["uniform", "dense_small", "power_runs", "ends"] {
        let keys = Stream::named(name).unwrap().keys(steps, 16);
        check::<K, V>(DytisMap::new(), &mut Walk::new(&keys, steps, 17));
        check::<K, V>(tiny(), &mut Walk::new(&keys, steps / 2, 18));
    }
    let config = ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let bytes = prop::collection::vec(any::<u8>(), 4..3000);
    let outcome = TestRunner::new(config).run(&bytes, |bytes| {
        check_bytes::<K, V>(&bytes);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{types}: {error}"));
}

#[test]
fn every_key_type() {
    check_type::<u8, u64>();
    check_type::<u16, u64>();
    check_type::<u32, u64>();
    check_type::<usize, u64>();
    check_type::<i8, u64>();
    check_type::<i16, u64>();
    check_type::<i32, u64>();
    check_type::<i64, u64>();
    check_type::<isize, u64>();
    check_type::<char, u64>();
    check_type::<[u8; 3], u64>();
    check_type::<[u8; 8], u64>();
    check_type::<(u32, u32), u64>();
    check_type::<(u16, u16, u32), u64>();
    check_type::<Ipv4Addr, u64>();
    check_type::<TotalF64, u64>();
}

#[test]
fn values_of_several_kinds() {
    check_type::<u64, ()>();
    check_type::<u64, String>();
    check_type::<u64, [u64; 16]>();
}
