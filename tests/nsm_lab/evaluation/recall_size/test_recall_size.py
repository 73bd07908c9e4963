from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsm_core.model.nsm import NsmModel
from nsm_lab.baselines.register import register_baselines
from nsm_lab.evaluation.mqar.recorded import RecordedRecall, Recorder
from nsm_lab.evaluation.mqar.report import count_state
from nsm_lab.evaluation.mqar.train import Recall
from nsm_lab.evaluation.recall_size import side_by_side
from nsm_lab.evaluation.recall_size.__main__ import main
from nsm_lab.evaluation.recall_size.grid import Plan, SizeRun, mqar_config, train
from nsm_lab.evaluation.recall_size.points import CURVES, SIZES, model_config
from nsm_lab.evaluation.recall_size.workers import run_all
from nsm_lab.evaluation.runs_file import RunsFile

PLAN = Plan(
    curves=("keyed", "window"), sizes=(8192, 16384), lrs=(0.1, 0.2), seeds=(0, 1), epochs=1, tuning_size=8192
)  # fmt: skip


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("size", SIZES)
def test_every_model_has_the_state_that_the_figure_says(curve: str, size: int) -> None:
    register_baselines()
    with torch.device("meta"):
        counts = count_state(NsmModel(model_config(curve, size)).state_spec)
    tokens_before = 2 * 2 * model_config(curve, size).d_model if curve == "rwkv7" else 0  # of the token shift
    assert abs(counts["memory_elements"] - size) <= tokens_before


def test_a_rate_is_chosen_by_training_loss_and_used_for_all_sizes_and_seeds(tmp_path: Path) -> None:
    runs = RunsFile(tmp_path / "runs.jsonl")
    assert len(PLAN.tuning()) == 4
    assert PLAN.points(runs) == []
    for run in PLAN.tuning():
        runs.add(dataclasses.asdict(run), {"train_loss": 1.0 + run.lr if run.curve == "keyed" else 1.0 - run.lr})
    assert PLAN.rates(runs) == {"keyed": 0.1, "window": 0.2}
    missing = PLAN.missing(PLAN.points(runs), runs)
    assert len(missing) == 6  # two sizes, two seeds and two layers, two of them done
    assert {(run.curve, run.lr) for run in missing} == {("keyed", 0.1), ("window", 0.2)}
    assert missing[0].seed == 0
    assert missing[-1].seed == 1


def test_zoology_s_examples_can_be_made_fewer() -> None:
    run = dataclasses.replace(PLAN.tuning()[0], share=0.001)
    config = mqar_config(run, "cpu")
    assert [task.num_examples for task in config.train_tasks] == [100, 20, 20, 20, 20]
    assert config.lr == 0.1


def train_some(run: SizeRun, device: str) -> dict[str, object]:
    """Of a process that ended nothing arrives; of a failed launch, what went wrong."""
    if run.curve == "keyed" and run.lr == 0.1:
        raise RuntimeError("unspecified launch failure")
    if run.curve == "keyed":
        os._exit(3)
    return {"lr": run.lr, "device": device}


def test_a_training_that_fails_twice_is_left_out_and_the_others_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    found: dict[SizeRun, dict[str, object]] = {}
    failing, other = (run for run in PLAN.tuning() if run.lr == 0.1)
    deadline = time.monotonic() + 600
    failed = run_all([failing, other], train_some, device="cpu", workers=1, deadline=deadline, done=found.__setitem__)
    assert failed == [failing]
    assert found == {other: {"lr": 0.1, "device": "cpu"}}
    assert capfd.readouterr().err.count("RuntimeError: unspecified launch failure") == 2


def test_a_process_that_ends_counts_as_a_failed_training(capfd: pytest.CaptureFixture[str]) -> None:
    found: dict[SizeRun, dict[str, object]] = {}
    ending = [run for run in PLAN.tuning() if (run.curve, run.lr) == ("keyed", 0.2)]
    deadline = time.monotonic() + 600
    assert run_all(ending, train_some, device="cpu", workers=1, deadline=deadline, done=found.__setitem__) == ending
    assert not found
    assert capfd.readouterr().err.count("the process ended with exit status 3") == 2


