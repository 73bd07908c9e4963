from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_lab.evaluation.runs_file import RunsFile
from nsm_lab.evaluation.tracking.__main__ import main
from nsm_lab.evaluation.tracking.grid import Grid, trained
from nsm_lab.evaluation.tracking.layers import LAYERS, model_config, register_layers
from nsm_lab.evaluation.tracking.report import chosen_rate, markdown
from nsm_lab.evaluation.tracking.tasks import ASK, MAX_DEPTH, MOVES, NOT_ASKED, TASKS
from nsm_lab.evaluation.tracking.train import MULTIPLES, TrackingRun, constant_accuracies, train

SHORT = TrackingRun(task="parity", layer="lstm", lr=1e-2, steps=3, rows=4)


def made(task: str, rows: int = 20, length: int = 40) -> tuple[list[list[int]], list[list[int]]]:
    tokens, targets = TASKS[task].make(np.random.default_rng(0), rows, length)
    return tokens.tolist(), targets.tolist()


@pytest.mark.parametrize(("task", "modulus"), [("parity", 2), ("sum", 5)])
def test_a_sum_is_asked_for_at_every_token(task: str, modulus: int) -> None:
    for digits, sums in zip(*made(task), strict=True):
        assert sums == [sum(digits[: at + 1]) % modulus for at in range(len(digits))]
        assert set(digits) <= set(range(modulus))


def test_the_ball_moves_with_its_cup() -> None:
    for moves, answers in zip(*made("s5"), strict=True):
        cups = [True, False, False, False, False]
        for move, answer in zip(moves, answers, strict=True):
            after = [False] * 5
            for cup, has_ball in enumerate(cups):
                after[MOVES[move][cup]] = has_ball
            cups = after
            assert cups.index(True) == answer


def test_the_moves_make_every_permutation_of_five_cups() -> None:
    reached = {tuple(range(5))}
    while True:
        further = reached | {tuple(int(move[cup]) for cup in order) for order in reached for move in MOVES}
        if further == reached:
            break
        reached = further
    assert len(reached) == 120


def test_brackets_close_what_is_open() -> None:
    for tokens, innermost in zip(*made("dyck", length=200), strict=True):
        stack: list[int] = []
        for token, answer in zip(tokens, innermost, strict=True):
            if token < 2:
                stack.append(token)
            else:
                assert stack.pop() == token - 2
            assert len(stack) <= MAX_DEPTH
            assert answer == (stack[-1] + 1 if stack else 0)


def test_a_copy_is_asked_for_after_the_symbols() -> None:
    for tokens, targets in zip(*made("copy", length=7), strict=True):
        assert tokens[7:] == [ASK] * 7
        assert targets == [NOT_ASKED] * 7 + tokens[:7]


@pytest.mark.parametrize("task", TASKS)
def test_tokens_and_answers_are_of_the_models_vocabulary(task: str) -> None:
    tokens, targets = (np.array(values) for values in made(task))
    assert tokens.max() < TASKS[task].num_tokens
    assert targets.max() < TASKS[task].num_tokens
    assert tokens.min() >= 0


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_reads_a_string(layer: str) -> None:
    register_layers()
    model = NsmModel(model_config(layer, num_tokens=5))
    hidden, _ = model.read(torch.zeros(2, 9, dtype=torch.int64), model.initial_state(2), is_fresh=True)
    assert model.logits(hidden).shape == (2, 9, 5)


def test_reflecting_slots_write_with_a_strength_of_up_to_two() -> None:
    register_layers()
    torch.manual_seed(0)
    usual, reflecting = (NsmModel(model_config(layer, 5)).layers[0].mixer for layer in ("keyed", "keyed-2"))
    assert isinstance(usual, KeyedMixer)
    assert isinstance(reflecting, KeyedMixer)
    reflecting.load_state_dict(usual.state_dict())
    x = torch.randn(1, 6, 64)
    half, whole = usual._rates(x, None), reflecting._rates(x, None)
    torch.testing.assert_close(whole["strength"], 2 * half["strength"])
    torch.testing.assert_close(whole["log_decay"], half["log_decay"])


def test_a_training_is_repeatable_and_tests_longer_strings() -> None:
    first, again = train(SHORT), train(SHORT)
    assert len(first.accuracies) == len(MULTIPLES)
    assert dataclasses.replace(again, cpu_s=first.cpu_s) == first
    assert first.steps_run == 3


def test_a_training_ends_early_once_every_length_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CHECK_EVERY", 2), ("LOW_LOSS", math.inf), ("SOLVED", 0.0)):
        monkeypatch.setattr(f"nsm_lab.evaluation.tracking.train.{name}", value)
    assert train(dataclasses.replace(SHORT, steps=5)).steps_run == 2
    monkeypatch.setattr("nsm_lab.evaluation.tracking.train.SOLVED", 1.1)
    assert train(dataclasses.replace(SHORT, steps=5)).steps_run == 5


def test_nothing_is_begun_after_the_deadline() -> None:
    assert trained(SHORT, deadline=0.0) == (SHORT, None)


def test_the_most_frequent_answer_says_what_chance_is() -> None:
    assert constant_accuracies(TASKS["parity"])[2] == pytest.approx(0.5, abs=0.05)
    assert constant_accuracies(TASKS["sum"])[2] == pytest.approx(0.2, abs=0.05)


def test_the_first_seed_tunes_the_rate_by_training_loss_alone(tmp_path: Path) -> None:
    grid = Grid(tasks=["parity"], layers=["lstm"], lrs=[0.1, 0.2], seeds=[0, 1], steps=3, rows=4, num_layers=1)
    runs = RunsFile(tmp_path / "runs.jsonl")
    tuning = grid.wanted(runs, 0)
    assert [run.lr for run in tuning] == [0.1, 0.2]
    for run, loss in zip(tuning, (0.5, 0.4), strict=True):
        assert grid.wanted(runs, 1) == []  # not all rates are tried
        outcome = {"accuracies": [1.0 - loss] * 3, "train_loss": loss, "steps_run": 3, "num_parameters": 7}
        runs.add(dataclasses.asdict(run), outcome)
    assert chosen_rate(runs.results, "parity", "lstm", 0) == 0.2
    assert [run.lr for run in grid.wanted(runs, 1)] == [0.2]
    assert "| LSTM | 60.0% | 60.0% | 60.0% | 0.2 | 1 | 3 | 7 |" in markdown(runs.results)


def test_the_command_writes_runs_and_table_and_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "tracking"
    flags = ["--tasks", "copy", "--layers", "lstm", "--lrs", "1e-2", "--steps", "2", "--rows", "2"]
    run = dataclasses.replace(SHORT, task="copy", steps=2, rows=2)
    outcome = {"accuracies": [0.5] * 3, "train_loss": 1.0, "steps_run": 2, "num_parameters": 7, "cpu_s": 0.1}
    RunsFile(output.with_suffix(".jsonl")).add(dataclasses.asdict(run), outcome)
    assert main([*flags, "--seeds", "0", "1", "--output", str(output)]) == 0
    lines = [json.loads(line) for line in output.with_suffix(".jsonl").read_text("utf-8").splitlines()]
    assert [line["run"]["seed"] for line in lines] == [0, 1]
    assert "| LSTM |" in output.with_suffix(".md").read_text("utf-8")
