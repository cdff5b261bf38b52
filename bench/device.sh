#!/usr/bin/env bash
# Checks and times the kernels on one GPU in at most 8 minutes, without a network and without installing anything.
#
#   OUT=results bench/device.sh             every step; status 1 if one of them failed or did not finish
#   bench/device.sh --dry-run               what would run, with its limits in seconds
#
# Needs Linux, a GPU, and a python3 (or $PYTHON) with torch, triton, attrs, click, rich, pytest, pytest-timeout and
# hypothesis. Tests run in 12 processes: of pytest-xdist where it is installed, else one a file. Writes to $OUT:
#
#   benches.jsonl   the JSON object of every bench, one a line
#   tables.txt      what the benches printed, for people
#   tests.txt       what pytest printed
#   summary.txt     status and seconds of every step
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly BUDGET_S=465
readonly TESTS_S=260
readonly PYTHON="${PYTHON:-python3}"
is_dry_run=false
case "${1:-}" in
    "") ;;
    --dry-run) is_dry_run=true ;;
    *)
        echo "usage: bench/device.sh [--dry-run]" >&2
        exit 2
        ;;
esac

export PYTHONPATH="$PWD:$PWD/server:$PWD/bench" PYTHONUNBUFFERED=1
# The kernels must be compiled, from nothing, and for nobody else.
unset TRITON_INTERPRET
num_failed=0

# run_step FILE LIMIT_S COMMAND...: runs the command for at most so long, its output to $OUT/FILE and here.
run_step() {
    local file="$1" limit_s="$2" left_s=$((BUDGET_S - SECONDS)) started_s=$SECONDS status=0
    shift 2
    if $is_dry_run; then
        printf '%4d s  %s\n' "$limit_s" "$*"
        return
    fi
    if ((left_s < 15)); then
        echo "skipped, the $BUDGET_S s are used up: $*" | tee -a "$OUT/summary.txt"
        num_failed=$((num_failed + 1))
        return
    fi
    echo "== $*" | tee -a "$OUT/$file"
    # pytest still tells what it found when it is interrupted; what does not listen is killed.
    timeout --signal=INT --kill-after=10 "$((limit_s < left_s ? limit_s : left_s))" "$@" 2>&1 | tee -a "$OUT/$file"
    status=${PIPESTATUS[0]}
    ((status == 0)) || num_failed=$((num_failed + 1))
    printf 'status %d, %d s: %s\n' "$status" "$((SECONDS - started_s))" "$*" >>"$OUT/summary.txt"
}

# require_passed FILE TEST: pytest is content with a test that it skipped; here it counts as failed.
require_passed() {
    $is_dry_run && return
    grep -Eq "PASSED.*::$2|::$2.*PASSED" "$OUT/$1" && return
    echo "did not pass, and a GPU is there: $2" | tee -a "$OUT/summary.txt"
    num_failed=$((num_failed + 1))
}

# run_bench LIMIT_S ARGUMENTS...: one bench; its JSON object also to benches.jsonl.
run_bench() {
    local limit_s="$1"
    shift
    run_step tables.txt "$limit_s" "$PYTHON" -m astrai_bench "$@" --device cuda --json "$scratch/result.json"
    if [[ -s "$scratch/result.json" ]]; then
        cat "$scratch/result.json" >>"$OUT/benches.jsonl"
        rm "$scratch/result.json"
    fi
}

scratch=/tmp
if ! $is_dry_run; then
    OUT="${OUT:-bench/results/$(date +%Y-%m-%d)}"
    mkdir -p "$OUT" && scratch="$(mktemp -d)" || exit 2
    trap 'rm -rf "$scratch"' EXIT
    export TRITON_CACHE_DIR="$scratch/triton" TORCHINDUCTOR_CACHE_DIR="$scratch/inductor"
    if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "bench/device.sh: wanted a GPU that $PYTHON's torch can use, found none; --dry-run needs none" >&2
        exit 2
    fi
    : >"$OUT/benches.jsonl" && : >"$OUT/summary.txt" && : >"$OUT/tables.txt" && : >"$OUT/tests.txt"
fi

# The tests that compute on a GPU where there is one, those that cannot run anywhere else first.
graph_test=test_on_a_gpu_captured_steps_answer_like_eager_ones_at_any_length
tests=(tests/engine/test_graphs.py tests/model/test_prefill_writes.py tests/ops tests/backend)
pytest=("$PYTHON" -m pytest -v --tb=short -p no:cacheprovider --timeout 200)
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    run_step tests.txt "$TESTS_S" "${pytest[@]}" -n 12 "${tests[@]}"
else
    # Of its arguments $0 is how many say where the tests are; the others are the command for a file.
    # shellcheck disable=SC2016 # the inner shell expands it
    by_file='find "${@:1:$0}" -name "test_*.py" -print0 | xargs -0 -P 12 -n 1 "${@:$0 + 1}"'
    run_step tests.txt "$TESTS_S" bash -c "$by_file" "${#tests[@]}" "${tests[@]}" "${pytest[@]}"
fi
require_passed tests.txt "$graph_test"

# The shapes whose floors are known, in the order of what they are worth.
ours=(--backend triton --backend torch_sdpa)
run_bench 60 decode --batch 16 --kv-len 4096 "${ours[@]}" --backend flex_attention
run_bench 60 prefill --batch 1 --q-len 8192 "${ours[@]}" --backend flex_attention
run_bench 40 rotary --batch 1 --q-len 8192 --backend triton --backend torch_native
run_bench 40 paged-decode --batch 16 --kv-len 4096 --page 1 --backend triton --backend torch_native
run_bench 40 paged-prefill --batch 4 --q-len 2048 --page 1 --backend triton --backend torch_native
run_bench 40 decode --batch 1 --kv-len 4096 "${ours[@]}"
run_bench 40 decode --batch 1 --kv-len 131072 "${ours[@]}"
run_bench 40 decode --batch 64 --kv-len 4096 "${ours[@]}"
run_bench 40 paged-decode --batch 16 --kv-len 4096 --page 64 --backend triton
run_bench 40 paged-prefill --batch 1 --q-len 64 --kv-len 32768 --page 64 --backend triton
run_bench 40 rotary --batch 64 --q-len 1 --backend triton

if ! $is_dry_run; then
    echo "== summary, $SECONDS s in all, $num_failed failed; files in $OUT"
    cat "$OUT/summary.txt"
fi
((num_failed == 0))