def test_nothing_is_begun_after_the_deadline() -> None:
    found: dict[SizeRun, dict[str, object]] = {}
    assert run_all(PLAN.tuning(), train_some, device="cpu", workers=1, deadline=0.0, done=found.__setitem__) == []
    assert not found


def test_results_of_another_length_are_not_of_this_figure() -> None:
    runs = [dataclasses.asdict(dataclasses.replace(PLAN.tuning()[0], epochs=epochs)) for epochs in (1, 4)]
    results = [{"run": run} for run in runs]
    assert PLAN.of_this(results) == results[:1]


def test_trainings_side_by_side_end_as_one_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def prepared(recall: Recall, recorder: Recorder) -> RecordedRecall:
        if recall.config.seed == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return RecordedRecall(recall, recorder)

    monkeypatch.setattr(side_by_side, "RecordedRecall", prepared)
    base = SizeRun(curve="window", size=8192, lr=1e-3, seed=0, epochs=1, batch=8, share=0.0001)
    runs = [dataclasses.replace(base, seed=seed) for seed in range(3)]
    found: dict[SizeRun, dict[str, Any]] = {}

    def run_until(deadline: float) -> list[SizeRun]:
        return side_by_side.run_side_by_side(runs, device="cpu", lanes=2, deadline=deadline, done=found.__setitem__)

    assert run_until(0.0) == []
    assert not found
    assert run_until(time.monotonic() + 600) == [runs[1]]
    assert "not permitted when stream is capturing" in capfd.readouterr().err
    assert set(found) == {runs[0], runs[2]}
    alone = train(runs[0], "cpu")
    assert found[runs[0]]["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-3)
    assert found[runs[0]]["num_parameters"] == alone["num_parameters"]


def test_with_too_little_memory_fewer_trainings_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(RecordedRecall):
        """Ends with its third turn, as on a device that works meanwhile."""

        turns = 0

        @property
        def is_done(self) -> bool:
            return self.turns >= 3 and super().is_done

        def advance(self) -> None:
            self.turns += 1
            super().advance()

    running, most = list[RecordedRecall](), 0

    def prepared(recall: Recall, recorder: Recorder) -> RecordedRecall:
        nonlocal most
        still = [training for training in running if not training.is_done]
        if len(still) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        running[:] = [*still, Slow(recall, recorder)]
        most = max(most, len(running))
        return running[-1]

    monkeypatch.setattr(side_by_side, "RecordedRecall", prepared)
    base = SizeRun(curve="window", size=8192, lr=1e-3, seed=0, epochs=1, batch=8, share=0.0001)
    runs = [dataclasses.replace(base, seed=seed) for seed in range(4)]
    found: dict[SizeRun, dict[str, Any]] = {}
    deadline = time.monotonic() + 600
    assert side_by_side.run_side_by_side(runs, device="cpu", lanes=4, deadline=deadline, done=found.__setitem__) == []
    assert set(found) == set(runs)
    assert most == 2


def test_the_command_draws_the_figure_and_goes_on_where_it_was(tmp_path: Path) -> None:
    output = tmp_path / "recall"
    flags = (
        "--curves window --sizes 8192 --tuning-size 8192 --lrs 1e-3 --epochs 1 --share 0.0001 --batch 8 --workers 1 "
        f"--device cpu --output {output}"
    ).split()
    assert main([*flags, "--seeds", "0"]) == 0
    assert main([*flags, "--seeds", "0", "1"]) == 0
    lines = [json.loads(line) for line in output.with_suffix(".jsonl").read_text("utf-8").splitlines()]
    assert [line["run"]["seed"] for line in lines] == [0, 1]
    assert "window attention | 8,192" in output.with_suffix(".md").read_text("utf-8")
    assert "<svg" in output.with_suffix(".svg").read_text("utf-8")
