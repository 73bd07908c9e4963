"""The short trainings beside each other: what their commands are, and what is measured of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import controls, far_memory, strengths
from nsm_core.config import ModelConfig
from nsm_core.model.keyed import KeyedMixer
from nsm_core.model.nsm import NsmModel
from nsm_lab.training.keeping import keeping_numbers, make_keeping_heads

TINY = ModelConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=4, layer_pattern="K", num_memory_slots=8,
                   write_top_k=8, slot_width=8, mlp_hidden=32)  # fmt: skip
PASSAGES = far_memory.cut(
    torch.randint(64, (1, 1024), generator=torch.Generator().manual_seed(0)).tolist(), farthest=400
)


def options(tmp_path: Path) -> argparse.Namespace:
    paths = [
        "--data",
        "books",
        "--tokenizer",
        "tokenizer.json",
        "--out",
        str(tmp_path),
        "--output",
        str(tmp_path / "r"),
    ]
    return controls.build_parser().parse_args(paths)


@pytest.fixture
def model() -> NsmModel:
    torch.manual_seed(0)
    model = NsmModel(TINY)
    make_keeping_heads(model, (0.04, 0.01))
    return model.eval()


@pytest.mark.parametrize("arm", controls.ARMS)
def test_every_arm_is_a_training_that_can_begin(arm: str, tmp_path: Path) -> None:
    asked = options(tmp_path)
    config = controls.config_of(arm, asked)
    tokens = config.steps * config.rows * config.seq_len
    assert 0.95 * asked.tokens < tokens <= asked.tokens


def test_arms_have_directories_of_their_own(tmp_path: Path) -> None:
    outs = [controls.config_of(arm, options(tmp_path)).out for arm in controls.ARMS]
    assert len(set(outs)) == len(outs)


@torch.no_grad()
def test_slots_are_put_back_in_keeping_heads_alone(model: NsmModel) -> None:
    heads = far_memory.keeping_heads(model)
    assert [(head.layer, head.number) for head in heads] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    state = model.initial_state(1)
    other = far_memory.changed(state, heads, {head: torch.ones(8, 8) for head in heads})
    for layer in (0, 1):
        slots = other[f"layers.{layer}.slots"][0]
        assert slots[2:].eq(1.0).all()
        assert slots[:2].eq(0.0).all()
        assert state[f"layers.{layer}.slots"].eq(0.0).all()


@torch.no_grad()
def test_gains_are_told_for_every_change_and_distance(model: NsmModel) -> None:
    gains, left = far_memory.passage_gains(model, PASSAGES, [256, 400])
    assert {distance for _, distance in gains} == {256, 400}
    assert {name for name, _ in gains} == {
        "as read",
        "no later writes",
        *(f"{n} times as strong" for n in (2, 4, 8, 16)),
    }
    assert all(share == pytest.approx(1.0) for (_, distance), share in left.items() if distance == 256)
    assert gains["no later writes", 256].mean == pytest.approx(gains["as read", 256].mean, abs=1e-5)


@torch.no_grad()
def test_a_centred_strength_has_the_mean_of_its_bias(model: NsmModel) -> None:
    ids = PASSAGES.before
    for layer in model.layers:
        mixer = layer.mixer
        assert isinstance(mixer, KeyedMixer)
        mixer.rates.weight[:4] = torch.randn(4, 32)
    means = far_memory.mean_inputs(model, ids)
    far_memory.centre(model, means, strengths=0.5, keys=True)
    for head in far_memory.keeping_heads(model):
        mixer = model.layers[head.layer].mixer
        assert isinstance(mixer, KeyedMixer)
        assert float(mixer.rates.weight[head.number] @ means[head.layer]) == pytest.approx(0.0, abs=1e-4)
        routes = mixer.project.weight[head.number * 8 : (head.number + 1) * 8]
        torch.testing.assert_close(routes @ means[head.layer], torch.zeros(8), atol=1e-4, rtol=0.0)
    uses = far_memory.key_use(model, ids)
    assert all(1.0 <= use.dimensions <= 8.0 for use in uses)


def test_keeping_heads_write_what_is_wanted_on_average(model: NsmModel) -> None:
    texts = torch.randint(64, (2, 2048), generator=torch.Generator().manual_seed(1))
    strengths.set_strengths(model, texts, (0.02, 0.005), context=0.5)
    for layer, mean in zip(model.layers, strengths.judged(model, texts), strict=True):
        assert isinstance(layer.mixer, KeyedMixer)
        written = sorted(mean[keeping_numbers(layer.mixer)].tolist())
        assert written == pytest.approx([0.005, 0.02], rel=0.01)


@torch.no_grad()
def test_odds_of_keeping_heads_and_of_others_are_multiplied_apart(model: NsmModel) -> None:
    mixers = strengths.keyed_mixers(model)
    before = [mixer.rates.bias[:4].exp() for mixer in mixers]
    strengths.multiply_strengths(model, keeping=0.5, others=3.0)
    for mixer, was in zip(mixers, before, strict=True):
        factors = torch.full((4,), 3.0)
        factors[keeping_numbers(mixer)] = 0.5
        torch.testing.assert_close(mixer.rates.bias[:4].exp(), was * factors)


@torch.no_grad()
def test_passages_that_slots_hold_are_told_from_those_they_never_read(model: NsmModel) -> None:
    once = torch.randint(64, (1, 256), generator=torch.Generator().manual_seed(2))
    texts = once.repeat(1, 9)  # all passages are equal: a state that began after them has read the same
    gains = strengths.passage_gains(model, texts, 512)
    assert gains.shape == (1,)
    assert float(gains[0]) == pytest.approx(0.0, abs=0.05)


def test_samples_are_those_of_a_seed(model: NsmModel) -> None:
    prompts = torch.arange(10)[None].expand(2, -1)
    with torch.inference_mode():
        first, again = (controls._sample(model, prompts, 5) for _ in range(2))
    assert first.shape == (2, 5)
    assert torch.equal(first, again)


def test_seeds_have_directories_of_their_own(tmp_path: Path) -> None:
    asked = options(tmp_path)
    first = controls.config_of("RWKV-7, heads of 64", asked)
    asked.extra = "--seed 1"
    second = controls.config_of("RWKV-7, heads of 64", asked)
    assert (first.seed, second.seed) == (0, 1)
    assert first.out != second.out


def arm_result(arm: str, extra: str, contexts: tuple[int, ...]) -> dict[str, Any]:
    estimate = {"mean": 0.5, "low": 0.25, "high": 0.75, "per_document": [0.5]}
    shares = {"is_likeliest": estimate, "is_written": estimate}
    history = {
        "repeats": {"distances": [{"distance": 4096, "gain": estimate}]},
        "fresh_starts": None,
        "keys": {"cells": [{"context": context, "distance": 256, **shares} for context in contexts]},
    }
    return {"run": {"arm": arm, "extra": extra}, "tokens": 24e6, "val_loss": 3.5, "bits_per_byte": 1.2,
            "history": history, "repeated": 0.1, "loops": 0.0, "train_s": 40.0, "seconds": 60.0, "num_parameters": 7,
            "state_bytes": 2**20}  # fmt: skip


def test_an_arm_is_a_row_of_the_table_and_a_dash_stands_where_it_was_not_measured() -> None:
    rows = controls.markdown([arm_result("loops", "", (8192,)), arm_result("loops", "--seed 1", (8192, 32768))])
    common = "24.0M | 7 | 1.00 | 40 + 20 | 1.2000 | 3.500 | 10.0% | 0% | 0.500 ± 0.250 | 50% / 50%"
    assert f"| loops | {common} | – |" in rows
    assert f"| loops --seed 1 | {common} | 50% / 50% |" in rows


def test_the_last_line_of_a_log_has_the_validation_loss(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,val_loss\n1,4.5\n2,3.25\n", "utf-8")
    assert controls.last_validation(tmp_path) == 3.25
