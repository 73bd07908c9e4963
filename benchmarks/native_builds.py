"""The native CPU kernels of several commits, by turns: `python -m benchmarks.native_builds 96d9ad5 HEAD`. A table.

Each commit's sources are built in a directory of their own and measured by this tree's `benchmarks.native_kernels`, in
a process of its own, in turns whose order changes with the round: two models in one process would take each other's
place in the last cache. Figures are medians of the rounds: tokens per CPU second, of products GOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from nsm_core.execution.native.library import variants

Figures = dict[str, float]


def unpack(commit: str, directory: Path) -> None:
    """The package as it was, with its library built, and the benchmarks of today. Raises CalledProcessError."""
    directory.mkdir()
    archive = subprocess.run(["git", "archive", commit, "nsm_core"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
    shutil.copytree(Path(__file__).parent, directory / "benchmarks", ignore=shutil.ignore_patterns("results"))
    python(directory, "nsm_core.execution.native.build")


def python(directory: Path, module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(directory)}
    return subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(directory: Path, args: argparse.Namespace) -> Figures:
    numbers = {"--batches": args.batches, "--lengths": args.lengths, "--repeats": [args.repeats]}
    arguments = [word for name, values in numbers.items() for word in (name, *map(str, values))]
    arguments += ["--model", args.model, "--precision", args.precision] + ["--fp16-states"] * args.fp16_states
    output = python(directory, "benchmarks.native_kernels", "--variants", args.variant, *arguments)
    (run,) = json.loads(output.splitlines()[-1])["runs"]
    products = {f"{row['rows']} x {row['cols']}, {row['tokens']} tokens": row["gops"] for row in run["products"]}
    steps = {f"decode {row['batch']}, {row['context']} windows": row["tokens_per_cpu_s"] for row in run["steps"]}
    return products | steps | {f"reading {row['length']}": row["tokens_per_cpu_s"] for row in run["reading"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+", help="the first is what others are compared with")
    parser.add_argument("--variant", choices=variants(), default=variants()[0])
    parser.add_argument("--model", default="pulse-books", help="a bundled one")
    parser.add_argument("--precision", choices=("int8", "int4"), default="int8")
    parser.add_argument("--fp16-states", action="store_true", help="running states in fp16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--repeats", type=int, default=25, help="steps a figure; medians")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directories = [Path(scratch) / str(index) for index in range(len(args.commits))]
        for commit, directory in zip(args.commits, directories, strict=True):
            unpack(commit, directory)
        rounds: list[list[Figures]] = [[] for _ in args.commits]
        for number in range(args.rounds):
            turns = list(enumerate(directories))
            for index, directory in turns if number % 2 == 0 else reversed(turns):
                rounds[index].append(measure(directory, args))
    print(f"{args.variant:<28}" + "".join(f"{commit[:12]:>18}" for commit in args.commits))
    for name in rounds[0][0]:
        rates = [statistics.median(figures[name] for figures in taken) for taken in rounds]
        print(f"{name:<28}" + "".join(f"{rate:>10.0f} {rate / rates[0]:>6.2f}x" for rate in rates))


if __name__ == "__main__":
    main()
