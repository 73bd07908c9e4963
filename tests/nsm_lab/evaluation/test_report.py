from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nsm_lab.evaluation.losses import BucketLoss, PositionLosses
from nsm_lab.evaluation.model_facts import ModelFacts
from nsm_lab.evaluation.passkey import PasskeyCell, PasskeyResult
from nsm_lab.evaluation.report import Report
from nsm_lab.evaluation.samples import Sample
from nsm_lab.evaluation.slots import LayerSlots, SlotUsage
from nsm_lab.evaluation.splits import SplitDifference, SplitResult
from nsm_lab.evaluation.stored_state_quality import StoredFormat, StoredStateBucket, StoredStateResult
from nsm_lab.provenance import Provenance


def passkey_cell(length: int, depth: float, num_chosen: int) -> PasskeyCell:
    return PasskeyCell(
        length=length,
        depth=depth,
        num_examples=4,
        num_written=1,
        num_chosen=num_chosen,
        mean_rank=2.0,
        mean_log_prob=-9.0,
        mean_margin=-0.5,
    )


def stored_bucket(start: int, stop: int, change: float) -> StoredStateBucket:
    return StoredStateBucket(
        start=start, stop=stop, num_tokens=64, nats=2.0, exact_nats=2.0, change=change, low=0.0, high=2 * change
    )


def layer_slots(layer: int, half_life_p90: float | None) -> LayerSlots:
    return LayerSlots(
        layer=layer,
        dead_fraction=0.25,
        effective_slots=5.5,
        effective_by_weight=3.5,
        max_over_mean_load=2.0,
        written_per_token=0.125,
        half_life_p10=40.0,
        half_life_median=2e6,
        half_life_p90=half_life_p90,
    )


@pytest.fixture
def report() -> Report:
    buckets = (
        BucketLoss(start=0, stop=128, num_tokens=128, num_bytes=500, num_words=90, nats=384.0),
        BucketLoss(start=128, stop=1024, num_tokens=1, num_bytes=0, num_words=0, nats=2.5),
    )
    return Report(
        provenance=Provenance(
            model="tiny-model",
            fingerprint="f" * 64,
            num_parameters=1_234_567,
            weight_format="int8",
            numerics="cpu/fp32",
            device="cpu",
            command="nsm eval --data books",
            commit=None,
            versions={"python": "3.11.2", "torch": "2.13"},
            created="2026-01-02T03:04:05+00:00",
        ),
        settings={"split": "val", "precision": "fp32"},
        losses=PositionLosses(num_documents=1, buckets=buckets),
        model=ModelFacts(config={"d_model": 8}, state_bytes=((1024, 1_000_000), (8192, 2_100_000))),
        passkey=PasskeyResult(
            num_choices=10, cells=(passkey_cell(256, 0.0, 1), passkey_cell(256, 1.0, 4), passkey_cell(2048, 0.0, 0))
        ),
        stored_states=StoredStateResult(
            num_documents=3,
            num_saves=2,
            prefix_len=1024,
            formats=(
                StoredFormat(
                    format="int8",
                    state_bytes=1234,
                    buckets=(stored_bucket(0, 16, 0.002), stored_bucket(0, 1024, 0.0001)),
                ),
            ),
        ),
        splits=SplitResult(
            num_tokens=100,
            continuation_len=8,
            max_logit=20.5,
            max_state=4.0,
            splits=(
                SplitDifference(split="random 1", num_pieces=3, logits=2e-5, state=1e-6, is_same_continuation=True),
                SplitDifference(
                    split="token by token", num_pieces=100, logits=0.5, state=1.0, is_same_continuation=False
                ),
            ),
        ),
        slots=SlotUsage(
            num_tokens=10,
            slots_per_head=8,
            dead_fraction=0.25,
            effective_slots=5.5,
            effective_by_weight=3.5,
            max_over_mean_load=2.0,
            layers=(layer_slots(0, 4000.0), layer_slots(2, None)),
        ),
        samples=(Sample(prompt="The sea", text=" was\n\ncalm", temperature=0.0, seed=0),),
    )


