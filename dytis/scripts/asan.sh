#!/usr/bin/env bash
# Runs the crate's tests under AddressSanitizer, leaks included:
#
#     dytis/scripts/asan.sh                    # all of them, with few cases: a minute or two once built
#     DYTIS_LONG_OPS=200000 dytis/scripts/asan.sh --test long_run
#
# Needs the nightly toolchain (for -Z sanitizer). What is left out: doctests, which would need the flags for rustdoc, too, and
# show nothing that the tests do not; and the models on shuttle's scheduler, whose coroutines change stacks behind the
# sanitizer's back. `tests/concurrent.rs` runs the same map on real threads.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Z sanitizer=address" ASAN_OPTIONS="detect_leaks=1:${ASAN_OPTIONS:-}"
export DYTIS_LONG_OPS=${DYTIS_LONG_OPS:-10000}
export DYTIS_WORST_CASE_KEYS=${DYTIS_WORST_CASE_KEYS:-40000} DYTIS_STRESS_SECONDS=${DYTIS_STRESS_SECONDS:-5}
if [ $# = 0 ]; then
    set -- --lib
    for test in tests/*.rs; do
        test=$(basename "$test" .rs)
        [ "$test" = concurrent_model ] || set -- "$@" --test "$test"
    done
fi
exec cargo +nightly test -p dytis --all-features --target "$target" "$@"
