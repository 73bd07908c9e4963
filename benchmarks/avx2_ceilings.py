"""How far the AVX2 kernels are from what one core can do: `python -m benchmarks.avx2_ceilings`. Tables.

Products a cycle (one weight times one input) that the instructions of int4 and int8 products reach in a loop without
memory, and that the kernels reach on the model's matrices, which lie in the caches. A microsecond a head of keyed
slots and token: in a step, from the cache alone, and what reading and writing as much memory in order takes. CPU
times, the least of many, so that a busy machine distorts them less.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from nsm_core.execution.native.build import AVX2, FLAGS, SOURCES, find_compiler
from nsm_core.execution.native.weights import packed_matrices
from nsm_core.model.bundled import find_checkpoint
from nsm_core.model.loader import load_checkpoint

PROGRAM = Path(__file__).with_suffix(".cpp")
TOKENS = (1, 8, 32)


def measure(model: Path, repeats: int) -> dict[str, float]:
    """By name, as the program prints them. Raises RuntimeError without a compiler, CalledProcessError if it fails."""
    matrices = packed_matrices(load_checkpoint(find_checkpoint(model)).model).values()
    shapes = Counter((weight.shape[0], weight.shape[1]) for _, _, weight in matrices)
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "ceilings"
        subprocess.run([compiler, *FLAGS, *AVX2, f"-I{SOURCES}", PROGRAM, "-o", program], check=True)
        numbers = [str(number) for shape, count in shapes.items() for number in (*shape, count)]
        output = subprocess.run([program, str(repeats), *numbers], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name: float(value) for name, value in (line.split() for line in output.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("pulse-books-keyed"), help="whose matrices are multiplied")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    figures = measure(args.model, args.repeats)
    print(f"clock {figures['clock']:.2f} GHz\n\nproducts a cycle     at most" + "".join(f"{n:>6}" for n in TOKENS))
    for name in ("int4", "int8"):
        rates = "".join(f"{figures[f'{name}.{tokens}']:>6.1f}" for tokens in TOKENS)
        print(f"{name:<21}{figures[f'{name}.most']:>7.1f}{rates}")
    print("\nus a head and token    step  cached  memory")
    for rows in (8, 32):
        for name in ("fp32", "fp16"):
            parts = "".join(f"{figures[f'{name}.{rows}.{part}']:>8.2f}" for part in ("step", "cached", "memory"))
            print(f"{f'{name}, {rows} rows':<19}{parts}")


if __name__ == "__main__":
    main()
