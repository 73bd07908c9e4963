"""The model over packed weights: the same numbers, and no fp32 matrix that stays."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from nsm_core.execution.choose import choose_executor
from nsm_core.execution.native.library import Part, variants
from nsm_core.execution.native.unpacked import unpacked_model
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import quantize_rows
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.execution.small_models import CONFIGS, NATIVE, model_of, weights_of
from tests.support.models import as_loaded, random_model, small_config

pytestmark = pytest.mark.skipif(not variants(), reason="there is no C++ compiler")


def rounded(model: NsmModel, name: str) -> torch.Tensor:
    quantized, scale = quantize_rows(model.get_parameter(name))
    return quantized.float() * scale[:, None]


@pytest.mark.parametrize("variant", NATIVE)
def test_rows_are_those_that_were_packed(variant: str) -> None:
    model, weights = model_of("window"), weights_of("window", variant)
    copy = unpacked_model(model, weights)
    for name in ("embedding", "blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.1.mixer.project", "blocks.0.mixer.out"):
        torch.testing.assert_close(copy.get_submodule(name).weight, rounded(model, f"{name}.weight"), rtol=0, atol=0)
    with pytest.raises(IndexError, match="EMBEDDING 0 has no such rows"):
        weights.rows(0, Part.EMBEDDING, torch.tensor([model.config.vocab_size]), model.config.d_model)
    with pytest.raises(IndexError, match="ROUTER 0"):
        weights.rows(0, Part.ROUTER, torch.tensor([0]), model.config.d_model)


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_unpacked_model_equals_the_rounded_model(name: str) -> None:
    model = model_of(name)
    copy = unpacked_model(model, weights_of(name, NATIVE[0]))
    assert not {id(parameter) for parameter in copy.parameters()} - {id(parameter) for parameter in model.parameters()}
    assert {key for key, _ in copy.named_parameters()}.isdisjoint({"embedding.weight", "blocks.0.mlp.up.weight"})
    assert not [key for key, _ in copy.named_parameters() if key.endswith(("router.logits.weight", "rates.weight"))]
    reference = random_model(CONFIGS[name])
    reference.load_state_dict(model.state_dict())
    for key, parameter in reference.named_parameters():
        if key == "embedding.weight" or key.endswith(("up.weight", "down.weight", "project.weight", "out.weight")):
            parameter.copy_(rounded(model, key))
        elif key.endswith(("router.logits.weight", "rates.weight")):
            parameter.copy_(parameter.half())
    ids = torch.arange(14).view(2, 7)
    hidden, state = copy.forward(ids, copy.initial_state(2))
    want, want_state = reference.forward(ids, reference.initial_state(2))
    torch.testing.assert_close((hidden, state), (want, want_state), rtol=1e-4, atol=1e-5)
    stepped, want_stepped = copy.step(ids[:, 0], state), reference.step(ids[:, 0], want_state)
    torch.testing.assert_close(stepped, want_stepped, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(copy.logits(hidden), reference.logits(want), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_routers_give_the_bits_of_the_file(tiny_tokenizer: Tokenizer) -> None:
    model = random_model(small_config(tiny_tokenizer.vocab_size))
    router = model.get_submodule("blocks.0.mixer.router")
    router.get_parameter("logits.weight").copy_(
        router.get_parameter("logits.weight").half()
    )  # as files of int8 hold it
    copy = unpacked_model(model, NativeWeights(model)).get_submodule("blocks.0.mixer.router")
    x = torch.randn(3, model.config.d_model, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(copy(x), router(x), rtol=0, atol=0)


def test_the_native_executor_outlives_the_loaded_model(tiny_tokenizer: Tokenizer) -> None:
    loaded = as_loaded(random_model(small_config(tiny_tokenizer.vocab_size)), tiny_tokenizer)
    chosen = choose_executor(dataclasses.replace(loaded, weight_format="int8"))
    weight = weakref.ref(loaded.model.embedding.weight)
    router = weakref.ref(loaded.model.get_parameter("blocks.0.mixer.router.logits.weight"))
    del loaded
    assert weight() is None
    assert router() is None
    executor = chosen.factory(chosen.model, num_rows=2, poison=True)
    executor.pool.lease(1)
    executor.pool.write(1, executor.initial)
    assert executor.logits(executor.step((1,), (3,))).shape == (1, tiny_tokenizer.vocab_size)
