#!/usr/bin/env bash
# Runs the crate's tests under AddressSanitizer, leaks included. Needs the nightly toolchain (for -Z sanitizer).
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Z sanitizer=address" ASAN_OPTIONS="detect_leaks=1"
# Doctests would need the flags of rustdoc too; the tests below cover the same code.
exec cargo +nightly test -p dytis --all-features --target "$target" --lib --tests "$@"
