#!/usr/bin/env bash
# Runs small tests of the structure under Miri, which finds undefined behaviour that a sanitizer cannot see:
#
#     dytis/scripts/miri.sh
#
# Needs the nightly toolchain with the component `miri`. Miri is some hundred times slower than the machine: streams have 50
# operations on the smallest possible buckets here, where every structure change happens all the same.
set -euo pipefail
cd "$(dirname "$0")/.."
export MIRIFLAGS=${MIRIFLAGS:--Zmiri-disable-isolation} DYTIS_LONG_OPS=${DYTIS_LONG_OPS:-200}
cargo +nightly miri test -p dytis --lib -- search:: key::
cargo +nightly miri test -p dytis --test long_run every_generator_with_tiny_parameters
