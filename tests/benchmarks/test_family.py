"""The comparison of the family: what it counts, fits and keeps. What it measures is measured by running it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.family.cells import LATE, Plan, cell_path, is_done, read_cells, run_cell
from benchmarks.family.counting import LiveBytes, count_model, counted
from benchmarks.family.fit import fit_exponent
from benchmarks.family.models import ENTRIES, SIZES, config_of, count_parameters
from benchmarks.family.page import put_on_page
from benchmarks.family.quality import TEXT, read_text, train_and_measure
from benchmarks.family.report import CHARTS, write_report
from nsm_core.config import GATES, PROJECTORS, ROUTERS
from nsm_core.model.registry import MIXERS
from nsm_lab.baselines.register import BASELINES

CPU = torch.device("cpu")


def make_plan(output: Path, **changes: object) -> Plan:
    plan = Plan(
        models=("linear-recurrence",), size="tiny", device="cpu", lengths=(64, 128), decode_rows=(1,), lrs=(1e-3,),
        steps=2, rows=2, held_out=2000, text=TEXT, output=output, repeat_s=0.0, limit_s=600.0, quality_limit_s=600.0,
        ends_at=time.time() + 600.0,
    )  # fmt: skip
    return dataclasses.replace(plan, **changes)


def test_every_layer_of_the_registry_has_its_model() -> None:
    assert {letter for entry in ENTRIES.values() for letter in entry.layer_pattern} >= {*MIXERS, *BASELINES}


@pytest.mark.parametrize("size", ["tiny", "medium"])
def test_models_have_nearly_equal_numbers_of_parameters(size: str) -> None:
    wanted = SIZES[size].num_parameters
    counts = {name: count_parameters(config_of(name, SIZES[size], 512)) for name in ENTRIES}
    assert {name: count for name, count in counts.items() if abs(count - wanted) > 0.03 * wanted} == {}


def test_every_way_to_read_and_to_keep_slots_has_its_row() -> None:
    configs = {name: config_of(name, SIZES["tiny"], 512) for name in ENTRIES}
    assert {config.projector for config in configs.values()} == set(PROJECTORS)
    assert {config.gate for config in configs.values() if "G" in config.layer_pattern} == set(GATES)
    assert {config.router for config in configs.values()} == set(ROUTERS)
    assert configs["two-level"].upper_slots == 4  # of 16
    assert configs["allocation"].allocation
    slots = {name: set(config.layer_pattern) <= {"N", "C"} for name, config in configs.items()}
    assert set(CHARTS["slots"]) <= {name for name, has_slots in slots.items() if has_slots}


def test_products_are_counted_from_their_shapes() -> None:
    layer, x = nn.Linear(8, 16, bias=False), torch.randn(4, 8)
    assert counted(lambda: torch.relu(layer(x))) == {"flops": 2 * 4 * 8 * 16, "other": 4 * 16}


def test_what_torchs_counter_cannot_see_is_added() -> None:
    """A triangular system of 32 unknowns with 5 columns, and an LSTM of width 4 over 7 tokens."""
    matrix, given = torch.eye(32).expand(3, 32, 32), torch.randn(3, 32, 5)
    solved = counted(lambda: torch.linalg.solve_triangular(matrix, given, upper=False))
    assert solved["flops"] == 3 * 32 * 32 * 5
    lstm, x = nn.LSTM(6, 4, batch_first=True), torch.randn(2, 7, 6)
    forward = 2 * 2 * 7 * (6 * 16 + 4 * 16)
    assert counted(lambda: lstm(x))["flops"] == forward
    assert counted(lambda: lstm(x)[0].sum().backward())["flops"] == 3 * forward


@pytest.mark.parametrize("name", ["rwkv7", "lstm", "simple"])
def test_backward_costs_about_twice_what_forward_does(name: str) -> None:
    row = count_model(name, SIZES["tiny"])
    assert 2.8 < row["training_flops"] / row["forward_flops"] < 3.1
    assert 0 < row["decode_flops"] < row["forward_flops"]


def test_memory_is_that_of_tensors_alive_at_once() -> None:
    with LiveBytes() as live:
        for _ in range(5):
            x = torch.ones(1000)
            y = x + 1.0
            y.add_(1.0)
            del x, y
    assert live.peak == 2 * 4000


def test_an_exponent_is_found_with_its_confidence() -> None:
    lengths = [512, 1024, 2048, 4096]
    exact = fit_exponent(lengths, [3e-4 * length**1.5 for length in lengths])
    noisy = fit_exponent(
        lengths, [length**1.5 * noise for length, noise in zip(lengths, (1.2, 0.8, 1.2, 0.8), strict=True)]
    )
    assert exact is not None
    assert noisy is not None
    assert abs(exact.value - 1.5) < 1e-9
    assert exact.half_width < 1e-6
    assert abs(noisy.value - 1.5) < noisy.half_width
    assert fit_exponent(lengths[:2], [1.0, 2.0]) is None


def test_tiny_shakespeare_is_whole_and_split_without_overlap() -> None:
    train, held_out = read_text(TEXT)
    assert len(train) + len(held_out) == 1_115_394
    assert bytes(train[:14].tolist()) == b"First Citizen:"


def test_training_lowers_the_bits_per_byte() -> None:
    rows = [
        train_and_measure(
            "linear-recurrence", SIZES["tiny"], lr=3e-3, steps=steps, rows=4, held_out=4000, text=TEXT, device=CPU,
            limit_s=600.0,
        )
        for steps in (1, 15)
    ]  # fmt: skip
    assert rows[1]["bits_per_byte"] < rows[0]["bits_per_byte"] - 0.5
    assert rows[1]["tokens"] == 15 * 4 * 64
    assert rows[1]["long_bits_per_byte"] < 8.0


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A cell there was no time for is measured by the next run; one that is measured is not again."""
    model, cell = "linear-recurrence", "prefill-64"
    assert run_cell(make_plan(tmp_path, ends_at=0.0), model, cell) == {"reason": LATE}
    assert not is_done(tmp_path, model, cell)
    cut_short = make_plan(tmp_path, ends_at=time.time() + 0.01, steps=21)
    assert run_cell(cut_short, model, "quality-0.001") == {"reason": LATE}
    assert run_cell(make_plan(tmp_path), model, cell)["tok_per_s"] > 0
    assert is_done(tmp_path, model, cell)


