"""How far small models of a layer carry a pair of tokens, on a CPU: `python -m benchmarks.quality.far_pairs --help`.

A text is random tokens. Here and there stands a key with its value, and once, later, the key alone: the value has to be
predicted there, and nothing else counts. The distance is even on a log scale, from 4 tokens to 3,000. Texts of 4,096
tokens are read in rows of 1,024 with the state carried over, gradients within a row, as in `nsm train --carry 1`.
RESULT.jsonl gets a line for each run, RESULT.md the table; a second call runs the missing ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.model.nsm import NsmModel
from nsm_core.model.router import Router
from nsm_lab.baselines.register import register_baselines
from nsm_lab.evaluation.markdown import table
from nsm_lab.evaluation.mqar.train import lr_factor
from nsm_lab.evaluation.runs_file import RunsFile
from nsm_lab.provenance import origin

KEYS, VALUES, OTHERS = 64, 32, 32  # tokens of each kind: values follow the keys, then those that mean nothing
ROW, TEXT = 1024, 4096  # tokens
DISTANCES = (4, 3000)  # tokens from a pair's key to the question
SHARE_ASKED = 0.08  # questions a token
EDGES = (4, 32, 96, 256, 512, 1024, 2048, 3000)  # of the classes of distance
NOT_ASKED = -1
WARMUP, CLIP, WEIGHT_DECAY = 0.05, 1.0, 0.01
TEST_TEXTS = 64

IntArray = npt.NDArray[np.int64]

BASE: dict[str, object] = {
    "vocab_size": KEYS + VALUES + OTHERS,
    "d_model": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 1,
    "router": "sigmoid",
    "window": 32,
    "gate_chunk": 64,
    "communication_interval": 64,
    "mlp_hidden": 256,
}


def _slots(pattern: str, count: int, mlp_hidden: int) -> dict[str, object]:
    return {"layer_pattern": pattern, "num_memory_slots": count, "write_top_k": count, "mlp_hidden": mlp_hidden}


# Feed-forward parts as wide as makes parameters equal within 0.2 %. States of 79 to 87 KiB; gated slots carry the 64
# tokens of a chunk as well, 210 KiB in all, so plain slots of as many bytes stand beside them.
ARMS: dict[str, dict[str, object]] = {
    "keyed slots": _slots("KKW", 64, 313),
    "slot memory": _slots("NNW", 32, 274),
    "communicates": _slots("CCW", 32, 259),
    "GRU gates": _slots("GGW", 32, 230),
    "slot memory, 96 slots": _slots("NNW", 96, 188),
    "RWKV-7": {**_slots("rrW", 32, 281), "num_heads": 2},
    "Gated DeltaNet": _slots("ggW", 64, 256),
    "Mamba-2": _slots("mmW", 32, 272),
    "windows": {**_slots("W", 32, 369), "window": 53, "num_kv_heads": 2},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FarRun:
    """One training."""

    arm: str
    seed: int
    steps: int
    rows: int
    lr: float


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """Tokens [B,T], the value that is due after a token or NOT_ASKED [B,T], and how far back its pair is [B,T]."""

    ids: IntArray
    targets: IntArray
    distances: IntArray


def make_texts(rng: np.random.Generator, count: int, length: int = TEXT) -> Texts:
    """Texts of `length` tokens. A key stands in no second pair before it was asked for."""
    ids = KEYS + VALUES + rng.integers(OTHERS, size=(count, length))
    texts = Texts(ids, np.full_like(ids, NOT_ASKED), np.zeros_like(ids))
    for row in range(count):
        _write_pairs(rng, texts, row)
    return texts


def _write_pairs(rng: np.random.Generator, texts: Texts, row: int) -> None:
    length = texts.ids.shape[1]
    is_free, open_until = np.ones(length, np.bool_), np.zeros(KEYS, np.int64)
    low, high = (math.log(bound) for bound in DISTANCES)
    for start in np.flatnonzero(rng.random(length - 2) < SHARE_ASKED).tolist():
        question = int(start + np.exp(rng.uniform(low, high)))
        keys = np.flatnonzero(open_until < start)
        if question >= length or not len(keys) or not (is_free[start : start + 2].all() and is_free[question]):
            continue
        key, value = rng.choice(keys), KEYS + rng.integers(VALUES)
        positions = np.array((start, start + 1, question))
        texts.ids[row, positions] = key, value, key
        texts.targets[row, question], texts.distances[row, question] = value, question - start
        is_free[positions] = False
        open_until[key] = question


def model_config(arm: str) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **ARMS[arm]})


class Training:
    """A model and its optimiser."""

    def __init__(self, run: FarRun) -> None:
        torch.manual_seed(run.seed)
        self.run, self.model = run, NsmModel(model_config(run.arm))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=run.lr, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
        )

    def losses(self) -> Iterator[float]:
        """A step a row; nats a question."""
        rng, state, ids, targets = np.random.default_rng((self.run.seed, 0)), {}, Tensor(), Tensor()
        rows_of_a_text = TEXT // ROW
        self.model.train()
        for step in range(self.run.steps):
            number = step % rows_of_a_text
            if number == 0:
                texts = make_texts(rng, self.run.rows)
                ids, targets = torch.from_numpy(texts.ids), torch.from_numpy(texts.targets)
                state = self.model.initial_state(self.run.rows)
            row = slice(number * ROW, (number + 1) * ROW)
            hidden, state = self.model.read(ids[:, row], state)
            state = {name: value.detach() for name, value in state.items()}
            yield self._step(hidden, targets[:, row], step)

    def _step(self, hidden: Tensor, targets: Tensor, step: int) -> float:
        is_asked = targets != NOT_ASKED
        loss = F.cross_entropy(self.model.logits(hidden[is_asked]), targets[is_asked])
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * lr_factor((step + 1) / self.run.steps, WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for module in self.model.modules():
            if isinstance(module, Router):
                module.rescue_dead_slots()
        return float(loss.detach())


@torch.no_grad()
def measure(model: NsmModel, texts: Texts) -> list[dict[str, float]]:
    """By distance: questions, nats below a guess among all values, and the share of right answers among all tokens."""
    model.eval()
    hidden, _ = model.forward(torch.from_numpy(texts.ids), model.initial_state(len(texts.ids)), piece_len=ROW)
    is_asked = texts.targets != NOT_ASKED
    logits, targets = model.logits(hidden[is_asked]), torch.from_numpy(texts.targets[is_asked])
    gains = (math.log(VALUES) - F.cross_entropy(logits, targets, reduction="none")).numpy()
    is_right, distances = (logits.argmax(dim=-1) == targets).numpy(), texts.distances[is_asked]
    cells = []
    for low, high in itertools.pairwise(EDGES):
        is_here = (distances >= low) & (distances < high)
        cells.append({
            "from": low, "to": high, "questions": int(is_here.sum()),
            "gain": float(gains[is_here].mean()), "right": float(is_right[is_here].mean()),
        })  # fmt: skip
    return cells


def train(run: FarRun) -> dict[str, Any]:
    """Trains and measures; CPU seconds count the training alone."""
    register_baselines()
    training, started = Training(run), time.process_time()
    losses = []
    for step, loss in enumerate(training.losses(), 1):
        losses.append(loss)
        if step % 100 == 0:
            print(
                f"  step {step}: {np.mean(losses[-100:]):.3f} nats, {time.process_time() - started:.0f} s", flush=True
            )
    train_s = time.process_time() - started
    return {
        "parameters": sum(value.numel() for value in training.model.parameters()),
        "state_bytes": training.model.state_spec.num_bytes,
        "train_s": train_s,
        "tokens_s": run.steps * run.rows * ROW / train_s,
        "loss": float(np.mean(losses[-100:])),
        "cells": measure(training.model, make_texts(np.random.default_rng(1_000_003), TEST_TEXTS)),
    }


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """A row a run: gains in nats a question and right answers, by distance."""
    heads = ["arm", "rate", "steps", "seed", "parameters", "state, KiB", "tokens/s", "loss"]
    heads += [f"{low:,}–{high:,}" for low, high in itertools.pairwise(EDGES)]
    return table(heads, [_row(result) for result in sorted(results, key=_order)])


def _order(result: Mapping[str, Any]) -> tuple[int, float, int, int]:
    run = result["run"]
    return run["steps"], run["lr"], list(ARMS).index(run["arm"]), run["seed"]


def _row(result: Mapping[str, Any]) -> list[str]:
    run = result["run"]
    size = [f"{result['parameters']:,}", f"{result['state_bytes'] / 1024:.0f}"]
    cells = [f"{cell['gain']:.2f} ({cell['right']:.0%})" for cell in result["cells"]]
    first = [run["arm"], f"{run['lr']:g}", str(run["steps"]), str(run["seed"]), *size]
    return [*first, f"{result['tokens_s']:,.0f}", f"{result['loss']:.2f}", *cells]


def write_report(output: Path, runs: RunsFile) -> None:
    """RESULT.md from the runs so far."""
    what = (
        f"Gain in nats a question over a guess among {VALUES} values and, in brackets, the share of right answers, by "
        "tokens from the pair to the question. Tokens a second of training, by CPU time of one thread."
    )
    lines = [f"- {name}: `{value}`" for name, value in origin().items()]
    output.with_suffix(".md").write_text(
        "\n".join(("# Pairs by distance", "", what, "", markdown(runs.results), "", *lines, "")), "utf-8"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.quality.far_pairs", description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--time-limit-s", type=float, default=math.inf, help="no run begins that would end later")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def main() -> None:
    options = build_parser().parse_args()
    torch.set_num_threads(1)
    runs, started, longest = RunsFile(options.output.with_suffix(".jsonl")), time.monotonic(), 0.0
    for seed in options.seeds:
        for arm in options.arms:
            run = FarRun(arm=arm, seed=seed, steps=options.steps, rows=options.rows, lr=options.lr)
            began = time.monotonic()
            if runs.find(dataclasses.asdict(run)) is not None or began - started + longest > options.time_limit_s:
                continue
            print(run, flush=True)
            runs.add(dataclasses.asdict(run), train(run))
            longest = max(longest, time.monotonic() - began)
            write_report(options.output, runs)
    write_report(options.output, runs)  # also where all runs were there


if __name__ == "__main__":
    main()
