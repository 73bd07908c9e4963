#!/usr/bin/env bash
# The runs that need a GPU, each within a limit of seconds: `bash benchmarks/gpu_runs.sh PART [SECONDS]`, in this order on
# one H200. PART is
#   memory   starts the trainings of benchmarks/quality/memory.md, "Not run", in two queues side by side, and waits.
#            They go on when the call ends, from a copy of this tree; a second call waits on
#   tests    the tests of CUDA code, repeated, with the name of each failure. Trainings may run beside them
#   measure  ends what still trains, then times a step with a prompt and a server over HTTP, alone on the device
#
# OUT: directory of the results. KEPT: directory of what outlasts a call. BOOKS: the corpus, benchmarks/quality/README.md.
# SMOKE=1: the smallest sizes, on a CPU too.
set -uo pipefail
part=${1:-} limit=${2:-560} began=$SECONDS
OUT=${OUT:-runs/gpu} KEPT=${KEPT:-/tmp/nsm-gpu} BOOKS=${BOOKS:-books} SMOKE=${SMOKE:-} PYTHON=${PYTHON:-python3} EXTRA=${EXTRA:-}
[ -n "$SMOKE" ] && BOOKS=data/books-sample
mkdir -p "$OUT" "$KEPT"
OUT=$(realpath "$OUT") KEPT=$(realpath "$KEPT") BOOKS=$(realpath "$BOOKS")
export SMOKE OUT KEPT BOOKS PYTHON EXTRA
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
left() { echo $((limit - (SECONDS - began))); }

# A queue: its arms one after the other, each a call of its own, so that one that fails does not end the others
queue() {
  local number=$1 out=$KEPT/memory/$1 sizes=(--tokens 67895296 --split test)
  shift
  [ -n "$SMOKE" ] && sizes=(--tokens 64 --split val --books 1 --loss-tokens 64 --passage-distances 300 --history-starts 64
    --history-spans 400 --key-contexts 400 --key-distances 300 --sample-tokens 4
    --common '--preset keyed-hybrid --rows 1 --seq-len 64 --carry 1 --recall 0.15 --d-model 64 --num-layers 4')
  mkdir -p "$out" "$KEPT/memory/cache"
  ln -sfn "$KEPT/memory/cache" "$out/cache"
  for arm in "$@"; do
    echo "$(date +%T) $arm"
    $PYTHON -m benchmarks.quality.controls "${sizes[@]}" --extra "$EXTRA" --data "$BOOKS" --out "$out" --output "$out/result" \
      --tokenizer nsm_core/model/checkpoints/pulse-books-keyed/tokenizer.json --arms "$arm" || echo "FAILED: $arm"
  done
  echo "$(date +%T) the queue is done"
  touch "$out/done"
}

# Longest first. Pairs shared an H200 before (benchmarks/notes/training.md): leave a gigabyte a process beside torch's
start_memory() {
  [ -d "$KEPT/memory" ] && return
  mkdir -p "$KEPT/memory" "$KEPT/tree"
  tar --exclude=./.git --exclude=./.venv --exclude=./runs -cf - . | tar -xf - -C "$KEPT/tree"
  (cd "$KEPT/tree" && export PYTHONPATH=$KEPT/tree${PYTHONPATH:+:$PYTHONPATH} TORCHINDUCTOR_COMPILE_THREADS=4 &&
    setsid bash "$KEPT/tree/benchmarks/gpu_runs.sh" queues >"$KEPT/memory/queues.log" 2>&1 </dev/null &)
}

# The token ids of the books once (on one core each), then both queues
queues() {
  for split in train val; do
    $PYTHON -c "
from pathlib import Path
from nsm_core.tokenizer import BpeTokenizer
from nsm_lab.training.data import tokenize_split
tokenizer = BpeTokenizer.load(Path('nsm_core/model/checkpoints/pulse-books-keyed'))
tokenize_split(Path('$BOOKS'), '$split', tokenizer, Path('$KEPT/memory/cache'))
print('$split: encoded')" &
  done
  wait
  for number in 1 2; do arms_of "$number" >"$KEPT/memory/$number.log" 2>&1 & done
  wait
}

arms_of() {
  case $1 in
  1) queue 1 "slot memory, a third with GRU gates by chunks of 64" "Mamba-2" ;;
  2) queue 2 "slot memory, a third communicates" "slot memory" "windows of 434 tokens" ;;
  esac
}

