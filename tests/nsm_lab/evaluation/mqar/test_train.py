from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_lab.evaluation.mqar.__main__ import main, parse
from nsm_lab.evaluation.mqar.config import DEFAULT_MODEL, MqarConfig
from nsm_lab.evaluation.mqar.data import TEST_TASKS, TRAIN_TASKS, Task
from nsm_lab.evaluation.mqar.train import Batch, Recall, build_model, lr_factor, query_logits, recall_loss

TOY_MODEL = ModelConfig(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    num_memory_slots=8,
    write_top_k=2,
    mlp_hidden=1,
    window=8,
    max_context=32,
)
TOY = MqarConfig(
    model=TOY_MODEL, train_tasks=(Task(32, 2, 96),), test_tasks=(Task(32, 2, 8), Task(32, 4, 8)), batch=16, epochs=2,
    device="cpu",
)  # fmt: skip


def toy_batch(pattern: str = "N") -> tuple[Recall, Batch]:
    recall = Recall(dataclasses.replace(TOY, model=dataclasses.replace(TOY_MODEL, layer_pattern=pattern)))
    return recall, next(recall._batches(0))


@torch.no_grad()
@pytest.mark.parametrize("pattern", ["N", "W", "A"])
def test_only_queries_count(pattern: str) -> None:
    recall, batch = toy_batch(pattern)
    hidden, _ = recall.model(batch.ids, recall.model.initial_state(len(batch.ids)))
    targets = torch.full(batch.ids.shape, -100)
    targets.scatter_(1, batch.positions, batch.values)
    want = F.cross_entropy(recall.model.logits(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert float(recall_loss(recall.model, batch)) == pytest.approx(float(want), rel=1e-5)
    assert query_logits(recall.model, batch).shape == (16, 2, 64)


def test_a_few_steps_lower_the_loss_of_a_batch() -> None:
    recall, batch = toy_batch()
    first = float(recall.train_step(batch, 0.02))
    for _ in range(30):
        last = float(recall.train_step(batch, 0.02))
    assert last < 0.7 * first


def test_without_feed_forward_layers_they_stay_zero() -> None:
    recall, batch = toy_batch()
    recall.train_step(batch, 0.02)
    for name, value in recall.model.named_parameters():
        assert value.any() or ".mlp" in name or "out.weight" not in name
        if ".mlp" in name:
            assert not value.any()
    assert any(value.requires_grad for name, value in build_model(dataclasses.replace(TOY, mlp=True)).named_parameters()
               if ".mlp" in name)  # fmt: skip


def test_an_epoch_shows_every_sequence_once_in_batches_of_one_task() -> None:
    recall = Recall(dataclasses.replace(TOY, train_tasks=(Task(32, 2, 20), Task(16, 2, 10)), batch=8))
    batches = list(recall._batches(0))
    assert recall.steps_per_epoch == len(batches) == 5
    for length, count in ((32, 20), (16, 10)):
        rows = [row for batch in batches for row in batch.ids.tolist() if batch.ids.shape[1] == length]
        (number,) = (n for n, data in enumerate(recall.train_sets) if data.ids.shape[1] == length)
        assert len(rows) == count
        assert sorted(rows) == sorted(recall.train_sets[number].ids.tolist())


def test_the_report_holds_every_task_and_counts_the_state(tmp_path: Path) -> None:
    report = Recall(TOY).run()
    assert [(row.length, row.pairs, row.num_examples) for row in report.accuracies] == [(32, 2, 8), (32, 4, 8)]
    assert report.test_mean == pytest.approx(sum(row.accuracy for row in report.accuracies) / 2)
    assert report.memory_elements == 2 * 2 * 8 * 32
    assert report.state_elements == report.memory_elements + 2 * 9 * 32
    assert [epoch.number for epoch in report.history] == [1, 2]
    report.save(tmp_path / "runs" / "toy")
    assert json.loads((tmp_path / "runs" / "toy.json").read_text("utf-8"))["test_mean"] == report.test_mean
    text = (tmp_path / "runs" / "toy.md").read_text("utf-8")
    assert text.startswith("# Multi-query associative recall, layers N x 2\n\n1,024 numbers of memory (1,600 with")
    assert "no feed-forward layers." in text


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = (Recall(dataclasses.replace(TOY, epochs=1)).run() for _ in range(2))
    assert first.history[0].train_loss == again.history[0].train_loss
    assert first.accuracies == again.accuracies


def test_a_run_ends_at_its_target_or_when_its_time_is_over() -> None:
    assert len(Recall(dataclasses.replace(TOY, target=0.0)).run().history) == 1
    late = Recall(dataclasses.replace(TOY, epochs=50, time_limit_s=1e-6)).run()
    assert len(late.history) == 1
    assert late.history[0].train_loss == 0.0  # not a step was taken


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [lr_factor(progress, 0.1) for progress in (0.0, 0.05, 0.1, 0.55, 1.0, 1.5)]
    assert factors == pytest.approx([1e-3, 0.5, 1.0, 0.5, 0.0, 0.0])
    assert lr_factor(0.0, 0.0) == 1.0


def test_the_defaults_are_zoologys_tasks_and_66k_numbers_of_memory() -> None:
    config = parse([])
    assert config == MqarConfig()
    assert (config.train_tasks, config.test_tasks, config.batch) == (TRAIN_TASKS, TEST_TASKS, 256)
    spec = build_model(config).state_spec
    assert sum(tensor.num_bytes for tensor in spec.tensors if tensor.name.endswith("slots")) == 4 * 65_536


def test_every_option_can_be_set() -> None:
    argv = (
        "--model layer_pattern=WN --model d_model=64 --model taper=0.2 --mlp --train-task 64,8,10 --test-task 64,4,5 "
        "--batch 2 --epochs 3 --lr 0.01 --weight-decay 0 --warmup 0.5 --clip 2 --target 0.5 --time-limit-s 9 --seed 4 "
        "--device cpu --precision fp32 --compile --output out/mqar"
    )
    config, defaults = parse(argv.split()), MqarConfig()
    for field in dataclasses.fields(MqarConfig):
        assert getattr(config, field.name) != getattr(defaults, field.name)
    assert config.model == dataclasses.replace(DEFAULT_MODEL, layer_pattern="WN", d_model=64, taper=0.2)
    assert config.train_tasks == (Task(64, 8, 10),)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "0"], "lr must be above 0, got 0.0"),
        (["--model", "d_model"], "--model takes NAME=VALUE, got 'd_model'"),
        (["--model", "width=3"], "unknown model config field width"),
        (["--model", "d_model=wide"], "d_model must be a number, got 'wide'"),
        (["--device", "gpu"], "device must be auto, cpu, cuda, or a GPU by its number as cuda:1, got 'gpu'"),
    ],
    ids=["value", "form", "field", "number", "device"],
)
def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(options) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mqar: {message}")
    assert captured.err.count("\n") == 1


def test_a_bad_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch must be at least 1, got 0"):
        MqarConfig(batch=0)
