#!/usr/bin/env bash
# The tests of the CUDA back end, where a GPU is found. Needs the CUDA toolkit's NVRTC and, from two GPUs on, NCCL.
set -euo pipefail
cd "$(dirname "$0")/../.."
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L | grep -q '^GPU'; then
    echo 'no NVIDIA GPU found: nothing was tested'
    exit 0
fi
cargo test -p iidp --features cuda --test cuda -- --test-threads 1
