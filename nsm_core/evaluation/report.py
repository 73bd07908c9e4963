"""An evaluation's result with everything needed to repeat it, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from nsm_core.evaluation.losses import BucketLoss, PositionLosses
from nsm_core.evaluation.samples import Sample
from nsm_core.evaluation.slots import SlotUsage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the numbers come from."""

    model: str
    fingerprint: str
    num_parameters: int
    weight_format: str
    numerics: str
    device: str
    command: str
    commit: str | None  # None: not run from a checkout
    versions: Mapping[str, str]
    created: str  # UTC


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of `nsm eval`."""

    provenance: Provenance
    settings: Mapping[str, Any]
    losses: PositionLosses
    slots: SlotUsage | None = None
    samples: tuple[Sample, ...] = ()

    def to_json(self) -> str:
        losses = {
            "num_documents": self.losses.num_documents,
            "total": _with_rates(self.losses.total),
            "buckets": [_with_rates(bucket) for bucket in self.losses.buckets],
        }
        return json.dumps({**dataclasses.asdict(self), "losses": losses}, indent=2, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        sections = [self._heading(), _loss_table(self.losses)]
        if self.slots is not None:
            sections.append(_slot_lines(self.slots))
        if self.samples:
            sections.append("## Samples\n\n" + "\n\n".join(_sample_lines(sample) for sample in self.samples))
        return "\n\n".join([*sections, self._facts()]) + "\n"

    def save(self, stem: Path) -> None:
        """Writes `<stem>.json` and `<stem>.md`."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.json").write_text(self.to_json(), "utf-8")
        Path(f"{stem}.md").write_text(self.to_markdown(), "utf-8")

    def _heading(self) -> str:
        split, count = self.settings.get("split", "text"), self.losses.num_documents
        return (
            f"# {self.provenance.model} on {split}\n\n"
            f"{self.provenance.num_parameters:,} parameters ({self.provenance.weight_format}), "
            f"{count} document{'' if count == 1 else 's'}, each read from its start with the state carried on."
        )

    def _facts(self) -> str:
        facts: dict[str, object] = dataclasses.asdict(self.provenance)
        del facts["model"], facts["num_parameters"], facts["weight_format"]
        facts["commit"] = facts["commit"] or "unknown"
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in self.provenance.versions.items())
        facts["settings"] = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return "## How it was measured\n\n" + "\n".join(f"- {name}: `{value}`" for name, value in facts.items())


def _with_rates(bucket: BucketLoss) -> dict[str, Any]:
    rates = ("nats_per_token", "bits_per_byte", "word_perplexity")
    return {**dataclasses.asdict(bucket), **{name: getattr(bucket, name) for name in rates}}


def _loss_table(losses: PositionLosses) -> str:
    rows = [
        "| position (tokens) | tokens | bytes | words | nats/token | bits/byte | word perplexity |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(_loss_row(_range(bucket), bucket) for bucket in losses.buckets),
        _loss_row("**all**", losses.total),
    ]
    return "\n".join(rows)


def _loss_row(label: str, bucket: BucketLoss) -> str:
    counts = (f"{value:,}" for value in (bucket.num_tokens, bucket.num_bytes, bucket.num_words))
    rates = (_rate(bucket.nats_per_token, 4), _rate(bucket.bits_per_byte, 4), _rate(bucket.word_perplexity, 1))
    return f"| {' | '.join((label, *counts, *rates))} |"


def _rate(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _range(bucket: BucketLoss) -> str:
    return f"{_short(bucket.start)}–{'' if bucket.stop is None else _short(bucket.stop)}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens and tokens % 1024 == 0 else str(tokens)


def _slot_lines(slots: SlotUsage) -> str:
    return (
        f"## Memory slots\n\nOn {slots.num_tokens:,} tokens, means over layers and heads: "
        f"{slots.dead_fraction:.2%} of the slots are dead (written to by less than a hundredth of their fair share "
        f"of tokens), {slots.effective_slots:.1f} of {slots.slots_per_head} are effective (exp of the entropy of the "
        f"load), the busiest has {slots.max_over_mean_load:.1f} times the mean load."
    )


def _sample_lines(sample: Sample) -> str:
    how = "greedy" if sample.temperature == 0 else f"temperature {sample.temperature:g}, seed {sample.seed}"
    quoted = "\n".join(f"> {line}".rstrip() for line in f"**{sample.prompt}**{sample.text}".split("\n"))
    return f"{how[0].upper()}{how[1:]}:\n\n{quoted}"


def command_line() -> str:
    """How this process was started, without the place it is installed at."""
    spec = sys.modules["__main__"].__spec__  # set when started by `python -m`
    program = [Path(sys.argv[0]).name] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def source_commit() -> str | None:
    """Short commit of the checkout this module lies in, with `-dirty` when files differ from it; None outside one."""
    try:
        # An installed copy may lie inside a checkout of something else, which does not track it.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    directory = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=True, text=True, timeout=10)
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
    }


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
