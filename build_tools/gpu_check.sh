#!/usr/bin/env bash
# Everything that needs a GPU, on a host that has one: builds the library from emitted sources, runs the GPU tests, the
# sanitizer and the bench. A step that fails is reported and the others still run; the exit status is 1 if any failed.
#
# Usage: build_tools/gpu_check.sh RESULTS [EMITTED]     from anywhere; EMITTED defaults to carry/emitted
#   RESULTS          folder for every step's output, summary.txt, and the bench's JSON files and plots
#   CARRIED          folders of carried Python packages, colon-separated, put in front of PYTHONPATH
#   BUILD_OUT        where the build goes, default out
#   RACE_PYTHON_DIR  a Python module that was built for the race checker, to use instead of building one in BUILD_OUT-racecheck
#   TILEPRESS_COMMIT what the bench records as the commit
#   STEPS            which steps to run, default "host build tests memcheck racecheck synccheck bench soak". Also known: prefill,
#                    decode, sliding and prep, which are the bench's modes alone
#   STEP_SECONDS     time a step may take, default 600: a sanitizer of every kernel takes minutes
#   TEST_ARGS        more arguments for pytest
#   MEMCHECK_ARGS, RACECHECK_ARGS, SYNCCHECK_ARGS   kernels that the tool runs, as tests/gpu/sanitize.py names them; by default
#                    all for memcheck, and those that are not FlashInfer's for the others
#   BENCH_ARGS, PREFILL_ARGS, DECODE_ARGS, SLIDING_ARGS, PREP_ARGS, SOAK_ARGS   more arguments for `python3 -m bench all`,
#                    `prefill`, `decode`, `sliding`, `prep` and `soak`
set -uo pipefail

results=$(realpath -m "${1:?usage: build_tools/gpu_check.sh RESULTS [EMITTED]}")
emitted=$(realpath -m "${2:-$(dirname "$0")/../carry/emitted}")
cd "$(dirname "$0")/.." || exit 2
out=$(realpath -m "${BUILD_OUT:-out}")
race_out=$out-racecheck
steps=${STEPS:-host build tests memcheck racecheck synccheck bench soak}
mkdir -p "$results" || exit 2
: >"$results/summary.txt"

export PYTHONPATH="${CARRIED:+$CARRIED:}$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TILEPRESS_PYTHON_DIR="$out/python"
# nvcc and the sanitizer may be installed and yet not on PATH.
for bin in "${CUDA_HOME:-/usr/local/cuda}/bin" "${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer"; do
  if [ -d "$bin" ]; then PATH="$PATH:$bin"; fi
done

failed=0

# step NAME COMMAND...: runs it if asked for, with its output also in RESULTS/NAME.log.
step() {
  local name=$1 start=$SECONDS code
  shift
  case " $steps " in *" $name "*) ;; *) return 0 ;; esac
  echo "== $name: $*"
  timeout "${STEP_SECONDS:-600}" "$@" 2>&1 | tee "$results/$name.log"
  code=${PIPESTATUS[0]}
  local verdict="ok"
  if [ "$code" -eq 124 ]; then verdict="FAILED: over ${STEP_SECONDS:-600} s"; elif [ "$code" -ne 0 ]; then verdict="FAILED: exit $code"; fi
  if [ "$code" -ne 0 ]; then failed=1; fi
  printf '%-10s %4d s  %s\n' "$name" $((SECONDS - start)) "$verdict" | tee -a "$results/summary.txt"
}

step host bash -c 'set -e; nvidia-smi; nvcc --version; cmake --version; ninja --version; python3 -c "import sys, torch; print(sys.version, torch.__version__)"'
step build python3 -m codegen build --arch sm_90 --from "$emitted" --python --out "$out"
# shellcheck disable=SC2086  # TEST_ARGS and the like are lists
step tests env PEGAINFER_REQUIRE_GPU=1 python3 -m pytest -m gpu -q --durations=10 -p no:cacheprovider tests/gpu ${TEST_ARGS:-}
# torch probes the driver for functions it may lack; those calls fail by design and are not the library's.
# shellcheck disable=SC2086
step memcheck compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python3 tests/gpu/sanitize.py ${MEMCHECK_ARGS:-}

# The race checker follows fewer kinds of synchronisation than a GPU has: kernels that use another kind name TILEPRESS_RACECHECK,
# and a build with --racecheck uses one that it follows, at the same places.
race_python=$TILEPRESS_PYTHON_DIR
if [ -n "${RACE_PYTHON_DIR:-}" ]; then
  race_python=$(realpath -m "$RACE_PYTHON_DIR")
elif grep -rqs TILEPRESS_RACECHECK "$emitted"; then
  race_python=$race_out/python
  case " $steps " in *" racecheck "*) steps="$steps racebuild" ;; esac
fi
step racebuild python3 -m codegen build --arch sm_90 --from "$emitted" --python --racecheck --out "$race_out"
# shellcheck disable=SC2086
step racecheck env TILEPRESS_PYTHON_DIR="$race_python" \
  compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/gpu/sanitize.py ${RACECHECK_ARGS:-own}
# shellcheck disable=SC2086
step synccheck compute-sanitizer --tool synccheck --error-exitcode 1 python3 tests/gpu/sanitize.py ${SYNCCHECK_ARGS:-own}
# shellcheck disable=SC2086
step bench python3 -m bench all --out-dir "$results" ${BENCH_ARGS:-}
# shellcheck disable=SC2086
step prefill python3 -m bench prefill --out "$results/prefill.json" ${PREFILL_ARGS:-}
# shellcheck disable=SC2086
step decode python3 -m bench decode --out "$results/decode.json" ${DECODE_ARGS:-}
# shellcheck disable=SC2086
step sliding python3 -m bench sliding --out "$results/sliding.json" ${SLIDING_ARGS:-}
# shellcheck disable=SC2086
step prep python3 -m bench prep --out "$results/prep.json" ${PREP_ARGS:-}
# shellcheck disable=SC2086
step soak python3 -m bench soak ${SOAK_ARGS:-}

echo "== summary"
cat "$results/summary.txt"
exit "$failed"
