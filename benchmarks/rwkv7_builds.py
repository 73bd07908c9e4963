"""RWKV-7's CPU kernels of several commits, by turns: `python -m benchmarks.rwkv7_builds edd682fd HEAD --model FILE`.

Each commit's sources are built in a directory of their own. A process for each holds the model in int8, on one thread,
and gives one figure when it is asked: tokens per CPU second of steps, and of a prompt. A round asks each process once,
and the next one in the other order. A table: medians, and the median ratio of a round to the first commit's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.native_builds import unpack
from benchmarks.peers.engine import rwkv7_kernels

STEP_TOKENS = 32  # that a figure of steps has at least
PROMPT_TOKENS = 512


class Build:
    """A commit's process."""

    def __init__(self, directory: Path, model: Path, most_rows: int) -> None:
        command = [sys.executable, "-m", "benchmarks.rwkv7_builds", "--answer", str(most_rows), "--model", str(model)]
        environment = os.environ | {"PYTHONPATH": str(directory)}
        self._process = subprocess.Popen(
            command, cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def figure(self, rows: int) -> float:
        """Tokens per CPU second of steps of so many rows; of a prompt for 0. Raises RuntimeError."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        print(rows, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process ended")
        return float(line)

    def close(self) -> None:
        self._process.communicate()


def answer(model: Path, most_rows: int) -> None:
    """What such a process does."""
    torch.set_num_threads(1)
    kernels = rwkv7_kernels(model, max_batch=most_rows)
    for line in sys.stdin:
        rows = int(line)
        tokens, lengths = (max(8, STEP_TOKENS // rows), []) if rows else (1, [PROMPT_TOKENS])
        figures = kernels.decode_and_prefill(batches=[rows] if rows else [], num_tokens=tokens, lengths=lengths)
        (figure,) = figures.values()
        print(figure, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", help="the first is what others are compared with")
    parser.add_argument("--model", type=Path, required=True, help="an RWKV-7 file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model.absolute()
    if args.answer is not None:
        answer(model, args.answer)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directories = [Path(scratch) / str(index) for index in range(len(args.commits))]
        for commit, directory in zip(args.commits, directories, strict=True):
            unpack(commit, directory)
        builds = [Build(directory, model, max(args.rows)) for directory in directories]
        taken: dict[int, list[list[float]]] = {}
        for rows in (*args.rows, 0):
            for number in range(args.rounds + 1):  # the first one is not counted
                turn = builds if number % 2 == 0 else builds[::-1]
                figures = {id(build): build.figure(rows) for build in turn}
                if number > 0:
                    taken.setdefault(rows, []).append([figures[id(build)] for build in builds])
        for build in builds:
            build.close()
    print(f"{'tokens per CPU second':<24}" + "".join(f"{commit[:12]:>18}" for commit in args.commits))
    for rows, rounds in taken.items():
        cells = [
            f"{statistics.median(each[index] for each in rounds):>10.0f} "
            f"{statistics.median(each[index] / each[0] for each in rounds):>6.2f}x"
            for index in range(len(builds))
        ]
        print(f"{f'steps, {rows} rows' if rows else f'a prompt of {PROMPT_TOKENS}':<24}" + "".join(cells))
    print(json.dumps({"commits": args.commits, "rounds": taken}))


if __name__ == "__main__":
    main()
