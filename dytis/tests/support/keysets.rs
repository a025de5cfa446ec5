//! Reads the committed key sets, or whole ones from a folder.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each of the programs that include this file uses a part of it"
)]

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Names of the key sets, as in `examples/data/keys/NOTICE.md`.
pub const KEY_SETS: [&str; 5] = [
    "nyc_time",
    "nyc_plane",
    "phone_prefix",
    "cities_lonlat",
    "cities_geonameid",
];

/// Where the key sets lie: the folder named by `DYTIS_KEYS` (whole sets, `NAME.bin`), else the cuts
/// committed under `examples/data/keys` of the workspace.
pub fn folder() -> PathBuf {
    if let Some(folder) = env::var_os("DYTIS_KEYS") {
        return PathBuf::from(folder);
    }
    // This file serves the workspace's root package and its members.
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    [package, &package.join("..")]
        .map(|root| root.join("examples/data/keys"))
        .into_iter()
        .find(|folder| folder.is_dir())
        .unwrap_or_else(|| package.join("examples/data/keys"))
}

/// The keys of a set in insertion order.
///
/// # Panics
///
/// When the set is missing or torn: a test or bench has nothing to run on then.
pub fn key_set(name: &str) -> Vec<u64> {
    let path = folder().join(name).with_extension("bin");
    read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reads a key file: a `u64` count, then that many `u64`, all little-endian.
pub fn read(path: &Path) -> io::Result<Vec<u64>> {
    let bytes = fs::read(path)?;
    let (words, rest) = bytes.as_chunks::<8>();
    let torn = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let Some((count, keys)) = words.split_first() else {
        return Err(torn(format!(
            "expected a count of 8 bytes, got {} bytes",
            bytes.len()
        )));
    };
    let count = u64::from_le_bytes(*count);
    if keys.len() as u64 != count || !rest.is_empty() {
        return Err(torn(format!(
            "expected {count} keys of 8 bytes, got {} bytes",
            bytes.len() - 8
        )));
    }
    Ok(keys.iter().map(|key| u64::from_le_bytes(*key)).collect())
}
