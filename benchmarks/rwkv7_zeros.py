"""How many inner numbers of RWKV-7's channel mix are zero: `python -m benchmarks.rwkv7_zeros --model FILE`. A table.

Of a text of test books, in the plain model: for each layer the share of zeros, of numbers that int8 kernels round to
zero in both of their rows, and of zeros that 8 tokens in a row share.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.model.storage import quantize_rows
from nsm_core.rwkv7 import model as plain
from nsm_core.rwkv7.loader import load_rwkv7
from nsm_core.rwkv7.time_mix import shifted
from nsm_core.rwkv7.weights import ChannelMix
from nsm_lab.training.data_files import read_documents

ROOT = Path(__file__).parents[1]
SHARED = 8


def share(found: Tensor) -> float:
    return float(found.float().mean())


def rounded_zeros(inner: Tensor) -> Tensor:
    """inner [tokens, hidden] -> bool: zero as one row of int8 and, of what that leaves over, as another."""
    rough, scale = quantize_rows(inner)
    fine, _ = quantize_rows(inner - rough * scale[:, None])
    return (rough == 0) & (fine == 0)


class Counting:
    """The plain channel mix, which notes its shares at each call: `rows`."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def __call__(self, layer: ChannelMix, x: Tensor, before: Tensor) -> Tensor:
        mixed = x + (shifted(x, before) - x) * layer.shift
        inner = torch.relu(F.linear(mixed, layer.key)).square()
        zeros = inner[0] == 0
        together = zeros[: len(zeros) // SHARED * SHARED].unflatten(0, (-1, SHARED)).all(dim=1)
        self.rows.append((share(zeros), share(rounded_zeros(inner[0])), share(together)))
        return F.linear(inner, layer.value)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "tests/assets/rwkv7-books", help="an RWKV-7 file")
    parser.add_argument("--tokens", type=int, default=plain.PIECE_LEN, help=f"at most {plain.PIECE_LEN}")
    args = parser.parse_args()
    loaded, counting = load_rwkv7(args.model), Counting()
    text = next(iter(read_documents(ROOT / "data/books-sample", "test"))).text
    ids = loaded.tokenizer.encode(text[: 12 * args.tokens])[: min(args.tokens, plain.PIECE_LEN)]
    with mock.patch.object(plain, "channel_mix", counting):
        loaded.model.forward(torch.tensor([ids]), loaded.model.initial_state(1))
    print(f"{'layer':<8}{'zero':>10}{'in int8':>10}{f'{SHARED} tokens':>10}")
    means = tuple(sum(column) / len(counting.rows) for column in zip(*counting.rows, strict=True))
    for name, row in (*enumerate(counting.rows), ("mean", means)):
        print(f"{name:<8}" + "".join(f"{value:>10.1%}" for value in row))


if __name__ == "__main__":
    main()
