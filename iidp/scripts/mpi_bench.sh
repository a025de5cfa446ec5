#!/usr/bin/env bash
# The all-reduce over MPI against a bare MPI_Allreduce loop, on two processes.
# Needs Open MPI and clang (Debian: libopenmpi-dev openmpi-bin clang libclang-dev).
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --quiet --release --features mpi --example mpi_check
target="$(cargo metadata --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')"
mpirun --allow-run-as-root --oversubscribe -n "${1:-2}" "$target/release/examples/mpi_check" bench