def test_json_holds_sums_and_rates(report: Report) -> None:
    fields = json.loads(report.to_json())
    assert fields["losses"]["num_documents"] == 1
    assert fields["losses"]["total"]["num_tokens"] == 129
    first, last = fields["losses"]["buckets"]
    assert first["nats_per_token"] == 3.0
    assert last["bits_per_byte"] is None
    assert fields["provenance"]["fingerprint"] == "f" * 64
    assert fields["slots"]["effective_slots"] == 5.5
    assert fields["samples"][0]["text"] == " was\n\ncalm"
    assert fields["settings"]["split"] == "val"
    assert fields["model"]["state_bytes"] == [[1024, 1_000_000], [8192, 2_100_000]]
    assert fields["stored_states"]["formats"][0]["buckets"][0]["change"] == 0.002
    assert fields["passkey"]["cells"][1]["num_chosen"] == 4
    assert fields["splits"]["splits"][1]["is_same_continuation"] is False
    assert fields["slots"]["layers"][1]["half_life_p90"] is None


def test_markdown_shows_every_part(report: Report) -> None:
    lines = report.to_markdown().split("\n")
    assert "a state of 1 MB after 1,024, 2.1 MB after 8,192 tokens" in lines[2]
    assert "| length (tokens) | depth 0% | depth 100% |" in lines
    assert "| 256 | 25% (25%) | 100% (25%) |" in lines
    assert "| 2K | 0% (25%) | – |" in lines
    assert "| int8 | 1,234 | +0.2000% (+0.0000% … +0.4000%) | +0.0100% (+0.0000% … +0.0200%) |" in lines
    assert "| random 1 | 3 | 2.00e-05 | 1.00e-06 | equal |" in lines
    assert "| token by token | 100 | 5.00e-01 | 1.00e+00 | **different** |" in lines
    assert "| 0 | 25.00% | 5.5 | 3.5 | 2.0 | 0.125 | 40 | over 1M | 4,000 |" in lines
    assert "| 2 | 25.00% | 5.5 | 3.5 | 2.0 | 0.125 | 40 | over 1M | never written |" in lines


def test_positions_in_short_are_shown_where_there_are_several(report: Report) -> None:
    assert "In short" not in report.to_markdown()
    far = BucketLoss(start=4096, stop=8192, num_tokens=4, num_bytes=10, num_words=2, nats=12.0)
    losses = dataclasses.replace(report.losses, buckets=(*report.losses.buckets, far))  # type: ignore[type-var, union-attr]
    lines = dataclasses.replace(report, losses=losses).to_markdown().split("\n")
    assert "| 0–1K | 129 | 500 | 90 | 2.9961 | 1.1152 | 73.3 |" in lines
    assert lines.count("| 4K–8K | 4 | 10 | 2 | 3.0000 | 1.7312 | 403.4 |") == 2


def test_markdown_shows_the_table_and_how_to_repeat_it(report: Report) -> None:
    lines = report.to_markdown().split("\n")
    assert lines[0] == "# tiny-model on val"
    assert "| 0–128 | 128 | 500 | 90 | 3.0000 | 1.1080 | 71.3 |" in lines
    assert "| 128–1K | 1 | 0 | 0 | 2.5000 | – | – |" in lines
    assert "| **all** | 129 | 500 | 90 | 2.9961 | 1.1152 | 73.3 |" in lines
    assert "- command: `nsm eval --data books`" in lines
    assert "- commit: `unknown`" in lines
    assert "- versions: `python 3.11.2, torch 2.13`" in lines
    at = lines.index("> **The sea** was")
    assert lines[at : at + 3] == ["> **The sea** was", ">", "> calm"]


def test_save_writes_both_files(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "quality" / "tiny-1.5")
    assert (tmp_path / "quality" / "tiny-1.5.json").read_text("utf-8") == report.to_json()
    assert (tmp_path / "quality" / "tiny-1.5.md").read_text("utf-8") == report.to_markdown()
