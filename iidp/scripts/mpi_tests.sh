#!/usr/bin/env bash
# The MPI communicator under mpirun: every collective on 1 to 4 processes, every way to fail on 3 and 4, and training (data-parallel and hybrid) that equals that over threads.
# Needs Open MPI and clang (Debian: libopenmpi-dev openmpi-bin clang libclang-dev).
set -euo pipefail
cd "$(dirname "$0")/../.."

# Over the whole workspace, so that the build of Burn that the other tests use serves here too.
cargo build --quiet --features mpi --example mpi_check --example mpi_training --example mpi_hybrid
examples="$(cargo metadata --no-deps --format-version 1 | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/debug/examples"
check=$examples/mpi_check
run=(mpirun --allow-run-as-root --oversubscribe)

# expect COUNT ARGUMENTS..: exactly COUNT ranks report OK, none reports a failure.
expect() {
    local count=$1 output
    shift
    output=$(timeout 120 "${run[@]}" "$@" 2>&1) || true
    if [ "$(grep -c '^OK' <<<"$output")" -ne "$count" ] || grep -q '^FAILED' <<<"$output"; then
        printf 'failed: %s\n%s\n' "$*" "$output"
        exit 1
    fi
    printf 'ok: %s\n' "$*"
}

for n in 1 2 3 4; do
    expect "$n" -n "$n" "$check" collectives
done
for n in 3 4; do
    # Ranks end without MPI_Finalize once the world has failed; recovery keeps mpirun from ending the others before they report.
    for mode in abort operation length timeout leave; do
        expect "$n" --enable-recovery -n "$n" "$check" "$mode"
    done
    # The last rank unwinds or dies: the others report it.
    for mode in panic kill; do
        expect "$((n - 1))" --enable-recovery -n "$n" "$check" "$mode"
    done
done
# Without recovery mpirun ends the whole job: no rank hangs.
timeout 60 "${run[@]}" -n 3 "$check" kill >/dev/null 2>&1 && exit 1
[ "$?" -ne 124 ] || { echo 'failed: a killed process left the job hanging'; exit 1; }
echo 'ok: a killed process ends the job'
for n in 1 2 3; do
    # Only rank 0 reports, once the others have ended with it.
    expect 1 -n "$n" "$examples/mpi_training"
done
for layout in '2 2 1' '1 1 4' '1 2 2'; do
    # Every rank compares its run over processes with one over threads.
    # shellcheck disable=SC2086 # three arguments
    expect 4 -n 4 "$examples/mpi_hybrid" $layout
done