gather() {
  for number in 1 2; do
    tail -n 30 "$KEPT/memory/$number.log" 2>/dev/null | cut -c1-300
    cp "$KEPT/memory/$number/result.jsonl" "$OUT/memory-$number.jsonl" 2>/dev/null
  done
}

memory() {
  start_memory
  while [ "$(left)" -gt 5 ]; do
    [ -e "$KEPT/memory/1/done" ] && [ -e "$KEPT/memory/2/done" ] && break
    sleep 5
    [ $(((SECONDS - began) % 60)) -lt 5 ] && { nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader 2>/dev/null; tail -qn 1 "$KEPT"/memory/*.log | cut -c1-150; }
  done
  gather
  tail -n 5 "$KEPT"/memory/*.log | cut -c1-300
}

# Whether destroying a graph while another is recorded ends the recording: a guess at a test failure of 05d4444e that was not named
probe() {
  [ -n "$SMOKE" ] && return
  $PYTHON - <<'PY'
import gc, torch
def leak():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
    cycle = [graph]
    cycle.append(cycle)
gc.disable()
leak()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(None, "thread_local")
        x = torch.zeros(1, device="cuda")
        gc.collect()
        graph.capture_end()
    print("probe: a graph may be destroyed while another is recorded")
except Exception as error:
    print("probe: destroying a graph ends a recording:", type(error).__name__, str(error).splitlines()[0])
PY
}

# Each failure is named in the summary, with its traceback in the log; the tests are repeated while time is left
tests() {
  probe 2>&1 | tee "$OUT/probe.txt"
  local paths=(tests/nsm_core/execution/cuda tests/nsm_core/ops tests/nsm_core/engine/test_held_states.py
    tests/nsm_core/state/test_row_copies.py tests/nsm_core/sampling/test_device.py tests/nsm_lab/baselines/test_rwkv7_scan.py
    tests/nsm_core/execution/test_executor.py)
  [ -n "$SMOKE" ] && paths=(tests/nsm_core/execution/cuda/test_recording.py)
  for turn in 1 2 3 4; do
    [ "$(left)" -gt 60 ] || break
    timeout -s INT -k 20 "$(left)" $PYTHON -m pytest -q -p no:cacheprovider -n "${WORKERS:-6}" --dist loadfile -rfE --tb=short \
      --durations=5 --timeout 300 -k 'not native and not eager' --junitxml="$OUT/tests-$turn.xml" "${paths[@]}" >"$OUT/tests-$turn.log" 2>&1
    grep -E '^(FAILED|ERROR)|passed|failed' "$OUT/tests-$turn.log" | tail -n 40
    [ -n "$SMOKE" ] && break
  done
  gather
}

measure() {
  for pid in $(pgrep -f "$KEPT/tree/benchmarks/gpu_runs.sh queues" || true); do kill -- "-$pid" 2>/dev/null; done # of `memory`, each with a session of its own
  gather
  local small=(--repeats 1)
  [ -n "$SMOKE" ] && small=(--rows 4 --pieces 1x64 --slots 16 --prompts 2 --row-tokens 24 --repeats 1 --connections 2 --gateway-prompts 1)
  timeout -k 10 "$(left)" $PYTHON -m benchmarks.gpu_prompts "${small[@]}" 2>&1 | tee "$OUT/gpu_prompts.txt" | cut -c1-400 | head -n 90
  local serve='--device cuda --state-cache-mb 4096 --workers 8' loads=(--clients 8 --streams 512 --tokens 128 --sessions 256 --beside 128 --prompts 8)
  [ -n "$SMOKE" ] && serve='--device cpu --workers 2 --model pulse-books-small' loads=(--clients 2 --streams 2 --tokens 8 --sessions 2 --turns 1 --turn-tokens 4 --beside 2 --beside-tokens 16 --prompts 1 --prompt-words 20)
  for turn in 1 2; do
    [ "$(left)" -gt 60 ] || break
    timeout -k 10 "$(left)" $PYTHON -m benchmarks.http_gpu --serve "$serve" "${loads[@]}" --seed $((turn * 100000)) 2>&1 |
      tee -a "$OUT/http_gpu.txt" | cut -c1-200
    [ -n "$SMOKE" ] && break
  done
}

case $part in
memory | tests | measure) "$part" ;;
queues) queues ;;
*) echo "no such part: '$part'; see the first lines of $0" && exit 2 ;;
esac
echo "$part: $((SECONDS - began)) s"
