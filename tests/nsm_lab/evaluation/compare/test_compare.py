from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from nsm_lab.evaluation.compare.__main__ import main
from nsm_lab.evaluation.compare.tables import load, to_markdown, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def bucket(start: int, stop: int | None, bits_per_byte: float | None) -> dict[str, Any]:
    return {
        "start": start, "stop": stop, "num_bytes": 100, "bits_per_byte": bits_per_byte, "nats_per_token": 3.0,
        "word_perplexity": 90.0,
    }  # fmt: skip


def report(shift: float = 0.0, **changes: Any) -> dict[str, Any]:
    buckets = [bucket(0, 512, 1.5 + shift), bucket(512, 1024, 1.25 + shift), bucket(1024, None, 1.0 + shift)]
    return {
        "provenance": {"num_parameters": 34_000_000},
        "model": {
            "config": {"layer_pattern": "NW", "num_layers": 8},
            "state_bytes": [[1024, 2_000_000], [32768, 2_500_000]],
        },
        "settings": {"split": "test", "max_tokens_per_document": None},
        "losses": {
            "num_documents": 20,
            "total": bucket(0, None, 1.125 + shift),
            "buckets": buckets,
            "summary": [bucket(0, 1024, 1.375 + shift), buckets[2]],
        },
        **changes,
    }


def write(path: Path, fields: dict[str, Any]) -> Path:
    path.write_text(json.dumps(fields), "utf-8")
    return path


def test_models_stand_side_by_side(tmp_path: Path) -> None:
    entries = [
        load(write(tmp_path / "pulse.json", report())),
        load(write(tmp_path / "other.json", report(0.1)), "Transformer"),
    ]
    lines = to_markdown(entries).split("\n")
    assert lines[0] == "| model | layers | parameters | state at 1K | state at 32K |"
    assert lines[2] == "| pulse | NW x 8 | 34,000,000 | 2 MB | 2.5 MB |"
    assert "| bits/byte | 0–1K | 1K– | all |" in lines
    assert "| pulse | 1.3750 | 1.0000 | 1.1250 |" in lines
    assert "| Transformer | 1.4750 | 1.1000 | 1.2250 |" in lines
    assert "| nats/token | 0–1K | 1K– | all |" in to_markdown(entries, "nats_per_token")


def test_without_a_summary_every_bucket_is_shown_and_a_missing_one_is_a_dash(tmp_path: Path) -> None:
    short = report()
    short["losses"]["summary"], short["losses"]["buckets"] = [], short["losses"]["buckets"][:1]
    entries = [load(write(tmp_path / name, fields)) for name, fields in (("a.json", report()), ("b.json", short))]
    lines = to_markdown(entries).split("\n")
    assert "| bits/byte | 0–512 | 512–1K | 1K– | all |" in lines
    assert "| b | 1.5000 | – | – | 1.1250 |" in lines


def test_evaluations_of_different_texts_are_called_so(tmp_path: Path) -> None:
    first = load(write(tmp_path / "a.json", report()))
    other_split = load(write(tmp_path / "b.json", report(settings={"split": "val"})))
    other_cut = load(write(tmp_path / "c.json", report(settings={"split": "test", "max_tokens_per_document": 100})))
    assert "Not comparable" not in to_markdown([first, first])
    assert to_markdown([first, other_split]).startswith("**Not comparable**: the evaluations read different documents.")
    assert to_markdown([first, other_cut]).startswith("**Not comparable**: the evaluations read different lengths.")


def test_the_plot_has_a_curve_and_a_name_for_each_model(tmp_path: Path) -> None:
    entries = [load(write(tmp_path / "a.json", report()), "a <b>"), load(write(tmp_path / "b.json", report(0.1)))]
    root = ET.fromstring(to_svg(entries))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a <b>", "b", "bits/byte", "512", "1K", "2K"} <= set(texts)


def test_the_command_prints_the_tables_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write(tmp_path / name, report())) for name in ("a.json", "b.json")]
    assert main([*files, "--labels", "first", "second", "--output", str(tmp_path / "out" / "both")]) == 0
    printed = capsys.readouterr().out
    assert "| second | NW x 8 |" in printed
    assert (tmp_path / "out" / "both.md").read_text("utf-8") == printed
    assert (tmp_path / "out" / "both.svg").read_text("utf-8").rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("no json", [], "cannot read "),
        ('{"losses": null}', [], "is not the report of an evaluation with losses"),
        (None, ["--labels", "a", "b"], "--labels needs one name for each of 1 reports, got 2"),
    ],
    ids=["json", "losses", "labels"],
)
def test_an_error_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, options: list[str], message: str
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(report()) if content is None else content, "utf-8")
    assert main([str(file), *options]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("compare: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
