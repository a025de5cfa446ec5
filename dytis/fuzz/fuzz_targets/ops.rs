//! Operations from bytes on a `DytisMap` and a `BTreeMap`:
//! `cd dytis && cargo +nightly fuzz run ops`.
//!
//! The first byte chooses the types, the next four the parameters, and the rest are the operations
//! (`tests/support/ops.rs`).

#![no_main]

#[path = "../../tests/support/ops.rs"]
mod ops;
#[path = "../../tests/support/streams.rs"]
mod streams;

use dytis::TotalF64;
use libfuzzer_sys::fuzz_target;
use ops::check_bytes;

fuzz_target!(|data: &[u8]| {
    let Some((types, rest)) = data.split_first() else {
        return;
    };
    match types % 8 {
        0..3 => check_bytes::<u64, u64>(rest),
        3 => check_bytes::<u64, String>(rest),
        4 => check_bytes::<u64, [u64; 16]>(rest),
        5 => check_bytes::<i64, ()>(rest),
        6 => check_bytes::<TotalF64, u64>(rest),
        _ => check_bytes::<u16, u64>(rest),
    }
});
