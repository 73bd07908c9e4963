from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nsm_core.errors import CheckpointError, ConfigError, InvalidRequest, NsmError, NumericalError
from nsm_core.tokenizer import Tokenizer
from nsm_core.tuning.checkpoint import Checkpoint
from nsm_core.tuning.config import TuneConfig, split_examples
from nsm_core.tuning.loss import mean_loss, rows_of, split_by_tokens, summed_loss
from nsm_core.tuning.run import tune
from nsm_core.tuning.start import after_start_token, trained_names
from nsm_core.tuning.tuner import Report, Tuner
from tests.support.models import RandomModel
from tests.support.tuning import FAMILIES, examples_of, file_of, pairs, tunable

CONFIG = TuneConfig(num_epochs=2, batch_size=4, rate=0.1, eval_every=2)


@pytest.mark.parametrize(
    ("family", "step", "tolerance"), [("N", 1e-2, 5e-3), ("KW", 3e-5, 5e-3), ("rwkv7", 4e-3, 0.02)]
)
def test_gradient_agrees_with_finite_differences(
    family: str, step: float, tolerance: float, tiny_tokenizer: Tokenizer
) -> None:
    loaded = tunable(family, tiny_tokenizer)
    raw = file_of(
        {"prompt": "What is it that he said?", "completion": " Nothing at all."},
        {"prompt": "Yes", "completion": " no"},
    )
    rows = rows_of(examples_of(raw, tiny_tokenizer), loaded.device)
    Tuner(loaded, CONFIG, [], [])  # with the operators of training
    names, dtype = trained_names(loaded.model.state_spec), torch.float32
    if family == "KW" and isinstance(
        loaded.model, RandomModel
    ):  # an empty keyed slot is read through a norm: it bends within 1e-3
        loaded.model.double()
        loaded.model.head, dtype = loaded.model.head.double(), torch.float64
    start = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in after_start_token(loaded).items()
    }
    draw = torch.Generator().manual_seed(1)
    for name in names:
        value = start[name].detach().clone().requires_grad_()
        summed_loss(loaded.model, {**start, name: value}, rows).backward()  # type: ignore[no-untyped-call]
        direction = torch.randn(value.shape, generator=draw).to(dtype)
        direction /= direction.norm()
        losses = []
        for moved in (value + step * direction, value - step * direction):
            with torch.no_grad():
                losses.append(float(summed_loss(loaded.model, {**start, name: moved}, rows)))
        assert value.grad is not None
        slope = (losses[0] - losses[1]) / (2 * step)
        assert float((value.grad * direction).sum()) == pytest.approx(slope, rel=tolerance, abs=tolerance / 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_held_out_loss_and_leaves_weights_and_windows(
    family: str, tiny_tokenizer: Tokenizer
) -> None:
    loaded = tunable(family, tiny_tokenizer)
    train, held_out = split_examples(examples_of(pairs(12), tiny_tokenizer), seed=0)
    tuner = Tuner(loaded, CONFIG, train, held_out)
    start = after_start_token(loaded)
    reports = list(tuner.run())
    assert [report.step for report in reports] == [0, 2, 4, 6]
    assert reports[-1].best_loss < reports[0].held_out_loss == reports[-1].start_loss
    state = tuner.best_state()
    again = mean_loss(loaded.model, state, held_out, device=loaded.device, max_tokens=64)
    assert again == pytest.approx(reports[-1].best_loss, rel=1e-5)
    for name in set(state) - set(trained_names(loaded.model.state_spec)):
        assert torch.equal(state[name], start[name])


def test_loss_does_not_depend_on_how_examples_are_grouped(tiny_tokenizer: Tokenizer) -> None:
    loaded = tunable("KW", tiny_tokenizer)
    examples = examples_of(
        file_of(*({"prompt": "a" * n, "completion": "b" * (9 - n)} for n in range(1, 9))), tiny_tokenizer
    )
    start = after_start_token(loaded)
    losses = [mean_loss(loaded.model, start, examples, device=loaded.device, max_tokens=n) for n in (1, 25, 1000)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) == pytest.approx(losses[2], rel=1e-5)
    groups = list(split_by_tokens(examples, 25))
    assert sorted(one.line for group in groups for one in group) == list(range(1, 9))
    assert all(len(group) * max(len(one.ids) for one in group) <= 25 for group in groups)


def test_run_stops_when_the_held_out_loss_gets_no_better(tiny_tokenizer: Tokenizer) -> None:
    loaded = tunable("N", tiny_tokenizer)
    train = examples_of(pairs(8), tiny_tokenizer)
    other = examples_of(file_of({"prompt": "Number 3:", "completion": " no"}), tiny_tokenizer)
    tuner = Tuner(loaded, TuneConfig(num_epochs=50, rate=0.5, patience=3, eval_every=1), train, other)
    reports = list(tuner.run())
    assert reports[-1].step < reports[-1].num_steps
    assert reports[-1].is_last
    losses = [report.held_out_loss for report in reports]
    assert min(losses) == reports[-1].best_loss
    assert len(losses) - 1 - losses.index(min(losses)) == 3
    assert reports[-1].best_step == losses.index(min(losses))


@pytest.mark.parametrize("family", FAMILIES)
def test_run_that_goes_on_from_a_checkpoint_ends_as_an_unbroken_one(
    family: str, tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    train, held_out = split_examples(examples_of(pairs(12), tiny_tokenizer), seed=0)
    file = tmp_path / "run.safetensors"

    def tuner() -> Tuner:
        return Tuner(tunable(family, tiny_tokenizer), CONFIG, train, held_out)

    whole = tuner()
    reports = list(whole.run())
    broken = tuner()
    for report in broken.run(lambda made: made.save(file, run_id="a")):
        if report.step == 4:
            break
    assert Checkpoint.load(file, run_id="b") is None
    found = Checkpoint.load(file, run_id="a")
    assert found is not None
    assert found.step == 4
    rest = tuner()
    rest.restore(found)
    assert list(rest.run()) == reports[3:]
    state, expected = rest.best_state(), whole.best_state()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_damaged_checkpoint_is_an_error_and_a_run_begins_again(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = tunable("N", tiny_tokenizer)
    train, held_out = split_examples(examples_of(pairs(12), tiny_tokenizer), seed=0)
    file = tmp_path / "run.safetensors"
    file.write_bytes(b"none")
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        Checkpoint.load(file, run_id="a")
    seen: list[Report] = []
    made = tune(loaded, CONFIG, train, held_out, on_report=seen.append, checkpoint=file, run_id="a")
    assert [report.step for report in seen] == [0, 2, 4, 6]
    assert made.report == seen[-1]
    assert len(made.state) == loaded.model.state_spec.num_bytes


def test_no_state_where_training_makes_it_worse(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((1.5, 2.0, 1.6, 1.5))
    monkeypatch.setattr("nsm_core.tuning.tuner.mean_loss", lambda *given, **options: next(losses))
    train, held_out = split_examples(examples_of(pairs(12), tiny_tokenizer), seed=0)
    with pytest.raises(NsmError, match=r"training made the held-out loss no better than 1\.5000"):
        tune(tunable("N", tiny_tokenizer), CONFIG, train, held_out)


def test_rate_that_is_far_too_high_ends_the_run(tiny_tokenizer: Tokenizer) -> None:
    loaded = tunable("rwkv7", tiny_tokenizer)
    train, held_out = split_examples(examples_of(pairs(12), tiny_tokenizer), seed=0)
    with pytest.raises(NumericalError, match="a lower rate may help"):
        tune(loaded, dataclasses.replace(CONFIG, rate=1e8), train, held_out)


@pytest.mark.parametrize(
    "wrong",
    [{"num_epochs": 0}, {"batch_size": 0}, {"patience": 0}, {"rate": 0.0}, {"rate": float("nan")}, {"eval_every": 0}],
)
def test_impossible_config_names_the_field(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        dataclasses.replace(CONFIG, **wrong)  # type: ignore[arg-type]


def test_one_example_cannot_be_split(tiny_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="at least 2 examples"):
        split_examples(examples_of(pairs(1), tiny_tokenizer), seed=0)


def test_each_epoch_has_every_example_once(tiny_tokenizer: Tokenizer) -> None:
    examples = examples_of(pairs(10), tiny_tokenizer)
    config = TuneConfig(batch_size=4, num_epochs=2)
    steps = [[one.line for one in config.batch(examples, step)] for step in range(config.num_steps(10))]
    first, second = ([line for step in some for line in step] for some in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == list(range(1, 11))
    assert first != second
