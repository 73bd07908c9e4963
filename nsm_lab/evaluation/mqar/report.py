"""A recall run's result, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from nsm_core.state.spec import StateSpec
from nsm_lab.evaluation.markdown import table


class StateCounts(TypedDict):
    """Numbers that a state holds."""

    memory_elements: int
    state_elements: int


def count_state(spec: StateSpec) -> StateCounts:
    """`memory_elements`: slots and key-value caches, as figures of recall against state size count them;
    `state_elements`: the convolutions' last tokens as well.
    """
    counts = {tensor.name: math.prod(tensor.shape) for tensor in spec.tensors if tensor.dtype.is_floating_point}
    memory = sum(count for name, count in counts.items() if not name.endswith("conv_tail"))
    return StateCounts(memory_elements=memory, state_elements=sum(counts.values()))


@dataclasses.dataclass(frozen=True, slots=True)
class Accuracy:
    """Share of the queries of one test task that were answered right."""

    length: int
    pairs: int
    num_examples: int
    accuracy: float


@dataclasses.dataclass(frozen=True, slots=True)
class Epoch:
    """After one pass over the training set."""

    number: int
    train_loss: float  # nats a query
    test_mean: float
    elapsed_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MqarReport:
    """Result of `python -m nsm_lab.evaluation.mqar`."""

    model: Mapping[str, Any]
    has_mlp: bool
    num_parameters: int  # trained
    memory_elements: int
    state_elements: int
    settings: Mapping[str, Any]
    accuracies: tuple[Accuracy, ...]
    test_mean: float
    history: tuple[Epoch, ...]
    device: str
    command: str
    commit: str | None
    versions: Mapping[str, str]
    created: str  # UTC

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        rows = [[f"{row.length:,}", str(row.pairs), f"{row.accuracy:.2%}"] for row in self.accuracies]
        accuracies = table(("length", "pairs", "accuracy"), [*rows, ["**mean**", "", f"{self.test_mean:.2%}"]])
        epochs = [
            [str(epoch.number), f"{epoch.train_loss:.4f}", f"{epoch.test_mean:.2%}", f"{epoch.elapsed_s:.0f}"]
            for epoch in self.history
        ]
        history = table(("epoch", "training loss (nats)", "test mean", "seconds"), epochs)
        return "\n\n".join((self._heading(), accuracies, history, self._facts())) + "\n"

    def save(self, stem: Path) -> None:
        """Writes `<stem>.json` and `<stem>.md`."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.json").write_text(self.to_json(), "utf-8")
        Path(f"{stem}.md").write_text(self.to_markdown(), "utf-8")

    def _heading(self) -> str:
        model = self.model
        return (
            f"# Multi-query associative recall, layers {model['layer_pattern']} x {model['num_layers']}\n\n"
            f"{self.memory_elements:,} numbers of memory ({self.state_elements:,} with the convolutions' last tokens), "
            f"width {model['d_model']}, {self.num_parameters:,} parameters, "
            f"{'with' if self.has_mlp else 'no'} feed-forward layers."
        )

    def _facts(self) -> str:
        facts = {
            "model": ", ".join(f"{name}={value}" for name, value in self.model.items()),
            "settings": ", ".join(f"{name}={value}" for name, value in self.settings.items()),
            "device": self.device,
            "command": self.command,
            "commit": self.commit or "unknown",
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "created": self.created,
        }
        return "## How it was measured\n\n" + "\n".join(f"- {name}: `{value}`" for name, value in facts.items())
