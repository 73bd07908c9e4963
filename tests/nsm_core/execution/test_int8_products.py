"""Products with int8 weights: each number is the exact sum, multiplied in fp32 as the reference multiplies it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.formats.int8_rows import quantize_rows
from nsm_core.model.nsm import NsmModel
from tests.support.models import random_model

NATIVE = variants()
pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built: there is no C++ compiler")

# Rows and columns: full groups of tiles, tiles that are left, a tile that is not full
SIZES = [(64, 32), (300, 48), (17, 16), (200, 160), (80, 544)]
# Of tokens: one, blocks of each size, several passes
TOKENS = (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 35, 70)


@functools.cache
def model_of(rows: int, cols: int) -> NsmModel:
    """Its logits are a product with its embedding [rows, cols]."""
    return random_model(
        ModelConfig(
            vocab_size=rows, d_model=cols, num_heads=cols // 16, num_layers=1, mlp_hidden=16, num_memory_slots=8
        )
    )


def product_reference(weight: Tensor, hidden: Tensor) -> Tensor:
    """Inputs rounded to int8 by tokens, sums in whole numbers, then one product of fp32 scales."""
    (rows, scale), most = quantize_rows(weight), hidden.abs().amax(dim=1)
    values = (hidden * (127.0 / most)[:, None]).round().long()
    return (values @ rows.long().T).float() * ((most / 127.0)[:, None] * scale.flatten())


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_reference_to_the_bit(size: tuple[int, int], variant: str) -> None:
    model = model_of(*size)
    executor = NativeExecutor(model, num_rows=1, weights=NativeWeights(model, variant))
    for num_tokens in TOKENS:
        hidden = torch.randn(num_tokens, size[1], generator=torch.Generator().manual_seed(num_tokens))
        assert executor.logits(hidden).equal(product_reference(model.embedding.weight, hidden))


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("most", [63, 64, 127])
def test_sums_of_inputs_that_are_not_negative_are_exact(most: int, variant: str) -> None:
    """A variant may add four of their products in 16 bits where inputs are small: four of 63 are, of 64 are not."""
    model = random_model(
        ModelConfig(vocab_size=32, d_model=64, num_heads=4, num_layers=1, mlp_hidden=16, num_memory_slots=8)
    )
    weight = model.embedding.weight.copy_(torch.ones(32, 64))
    weight[1::2] = -1.0
    executor = NativeExecutor(model, num_rows=1, weights=NativeWeights(model, variant))
    hidden = torch.randint(most + 1, (35, 64), generator=torch.Generator().manual_seed(most)).float()
    hidden[:, 8:14] = 0.0
    hidden[:, 8] = 127.0
    assert executor.logits(hidden).equal(product_reference(weight, hidden))


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("weight_sign", [1.0, -1.0])
@pytest.mark.parametrize("input_sign", [1.0, -1.0])
def test_sums_of_the_largest_weights_and_inputs_are_exact(input_sign: float, weight_sign: float, variant: str) -> None:
    """A variant may add pairs of products in 16 bits: they hold two of 127 and 128."""
    config = ModelConfig(vocab_size=32, d_model=64, num_heads=4, num_layers=1, mlp_hidden=16, num_memory_slots=8)
    model = random_model(config)
    weight = model.embedding.weight.fill_(weight_sign)
    executor = NativeExecutor(model, num_rows=1, weights=NativeWeights(model, variant))
    for num_tokens in (1, 4, 9, 64):
        hidden = torch.full((num_tokens, 64), input_sign)
        assert executor.logits(hidden).equal(product_reference(weight, hidden))
