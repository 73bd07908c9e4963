"""A run learns, resumes as if it had never stopped, and leaves files that load."""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.model.storage import read_model
from nsm_core.tokenizer import BpeTokenizer, Tokenizer
from nsm_lab.training.__main__ import main, parse
from nsm_lab.training.average import WeightAverage
from nsm_lab.training.config import TrainConfig
from nsm_lab.training.distributed import World
from nsm_lab.training.loop import LEFT_SHARE, LossModule, Trainer, carries_state, loop_penalties, train
from nsm_lab.training.optim import lr_factor
from tests.support.counts import scaled
from tests.support.samples import BOOKS_DIR

MODEL = ModelConfig(
    vocab_size=512, d_model=32, num_layers=2, num_heads=2, num_memory_slots=8, write_top_k=2, mlp_hidden=64
)


@pytest.fixture
def config(tiny_tokenizer: Tokenizer, tmp_path: Path) -> TrainConfig:
    tiny_tokenizer.save(tmp_path / "given.json")
    return TrainConfig(
        data=BOOKS_DIR, out=tmp_path / "run", model=MODEL, tokenizer=tmp_path / "given.json", device="cpu",
        steps=scaled(12, 60), rows=4, seq_len=128, eval_every=4, eval_batches=2, save_every=6, weight_format="fp32",
    )  # fmt: skip


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(read_model(directory)[0].state_dict())


