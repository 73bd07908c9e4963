"""llama.cpp by itself: `llama-batched-bench` on one thread, timed by its own CPU seconds."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.peers.build_llama import LlamaBuild
from benchmarks.peers.figures import Figures
from nsm_core.errors import NsmError

RUN_S = 600.0


class Llama:
    """One of llama.cpp's models. `name`: of `benchmarks.peers.models.PEERS`."""

    def __init__(self, build: LlamaBuild, name: str) -> None:
        self._build = build
        self.name = name

    def decode_and_prefill(self, *, batches: Sequence[int], num_tokens: int, lengths: Sequence[int]) -> Figures:
        """Tokens per CPU second from an empty context (one token each), and of prompts. Raises NsmError."""
        figures = decode_figures(self._rows(prompts=[1], num_tokens=num_tokens, batches=batches))
        return figures | prefill_figures(self._rows(prompts=lengths, num_tokens=1, batches=[1]))

    def context(self, *, length: int, num_tokens: int) -> Figures:
        """Decoding after a text of `length` tokens, alone. Raises NsmError."""
        return context_figures(self._rows(prompts=[length], num_tokens=num_tokens, batches=[1]))

    def _rows(self, *, prompts: Sequence[int], num_tokens: int, batches: Sequence[int]) -> list[dict[str, Any]]:
        """In the order of prompts, then batches; one of them has a single number."""
        wanted = len(prompts) * len(batches)
        # Each sequence has an equal part of the context; the program skips what does not fit in all of it.
        tokens = max(batches) * (max(prompts) + num_tokens + 1)
        # It may end before its last lines are printed: one short row more, which nobody needs
        prompts, batches = (prompts, [*batches, 1]) if len(batches) > 1 else ([*prompts, 1], batches)
        command = [str(self._build.program("llama-batched-bench")), "-m", str(self._build.model(self.name))]
        command += ["-t", "1", "-tb", "1", "-c", str(tokens), "--output-format", "jsonl"]
        for option, numbers in (("-npp", prompts), ("-ntg", [num_tokens]), ("-npl", batches)):
            command += [option, ",".join(map(str, numbers))]
        environ = {**os.environ, "LD_PRELOAD": str(self._build.clock)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=RUN_S)
        rows = list(parse_rows(done.stdout.splitlines()))[:wanted]
        if done.returncode or len(rows) < wanted:
            raise NsmError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr[-2000:]}")
        return rows


def parse_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What `--output-format jsonl` prints among other lines."""
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)


def decode_figures(rows: Iterable[dict[str, Any]]) -> Figures:
    return {f"decode.{row['pl']}.tokens_per_cpu_s": row["speed_tg"] for row in rows}


def prefill_figures(rows: Iterable[dict[str, Any]]) -> Figures:
    return {f"prefill.{row['pp']}.tokens_per_cpu_s": row["speed_pp"] for row in rows}


def context_figures(rows: Iterable[dict[str, Any]]) -> Figures:
    return {f"context.{row['pp']}.tokens_per_cpu_s": row["speed_tg"] for row in rows}
