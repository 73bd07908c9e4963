"""An evaluation's result with everything needed to repeat it, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsm_lab.evaluation import sections
from nsm_lab.evaluation.history.curves import history_curves
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.history.section import history_lines
from nsm_lab.evaluation.losses import SUMMARY_EDGES, BucketLoss, PositionLosses
from nsm_lab.evaluation.model_facts import ModelFacts
from nsm_lab.evaluation.passkey import PasskeyResult
from nsm_lab.evaluation.samples import Sample
from nsm_lab.evaluation.slots import SlotUsage
from nsm_lab.evaluation.splits import SplitResult
from nsm_lab.evaluation.stored_state_quality import StoredStateResult
from nsm_lab.provenance import Provenance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of `nsm eval`; a part outside of the suite is None or empty."""

    provenance: Provenance
    settings: Mapping[str, Any]
    model: ModelFacts
    losses: PositionLosses | None = None
    history: HistoryResult | None = None
    passkey: PasskeyResult | None = None
    stored_states: StoredStateResult | None = None
    splits: SplitResult | None = None
    slots: SlotUsage | None = None
    samples: tuple[Sample, ...] = ()

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        if self.losses is not None:
            fields["losses"] = {
                "num_documents": self.losses.num_documents,
                "total": _with_rates(self.losses.total),
                "buckets": [_with_rates(bucket) for bucket in self.losses.buckets],
                "summary": [_with_rates(bucket) for bucket in self.losses.by(SUMMARY_EDGES)],
            }
        return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        parts = [
            self._heading(),
            sections.loss_tables(self.losses) if self.losses else "",
            history_lines(self.history) if self.history else "",
            sections.passkey_lines(self.passkey) if self.passkey else "",
            sections.stored_state_lines(self.stored_states) if self.stored_states else "",
            sections.split_lines(self.splits) if self.splits else "",
            sections.slot_lines(self.slots) if self.slots else "",
            sections.sample_lines(self.samples) if self.samples else "",
            self._facts(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def save(self, stem: Path) -> None:
        """Writes `<stem>.json`, `<stem>.md` and, of history, the curves `<stem>.svg`."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{stem}.json").write_text(self.to_json(), "utf-8")
        Path(f"{stem}.md").write_text(self.to_markdown(), "utf-8")
        if self.history is not None:
            Path(f"{stem}.svg").write_text(history_curves({self.provenance.model: self.history}), "utf-8")

    def _heading(self) -> str:
        split = self.settings.get("split", "text")
        documents = "." if self.losses is None else sections.documents_read(self.losses.num_documents)
        return (
            f"# {self.provenance.model} on {split}\n\n"
            f"{self.provenance.num_parameters:,} parameters ({self.provenance.weight_format}), "
            f"{self.model.state_summary()}{documents}"
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