def test_a_run_learns_and_leaves_a_model_that_loads(config: TrainConfig) -> None:
    out = train(config)
    model, tokenizer, _ = read_model(out)
    assert model.config == MODEL
    assert tokenizer.vocab_size == 512
    rows = list(csv.DictReader((out / "log.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(4, config.steps + 1, 4))
    losses = [float(row["val_loss"]) for row in rows]
    assert losses[-1] < losses[0]
    assert all(float(row["grad_norm"]) > 0 for row in rows)


def test_penalties_on_routing_are_logged_beside_the_loss(config: TrainConfig) -> None:
    config = dataclasses.replace(config, steps=8, balance_loss=0.01, z_loss=0.001, checkpoint_blocks=True)
    rows = list(csv.DictReader((train(config) / "log.csv").read_text().splitlines()))
    for row in rows:
        assert float(row["routing_loss"]) > 2 * 0.01  # two layers, each at least 1 before its weight
        assert 0 < float(row["effective_slots"]) <= 8
        assert float(row["max_load"]) >= 1
        assert 0 <= float(row["dead_slots"]) < 1
        assert float(row["slots_written"]) > 0
        assert float(row["half_life"]) > 0


def test_a_log_of_an_earlier_release_keeps_its_columns(config: TrainConfig) -> None:
    out = train(dataclasses.replace(config, steps=4))
    old = "step,train_loss\r\n2,5.0\r\n"
    (out / "log.csv").write_text(old, newline="")
    train(dataclasses.replace(config, steps=8, resume=True))
    rows = list(csv.DictReader((out / "log.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["2", "8"]
    assert all(set(row) == {"step", "train_loss"} for row in rows)


def test_a_stopped_run_resumes_bit_for_bit(config: TrainConfig) -> None:
    config = dataclasses.replace(config, carry=0.0, ema=0.5)
    whole = weights(train(dataclasses.replace(config, out=config.out.with_name("whole"))))
    # A run that was stopped after its save at step 6: the same schedule, cut short.
    stopped = config
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsm_lab.training.loop.Trainer._save", _save_then_stop)
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    resumed = weights(train(dataclasses.replace(stopped, resume=True)))
    assert whole.keys() == resumed.keys()
    for name, want in whole.items():
        assert torch.equal(resumed[name], want), name


def _save_then_stop(trainer, step: int) -> None:  # type: ignore[no-untyped-def]
    from nsm_lab.training import checkpointing

    checkpointing.save(trainer.config.out, step, trainer.model, trainer.optimizers, trainer.average)
    raise KeyboardInterrupt


def test_accumulated_parts_equal_one_large_batch(config: TrainConfig) -> None:
    one = weights(train(dataclasses.replace(config, steps=2, out=config.out.with_name("one"))))
    two = weights(train(dataclasses.replace(config, steps=2, out=config.out.with_name("two"), accumulate=2)))
    for name, want in one.items():
        torch.testing.assert_close(two[name], want, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("pattern", ["A", "W", "NWA"])
def test_every_kind_of_layer_trains_and_loads(config: TrainConfig, pattern: str) -> None:
    model = dataclasses.replace(MODEL, layer_pattern=pattern, num_layers=3, num_kv_heads=1, window=64, max_context=128)
    out = train(dataclasses.replace(config, model=model, steps=8))
    losses = [float(row["val_loss"]) for row in csv.DictReader((out / "log.csv").read_text().splitlines())]
    assert losses[-1] < losses[0]
    assert read_model(out)[0].config == model


@pytest.mark.parametrize("pattern", ["A", "NA"])
def test_the_loss_does_not_depend_on_how_a_fresh_batch_is_read(config: TrainConfig, pattern: str) -> None:
    """Full attention skips its empty cache, and its mask where no document starts inside a row."""
    config = dataclasses.replace(config, seq_len=64)
    model = dataclasses.replace(MODEL, layer_pattern=pattern, num_kv_heads=2, max_context=64)
    trainer = Trainer(dataclasses.replace(config, model=model), World(0, 1, torch.device("cpu")))
    for parameter in trainer.model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batches = [trainer.train_batches.batch(step) for step in range(trainer.train_batches.steps_per_epoch)]
    assert {batch.has_inner_starts for batch in batches} == {False}  # rows of one chunk
    batch = batches[0]
    batch.reset[:, 0] = True
    state = trainer.model.state_spec.zeros(len(batch.ids))
    plain, cached = (LossModule(trainer.model)(batch, state, is_fresh)[0] for is_fresh in (True, False))
    torch.testing.assert_close(plain, cached)


def test_the_average_follows_the_weights_and_is_what_is_saved(config: TrainConfig) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    average = WeightAverage(model, decay=0.9)
    for _ in range(400):
        torch.nn.init.ones_(model.weight)
        average.update()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), torch.ones(1, 2), rtol=1e-4, atol=1e-4)
        average.load_tensors({**average.tensors(), "weight": torch.full((1, 2), 5.0)})
    assert (model.weight == 5.0).all()  # what was the shadow inside is the model again
    plain = weights(train(dataclasses.replace(config, out=config.out.with_name("plain"), ema=0.0)))
    averaged = weights(train(dataclasses.replace(config, ema=0.9)))
    assert any(not torch.equal(averaged[name], want) for name, want in plain.items())


def test_recomputed_blocks_give_the_same_weights(config: TrainConfig) -> None:
    plain = weights(train(dataclasses.replace(config, steps=2, out=config.out.with_name("plain"))))
    again = weights(
        train(dataclasses.replace(config, steps=2, out=config.out.with_name("again"), checkpoint_blocks=True))
    )
    for name, want in plain.items():
        torch.testing.assert_close(again[name], want, rtol=1e-5, atol=1e-6, msg=name)


def test_without_a_tokenizer_one_is_learned_and_kept(config: TrainConfig) -> None:
    out = train(dataclasses.replace(config, tokenizer=None, steps=1))
    learned = BpeTokenizer.load(out)
    assert learned.vocab_size == 512
    assert learned.decode(learned.encode("It was a dark night…")) == "It was a dark night…"


def test_two_processes_train_one_model(config: TrainConfig, tmp_path: Path) -> None:
    """Under torchrun each process reads other rows; the averaged gradients are those of all rows together."""
    flags = [
        "--data", str(BOOKS_DIR), "--out", str(tmp_path / "pair"), "--tokenizer", str(config.tokenizer),
        "--device", "cpu", "--vocab-size", "512", "--d-model", "32", "--num-layers", "2", "--num-heads", "2",
        "--num-memory-slots", "8", "--router", "softmax", "--write-top-k", "2", "--timescale-groups", "1",
        "--mlp-hidden", "64",
        "--steps", "2", "--rows", "2", "--seq-len", "128", "--carry", "0", "--eval-batches", "2",
        "--weight-format", "fp32",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "nsm_lab.training", *flags], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone = weights(train(dataclasses.replace(config, steps=2, carry=0.0)))
    for name, got in weights(tmp_path / "pair").items():
        torch.testing.assert_close(got, alone[name], rtol=1e-2, atol=1e-3, msg=name)


def test_carrying_is_a_pure_function_of_seed_and_step(config: TrainConfig) -> None:
    steps = [carries_state(step, config, 50) for step in range(200)]
    assert steps == [carries_state(step, config, 50) for step in range(200)]
    assert not any(steps[::50])  # an epoch lays the documents out anew
    assert 60 < sum(steps) < 140


def test_full_attention_trains_on_whole_rows_without_a_mask(config: TrainConfig) -> None:
    model = dataclasses.replace(MODEL, layer_pattern="A", num_kv_heads=2, max_context=128)
    trainer = Trainer(
        dataclasses.replace(config, model=model, carry=0.0, whole_rows=True, steps=2), World(0, 1, torch.device("cpu"))
    )
    batch = trainer.train_batches.batch(0)
    assert not batch.has_inner_starts
    losses, _ = trainer._forward_backward(batch, trainer._zero_states(4), 0)
    first = batch.ids[:1, : int(batch.valid[0].sum())]
    alone, _ = trainer.model.forward(first, trainer.model.initial_state(1))
    within, _ = trainer.model.read(batch.ids, trainer.model.initial_state(4), valid=batch.valid, is_fresh=True)
    torch.testing.assert_close(within[:1, : first.shape[1]], alone, atol=1e-4, rtol=1e-4)
    assert math.isfinite(float(losses[0]))


def test_whole_rows_are_for_layers_that_carry_nothing(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="whole_rows"):
        dataclasses.replace(config, whole_rows=True, carry=0.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_rise_hold_and_end_at_zero(config: TrainConfig, schedule: str) -> None:
    config = dataclasses.replace(config, steps=100, schedule=schedule, warmup=0.1)
    factors = [lr_factor(step, config) for step in range(100)]
    assert factors[0] < factors[5] < max(factors) <= 1.0
    assert factors[-1] == pytest.approx(0.0, abs=1e-9)
    assert factors[70:] == sorted(factors[70:], reverse=True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--dropout", "1.5"], "dropout must be in [0, 1], got 1.5"),
        (["--rows", "3", "--accumulate", "2"], "rows must be a multiple of accumulate (2), got 3"),
        (["--schedule", "steps"], "schedule must be linear or cosine"),
        (["--seq-len", "100"], "seq_len (100) a multiple of chunk_len (64)"),
        (["--d-model", "33"], "d_model (33) must be a multiple of num_heads"),
        (["--ema", "1"], "ema must be in [0, 1), got 1.0"),
        (["--balance-loss", "-1"], "balance_loss must be a number of at least 0, got -1.0"),
        (["--layer-pattern", "NX"], "layer_pattern must be made of the letters N, C, G, K, L, W, A, M, of which two"),
        (["--layer-pattern", "W"], "num_heads (4) must be a multiple of num_kv_heads (8)"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_bad_options_are_one_clear_line(
    flags: list[str], words: str, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [
        "--data",
        str(BOOKS_DIR),
        "--out",
        str(config.out),
        "--preset",
        "tiny",
        "--tokenizer",
        str(config.tokenizer),
    ]
    assert main([*base, "--device", "cpu", *flags]) == 1
    message = capsys.readouterr().err
    reported = [line for line in message.splitlines() if not line.startswith("token ids of the ")]  # what it had begun
    assert words in message
    assert [line.startswith("nsm train: ") for line in reported] == [True]


def test_a_missing_corpus_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--preset", "tiny"]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_resuming_with_another_model_is_refused(config: TrainConfig) -> None:
    train(dataclasses.replace(config, steps=1))
    other = dataclasses.replace(config, resume=True, model=dataclasses.replace(MODEL, mlp_hidden=128))
    with pytest.raises(CheckpointError, match="another model configuration"):
        train(other)


def test_an_earlier_run_is_not_written_over(config: TrainConfig) -> None:
    out = train(dataclasses.replace(config, steps=1))
    original = (out / "weights.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="holds an earlier run"):
        train(dataclasses.replace(config, steps=2))
    assert (out / "weights.safetensors").read_bytes() == original


def test_a_tokenizer_larger_than_the_model_is_refused(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="512 tokens, the model only 256"):
        train(dataclasses.replace(config, model=dataclasses.replace(MODEL, vocab_size=256)))


def test_every_option_reaches_the_config() -> None:
    config = parse(["--data", "d", "--out", "o", "--muon-lr", "0.5", "--no-compile", "--num-layers", "3"])
    assert (config.data, config.out, config.muon_lr, config.compile) == (Path("d"), Path("o"), 0.5, False)
    assert config.model.num_layers == 3


def test_a_sigmoid_router_writes_to_all_slots_however_many_there_are() -> None:
    config = parse(["--data", "d", "--out", "o", "--preset", "base", "--num-memory-slots", "32"])
    assert (config.model.router, config.model.write_top_k) == ("sigmoid", 32)
    with pytest.raises(ConfigError, match="write_top_k must be num_memory_slots"):
        parse(["--data", "d", "--out", "o", "--preset", "base", "--write-top-k", "8"])


def test_a_run_starts_with_the_weights_of_another_model(config: TrainConfig, tmp_path: Path) -> None:
    first = train(dataclasses.replace(config, steps=2))
    second = train(
        dataclasses.replace(config, start=first, out=tmp_path / "second", steps=1, muon_lr=1e-9, adam_lr=1e-9)
    )
    started, before = weights(second), weights(first)
    assert all(torch.allclose(value, before[name], atol=1e-5) for name, value in started.items())


def test_a_start_of_other_sizes_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    first = train(dataclasses.replace(config, steps=1))
    other = dataclasses.replace(
        config, start=first, out=tmp_path / "second", model=dataclasses.replace(MODEL, mlp_hidden=32)
    )
    with pytest.raises(ConfigError, match="other sizes"):
        train(other)


def test_keeping_heads_are_those_of_the_start_in_a_resumed_run(config: TrainConfig) -> None:
    keyed = dataclasses.replace(
        MODEL, layer_pattern="K", num_memory_slots=16, write_top_k=16, slot_width=16, num_heads=4
    )
    config = dataclasses.replace(config, model=keyed, keep_strengths=(0.01,), steps=4, save_every=2)
    train(dataclasses.replace(config, steps=2))
    resumed = weights(train(dataclasses.replace(config, resume=True)))
    decays = [value[4:] for name, value in resumed.items() if name.endswith("rates.weight")]
    assert [(rows == 0).all(dim=1).tolist() for rows in decays] == [[False, False, False, True]] * 2


def test_routes_that_resemble_each_other_are_pushed_apart(config: TrainConfig) -> None:
    keyed = dataclasses.replace(MODEL, layer_pattern="K", num_memory_slots=16, write_top_k=16, slot_width=16)
    config = dataclasses.replace(config, model=keyed, steps=3, eval_every=3, key_spread=0.5)
    out = train(config)
    with (out / "log.csv").open(encoding="utf-8") as file:
        row = list(csv.DictReader(file))[-1]
    assert 0 < float(row["routing_loss"]) < 0.5 * keyed.num_layers * math.log(16)


def test_keeping_heads_need_keyed_layers(config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match="keep_strengths must be at most 0 numbers"):
        dataclasses.replace(config, keep_strengths=(0.01,))


def test_a_loop_is_punished_for_what_its_first_turn_did_not_have() -> None:
    said = torch.tensor([[0.5, 0.2, 0.3, 0.9, 0.9]], dtype=torch.float64, requires_grad=True)
    turns = torch.tensor([[0, 0, 2, 2, 5]])  # the third token again, the fourth too; the last one's first turn is gone
    penalties = loop_penalties(-said.log(), turns)
    assert penalties[0].tolist() == pytest.approx([0.0, 0.0, 0.0, -math.log(1.0 - (0.9 - LEFT_SHARE * 0.2)), 0.0])
    penalties.sum().backward()
    assert said.grad is not None
    assert (said.grad[0] != 0).tolist() == [False, False, False, True, False]
