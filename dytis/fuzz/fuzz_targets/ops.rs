//! Operations from bytes on a `DytisMap` and a `BTreeMap`:
//! `cd dytis && cargo +nightly fuzz run ops`.
//!
//! The first five bytes choose the types and the parameters, the rest are the operations
//! (`tests/support/ops.rs`).

#![no_main]

#[path = "../../tests/support/ops.rs"]
mod ops;
#[path = "../../tests/support/streams.rs"]
mod streams;

use dytis::{DytisBuilder, TotalF64};
use libfuzzer_sys::fuzz_target;
use ops::{Bytes, TestKey, TestValue, check};

fuzz_target!(|data: &[u8]| {
    let Some((setup, operations)) = data.split_first_chunk::<5>() else { return };
    match setup[0] % 8 {
        0..3 => run::<u64, u64>(*setup, operations),
        3 => run::<u64, String>(*setup, operations),
        4 => run::<u64, [u64; 16]>(*setup, operations),
        5 => run::<i64, ()>(*setup, operations),
        6 => run::<TotalF64, u64>(*setup, operations),
        _ => run::<u16, u64>(*setup, operations),
    }
});

fn run<K: TestKey, V: TestValue>(setup: [u8; 5], operations: &[u8]) {
    let [_, capacity, buckets, threshold, slack] = setup.map(usize::from);
    let map = DytisBuilder::new()
        .with_bucket_capacity(2 + capacity % 31)
        .with_segment_buckets(2 + buckets % 63)
        .with_utilization_threshold(threshold % 91)
        .with_directory_slack(1 + slack % 64)
        .build::<K, V>();
    check(map.expect("parameters in range"), &mut Bytes(operations));
}
