"""The training runs behind the quality tables: `python -m benchmarks.quality.runs NAME... --data books --out runs`.

Each name stands for one `python -m nsm_lab.training` command, printed before it starts. Runs are given to the GPUs one
by one as they become free (`--gpus 0,1`); with `--wide` each run takes all of them, under torchrun. The log of a run
goes to OUT/NAME.log.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

RECIPE = "--dropout 0.1 --weight-decay 0.1 --warmup 0.02 --decay 0.5 --eval-batches 16"
LOW, HIGH = "--muon-lr 0.015 --adam-lr 6e-3", "--muon-lr 0.03 --adam-lr 6e-3"
SHORT = "--steps 700 --rows 64 --eval-every 350 --save-every 700"  # 46M tokens
FINAL = "--steps 3050 --rows 128 --eval-every 500 --save-every 3050"  # 400M tokens
NO_CARRY = "--carry 0"
TOP_8 = "--router softmax --write-top-k 8 --timescale-groups 4"
DENSE = "--router softmax --write-top-k 64 --timescale-groups 1"
ALTERNATING = f"--preset hybrid --layer-pattern NW --window 256 --mlp-hidden 1728 {TOP_8}"

RUNS: dict[str, str] = {
    # Learning rates and kinds of hybrids, by validation loss
    "tune-transformer-low": f"--preset transformer {NO_CARRY} {SHORT} {LOW}",
    "tune-transformer-high": f"--preset transformer {NO_CARRY} {SHORT} {HIGH}",
    "tune-window-low": f"--preset sliding-window --window 256 {SHORT} {LOW}",
    "tune-window-high": f"--preset sliding-window --window 256 {SHORT} {HIGH}",
    "tune-window-no-carry": f"--preset sliding-window --window 256 {NO_CARRY} {SHORT} {LOW}",
    "tune-hybrid-low": f"{ALTERNATING} {SHORT} {LOW}",
    "tune-hybrid-high": f"{ALTERNATING} {SHORT} {HIGH}",
    "tune-hybrid-far": f"--preset hybrid {TOP_8} {SHORT} {LOW}",
    "tune-pulse-low": f"--preset base {TOP_8} {SHORT} {LOW}",
    "tune-pulse-no-carry": f"--preset base {TOP_8} {NO_CARRY} {SHORT} {LOW}",
    # Who may write how much
    "tune-sigmoid-low": f"--preset base {SHORT} {LOW}",
    "tune-sigmoid-high": f"--preset base {SHORT} {HIGH}",
    "tune-dense": f"--preset base {DENSE} {SHORT} {LOW}",
    "tune-hybrid-far-sigmoid": f"--preset hybrid {SHORT} {LOW}",
    "tune-hybrid-far-sigmoid-high": f"--preset hybrid {SHORT} {HIGH}",
    # The comparison: equal tokens, equal order
    "pulse-top-8": f"--preset base {TOP_8} {FINAL} {LOW}",
    "pulse": f"--preset base {FINAL} {LOW}",
    "hybrid": f"--preset hybrid {FINAL} {LOW}",
    "transformer": f"--preset transformer {NO_CARRY} {FINAL} {HIGH}",
    "transformer-2048": f"--preset transformer --max-context 2048 --seq-len 2048 {NO_CARRY} {FINAL} --rows 64 {HIGH}",
    "sliding-window": f"--preset sliding-window {FINAL} {LOW}",
    # For tests and demonstrations
    "small": f"--preset small --steps 3050 --rows 64 --eval-every 500 --save-every 3050 {LOW}",
}


def command(name: str, options: argparse.Namespace) -> list[str]:
    """The training command of a run on one GPU, or under torchrun on all of them."""
    flags = shlex.split(f"{RUNS[name]} {RECIPE} {options.extra}")
    common = ["--data", options.data, "--tokenizer", options.tokenizer, "--out", f"{options.out}/{name}"]
    common += ["--cache", f"{options.out}/cache"]
    launcher = [sys.executable]
    if options.wide:
        num_gpus = len(options.gpus.split(","))
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
        rows = len(flags) - flags[::-1].index("--rows")  # after the last one, which is the one that counts
        flags[rows] = str(int(flags[rows]) // num_gpus)
    return [*launcher, "-m", "nsm_lab.training", *common, *flags]


def run(name: str, free_gpus: SimpleQueue[str], options: argparse.Namespace) -> tuple[str, int, float]:
    """Exit status and seconds of one run, on the next free GPU."""
    visible = free_gpus.get()
    argv = command(name, options)
    print(f"GPU {visible}: {shlex.join(argv)}", flush=True)
    started = time.monotonic()
    try:
        with open(f"{options.out}/{name}.log", "w", encoding="utf-8") as log:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
            done = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    finally:
        free_gpus.put(visible)
    return name, done.returncode, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=sorted(RUNS), metavar="NAME")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpus", default="0", help="numbers of the GPUs, by commas")
    parser.add_argument("--wide", action="store_true", help="each run on all GPUs")
    parser.add_argument("--extra", default="", help="further options of every run, as one string")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    lanes = [options.gpus] if options.wide else options.gpus.split(",")
    free_gpus: SimpleQueue[str] = SimpleQueue()
    for visible in lanes:
        free_gpus.put(visible)
    with ThreadPoolExecutor(len(lanes)) as pool:
        results = list(pool.map(lambda name: run(name, free_gpus, options), options.names))
    for name, status, seconds in results:
        log = Path(options.out, name, "log.csv")
        last = log.read_text("utf-8").splitlines()[-1] if log.exists() else "no log"
        print(f"{name}: exit status {status}, {seconds:.0f} s, {last}", flush=True)
    return max(status for _, status, _ in results)


if __name__ == "__main__":
    sys.exit(main())
