from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nsm_core.evaluation import report as report_module
from nsm_core.evaluation.losses import BucketLoss, PositionLosses
from nsm_core.evaluation.report import Provenance, Report, command_line, source_commit
from nsm_core.evaluation.samples import Sample
from nsm_core.evaluation.slots import SlotUsage


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
        slots=SlotUsage(
            num_tokens=10, slots_per_head=8, dead_fraction=0.25, effective_slots=5.5, max_over_mean_load=2.0
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


@pytest.mark.parametrize(
    ("module", "program"), [(None, "nsm"), ("nsm_core.evaluation.__main__", "python -m nsm_core.evaluation")]
)
def test_the_command_is_shown_without_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, module: str | None, program: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/nsm", "eval", "--data", "my books"])
    spec = None if module is None else ModuleSpec(module, loader=None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert command_line() == f"{program} eval --data 'my books'"


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_checkout_that_tracks_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.py"
    file.write_text("one\n")
    monkeypatch.setattr(report_module, "__file__", str(file))
    assert source_commit() is None  # no checkout

    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    assert source_commit() is None  # a checkout of something else
    git("add", "report.py")
    git("commit", "-q", "-m", "two")
    head = git("rev-parse", "--short=12", "HEAD").strip()
    assert source_commit() == head
    file.write_text("two\n")
    assert source_commit() == f"{head}-dirty"
