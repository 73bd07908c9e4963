from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.library import variants
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.config import PARTS, EvalConfig
from nsm_lab.evaluation.run import run_evaluation
from tests.support.rwkv7 import save_rwkv7
from tests.support.samples import BOOKS_DIR


def test_a_checkpoint_is_evaluated_on_the_sample_books(checkpoint: Path, tmp_path: Path) -> None:
    config = EvalConfig(
        data=BOOKS_DIR,
        model=checkpoint,
        max_documents=2,
        max_tokens_per_document=600,
        device="cpu",
        prompts=("It was",),
        sample_tokens=5,
        output=tmp_path / "quality",
    )
    report = run_evaluation(config)
    assert report.losses.num_documents == 2
    assert [(b.start, b.num_tokens) for b in report.losses.buckets] == [(0, 256), (128, 256), (256, 512), (512, 176)]
    assert report.losses.total.bits_per_byte is not None
    assert report.losses.total.bits_per_byte > 1.0
    assert math.isfinite(report.losses.total.nats)
    assert report.slots is not None
    assert report.slots.num_tokens > 600  # on its own, longer stretch of text
    assert [sample.prompt for sample in report.samples] == ["It was", "It was"]
    assert report.provenance.model == "random-model"
    assert report.settings["precision"] == "fp32"
    stored = json.loads((tmp_path / "quality.json").read_text("utf-8"))
    assert stored["losses"]["total"]["bits_per_byte"] == report.losses.total.bits_per_byte
    assert (tmp_path / "quality.md").read_text("utf-8").startswith("# random-model on val\n")


def test_the_same_evaluation_gives_the_same_numbers(checkpoint: Path) -> None:
    config = EvalConfig(
        data=BOOKS_DIR,
        model=checkpoint,
        suite=("loss",),
        max_documents=1,
        max_tokens_per_document=200,
        device="cpu",
    )
    assert run_evaluation(config).losses == run_evaluation(config).losses


def test_every_part_of_the_suite_is_in_the_report(checkpoint: Path) -> None:
    config = EvalConfig(
        data=BOOKS_DIR,
        model=checkpoint,
        suite=PARTS,
        max_documents=2,
        max_tokens_per_document=50,
        device="cpu",
        prompts=("It was",),
        sample_tokens=2,
        passkey_lengths=(128,),
        passkey_depths=(0.0, 1.0),
        passkey_examples=1,
        stored_state_prefix=64,
        stored_state_count=1,
        split_tokens=20,
        history_starts=(64,),
        history_spans=(128,),
        history_repeats=(300,),
        history_passages=1,
        history_contexts=(256,),
        history_distances=(150,),
    )
    report = run_evaluation(config)
    fields = json.loads(report.to_json())
    for part in ("losses", "history", "passkey", "stored_states", "splits", "slots", "samples"):
        assert fields[part]
    assert report.to_markdown().count("\n## ") == 7  # the losses stand under the title
    assert fields["model"]["config"]["d_model"] == 32
    assert fields["settings"]["passkey_lengths"] == [128]


def test_only_what_is_asked_for_is_measured(checkpoint: Path) -> None:
    report = run_evaluation(
        EvalConfig(data=BOOKS_DIR, model=checkpoint, suite=("split",), max_documents=1, device="cpu", split_tokens=10)
    )
    assert report.splits is not None
    assert (report.losses, report.passkey, report.stored_states, report.slots, report.samples) == (
        None,
        None,
        None,
        None,
        (),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "dev"}, "split must be train, val or test, got 'dev'"),
        ({"max_documents": 0}, "max_documents must be at least 1, got 0"),
        ({"segment_len": -1}, "segment_len must be at least 1, got -1"),
        ({"precision": "fp8"}, "precision must be auto, bf16 or fp32, got 'fp8'"),
        ({"suite": ("loss", "speed")}, "suite must be one or more of loss, history, .*, got"),
        ({"suite": ()}, "suite must be one or more of"),
        ({"passkey_depths": (1.5,)}, r"passkey_depths must be in \[0, 1\], got"),
        ({"history_starts": (1, 5)}, r"history_starts must be numbers of at least 2 tokens, got \(1, 5\)"),
        ({"passkey_lengths": ()}, "passkey_lengths must be one or more numbers"),
    ],
    ids=["split", "documents", "segment", "precision", "part", "no-part", "depth", "history", "lengths"],
)
def test_bad_settings_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalConfig(data=Path("books"), **fields)  # type: ignore[arg-type]


def test_errors_name_the_file_the_line_or_the_device(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "x-val.jsonl").write_text('{"text": "fine"}\n{"txt": "misspelt"}\n', "utf-8")
    with pytest.raises(ConfigError, match=r"x-val\.jsonl, line 2: expected .* 'text'"):
        run_evaluation(EvalConfig(data=tmp_path, model=checkpoint, device="cpu"))
    with pytest.raises(ConfigError, match="no test files in"):
        run_evaluation(EvalConfig(data=tmp_path, model=checkpoint, split="test", device="cpu"))
    with pytest.raises(CheckpointError, match="nowhere"):
        run_evaluation(EvalConfig(data=tmp_path, model=tmp_path / "nowhere", device="cpu"))
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda"):
        run_evaluation(EvalConfig(data=tmp_path, model=checkpoint, device="gpu"))


@pytest.fixture
def rwkv7_directory(tmp_path: Path, tiny_tokenizer: Tokenizer) -> Path:
    return save_rwkv7(tmp_path / "rwkv7", tiny_tokenizer)


def test_another_architecture_is_measured_on_its_executors(rwkv7_directory: Path) -> None:
    """All parts; on kernels in fp32 the figures are those of the plain model, in int8 near them."""
    options = {
        "data": BOOKS_DIR,
        "model": rwkv7_directory,
        "suite": tuple(part for part in PARTS if part != "history"),
        "max_documents": 3,
        "batch_documents": 2,
        "max_tokens_per_document": 120,
        "device": "cpu",
        "prompts": ("It was",),
        "sample_tokens": 3,
        "passkey_lengths": (128,),
        "passkey_depths": (0.0,),
        "passkey_examples": 1,
        "stored_state_prefix": 64,
        "split_tokens": 40,
    }
    names: list[ExecutorName] = ["eager", "native-fp32", "native"] if variants() else ["eager"]
    reports = {name: run_evaluation(EvalConfig(executor=name, **options)) for name in names}  # type: ignore[arg-type]
    figures = {name: report.losses.total.bits_per_byte for name, report in reports.items() if report.losses is not None}
    for name, report in reports.items():
        assert figures[name] == pytest.approx(figures["eager"], rel=1e-5 if name == "native-fp32" else 0.02)
        assert report.slots is None
        assert report.settings["executor"] == name
        assert report.passkey is not None
        assert report.splits is not None
        assert report.to_markdown().startswith("# rwkv7 on val")
    assert len({report.provenance.numerics for report in reports.values()}) == len(names)


def test_a_model_of_the_own_family_is_measured_on_its_kernels(checkpoint: Path) -> None:
    config = EvalConfig(data=BOOKS_DIR, model=checkpoint, suite=("loss",), max_documents=1, max_tokens_per_document=100)
    eager = run_evaluation(dataclasses.replace(config, device="cpu")).losses
    if variants():
        native = run_evaluation(dataclasses.replace(config, device="cpu", executor="native")).losses
        assert native is not None
        assert eager is not None
        assert native.total.nats == pytest.approx(eager.total.nats, rel=0.02)


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ConfigError, match="executor must be one of auto, eager"):
        EvalConfig(data=BOOKS_DIR, executor="fast")  # type: ignore[arg-type]
