//! The key streams that the benches run over.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use super::keysets::{KEY_SETS, key_set};
use super::streams::{STREAMS, Stream};

/// A named list of distinct keys in insertion order.
#[derive(Debug)]
pub struct Dataset {
    pub name: &'static str,
    pub keys: Vec<u64>,
}

/// Names of all data sets: the generators, then the key sets.
pub fn names() -> impl Iterator<Item = &'static str> {
    STREAMS
        .into_iter()
        .map(|stream| stream.name)
        .chain(KEY_SETS)
}

/// The data set of that name, `n` keys of a generator or at most `n` of a key set; `None` for an
/// unknown name. `u64::MAX` is left out because `brie-tree` and `congee` cannot serve it.
pub fn dataset(name: &str, n: usize) -> Option<Dataset> {
    let (name, mut keys) = if let Some(stream) = Stream::named(name) {
        (stream.name, stream.keys(n, 42))
    } else {
        let name = KEY_SETS.into_iter().find(|&set| set == name)?;
        (name, key_set(name))
    };
    keys.retain(|&key| key != u64::MAX);
    keys.truncate(n);
    Some(Dataset { name, keys })
}