def test_what_fails_is_said_and_longer_texts_are_not_tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(tmp_path, limit_s=0.0)
    first = run_cell(plan, "linear-recurrence", "train-64")["reason"]
    assert first.startswith("one call takes")
    assert run_cell(plan, "linear-recurrence", "train-128")["reason"] == f"at 64 tokens: {first}"
    wrong = run_cell(make_plan(tmp_path, text=tmp_path / "none.txt"), "linear-recurrence", "quality-0.001")
    assert wrong["reason"].startswith("FileNotFoundError")
    assert "FileNotFoundError" in capfd.readouterr().err


def test_the_report_shows_what_is_there(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    for cell in ("size", "step", "decode-1", "prefill-64", "prefill-128", "train-64"):
        run_cell(plan, "linear-recurrence", cell)
    path = cell_path(tmp_path, "linear-recurrence", "train-128")
    path.write_text(json.dumps({"reason": "out of memory"}))
    head = dict.fromkeys(("device", "torch", "precision", "commit", "created", "note", "command"), "x")
    write_report(tmp_path, head, read_cells(tmp_path))
    text = (tmp_path / "table.md").read_text("utf-8")
    assert "| Linear recurrence (minGRU) | `L` |" in text
    assert "- Linear recurrence (minGRU), train-128: out of memory" in text
    assert (tmp_path / "prefill-recurrent.svg").read_text("utf-8").rstrip().endswith("</svg>")
    assert not (tmp_path / "prefill-ours.svg").exists()
    page = tmp_path / "page.md"
    page.write_text("A\n\n<!-- cpu -->\nold\n<!-- /cpu -->\n\nB\n")
    put_on_page(page, "cpu", tmp_path)
    shown = page.read_text("utf-8")
    assert shown.startswith("A\n\n<!-- cpu -->\n\nx, torch x")
    assert "#### Sizes and operations" in shown
    assert "[prefill-recurrent](./prefill-recurrent.svg)" in shown
    assert shown.endswith("<!-- /cpu -->\n\nB\n")
    assert "old" not in shown
    with pytest.raises(ValueError, match="has no place for cuda"):
        put_on_page(page, "cuda", tmp_path)
    assert json.loads((tmp_path / "table.json").read_text("utf-8"))["models"]["linear-recurrence"]["size"]["parameters"]
