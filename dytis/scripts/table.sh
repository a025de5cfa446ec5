#!/usr/bin/env bash
# Measures the index against its rivals and puts the tables and the plot into the documents:
#
#     dytis/scripts/table.sh measure RESULTS    # all chunks: about twelve minutes on two idle cores
#     dytis/scripts/table.sh chunk N RESULTS    # one of them (1 to 11), at most three minutes
#     dytis/scripts/table.sh render RESULTS     # into dytis/README.md, dytis/docs/speed.svg and docs/BENCHMARKS.md
#
# RESULTS is a file that grows by a line for each map and stream; of two lines of the same the later counts. KEYS is the number of
# keys of the large streams (10000000), OPS that of operations in a phase (2000000). DYTIS_TABLE and DYTIS_THREADS name the benches
# where they are built already.
set -euo pipefail
cd "$(dirname "$0")/../.."
keys=${KEYS:-10000000}
ops=${OPS:-2000000}
chunks=11
# Some rivals choose their instructions when they are compiled.
export RUSTFLAGS=${RUSTFLAGS:--C target-cpu=native}

bench() {
    local name=$1 built=$2
    shift 2
    if [ -n "$built" ]; then "$built" "$@"; else cargo bench -q --bench "$name" -- "$@"; fi
}

table() {
    local group=$1 streams=$2 keys=$3 indexes=$4
    shift 4
    bench dytis_table "${DYTIS_TABLE:-}" --group "$group" --streams "$streams" --keys "$keys" --indexes "$indexes" \
        --results "$results" --ops "$ops" "$@"
}

# The two rivals that are worth it everywhere, and a third for some; all of them on fewer keys.
chunk() {
    local three=dytis,std,brie four=dytis,std,brie,indexset
    case $1 in
    1) table "Large streams" uniform "$keys" "$four" ;;
    2) table "Large streams" lognormal "$keys" "$three" ;;
    3) table "Large streams" longitude "$keys" "$three" ;;
    4) table "Large streams" taxi "$keys" "$four" ;;
    5) table "Large streams" review "$keys" "$three" ;;
    6) table "Large streams" timestamp "$keys" "$four" ;;
    7) table "Large streams" adversarial "$keys" "$three" ;;
    8) table "More rivals" uniform,timestamp $((keys / 10)) "$four,skiplist,scc,congee" --ops $((ops / 4)) ;;
    9)
        table "Worst cases" ascending,descending,seconds,micros,nanos,dense_small,prefix48,power_runs,hot_point,ends,sawtooth \
            $((keys / 10)) "$three" --ops $((ops / 2))
        ;;
    10) table "Key sets" nyc_time,nyc_plane,phone_prefix,cities_lonlat,cities_geonameid "$keys" "$three" --rounds 3 ;;
    11)
        bench dytis_threads "${DYTIS_THREADS:-}" --streams uniform,timestamp --keys $((keys / 10)) --ops "$ops" --rounds 3 --out "$results"
        ;;
    *)
        echo "expected a chunk from 1 to $chunks, got $1" >&2
        exit 2
        ;;
    esac
}

# Puts a file's text between the two marks in another.
splice() {
    local text=$1 file=$2
    awk -v text="$text" '
        /<!-- table: end -->/ { inside = 0 }
        !inside { print }
        /<!-- table: begin/ { inside = 1; while ((getline line < text) > 0) print line; print "" }
    ' "$file" >"$file.new"
    mv "$file.new" "$file"
}

render() {
    local made
    made=$(mktemp -d)
    bench dytis_table "${DYTIS_TABLE:-}" --render "$results" --summary "$made/summary" --full "$made/full" --svg dytis/docs/speed.svg
    splice "$made/summary" dytis/README.md
    splice "$made/full" docs/BENCHMARKS.md
    rm -r "$made"
}

case ${1:-} in
measure) results=${2:?the file for the results} ;;
chunk) results=${3:?the file for the results} ;;
render) results=${2:?the file with the results} ;;
*)
    sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,12p
    exit 2
    ;;
esac
# A path of the caller's folder.
[[ $results = /* ]] || results=$OLDPWD/$results
case $1 in
measure) for ((number = 1; number <= chunks; number++)); do chunk "$number"; done ;;
chunk) chunk "$2" ;;
render) render ;;
esac
