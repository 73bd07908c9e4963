"""Products with int4 weights: each number is the exact sum, multiplied in fp32 as the reference multiplies it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import Part, variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.formats.int4_groups import quantize_int4
from nsm_core.model.nsm import NsmModel
from tests.support.models import random_model

NATIVE = variants()
pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built: there is no C++ compiler")

# Rows and columns: full groups of tiles, tiles that are left, a tile that is not full, half a group of inputs
SIZES = [(64, 32), (300, 48), (17, 16), (200, 160), (80, 544)]


@functools.cache
def model_of(rows: int, cols: int) -> NsmModel:
    """Its logits are a product with its embedding [rows, cols]."""
    heads = cols // 16
    model = random_model(
        ModelConfig(vocab_size=rows, d_model=cols, num_heads=heads, num_layers=1, mlp_hidden=16, num_memory_slots=8)
    )
    model.embedding.weight[::5, 1] *= 30.0
    return model


def product_reference(weight: Tensor, hidden: Tensor) -> Tensor:
    """Inputs rounded to int8 by tokens, sums in whole numbers, then one product of fp32 scales."""
    rows, most = quantize_int4(weight), hidden.abs().amax(dim=1)
    values = (hidden * (127.0 / most)[:, None]).round().long()
    sums = values @ rows.grid().long().T
    return sums.float() * ((most / 127.0)[:, None] * rows.scale)


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_reference_to_the_bit(size: tuple[int, int], variant: str) -> None:
    model = model_of(*size)
    weights = NativeWeights(model, variant, precision=Precision.INT4)
    executor = NativeExecutor(model, num_rows=1, weights=weights)
    for num_tokens in (1, 2, 3, 4, 5, 6, 7, 13, 17, 35, 70):
        hidden = torch.randn(num_tokens, size[1], generator=torch.Generator().manual_seed(num_tokens))
        assert executor.logits(hidden).equal(product_reference(model.embedding.weight, hidden))


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_of_the_largest_numbers_and_inputs_are_exact(sign: float, variant: str) -> None:
    """A variant may sum a group's products in 16 bits: they hold 16 products of 15 and 127, not many more."""
    model = random_model(
        ModelConfig(vocab_size=32, d_model=64, num_heads=4, num_layers=1, mlp_hidden=16, num_memory_slots=8)
    )
    weight = model.embedding.weight.fill_(1.0)
    weight[:, ::32] = -1.0
    assert quantize_int4(weight).numbers.float().mean() > 14.0
    weights = NativeWeights(model, variant, precision=Precision.INT4)
    executor = NativeExecutor(model, num_rows=1, weights=weights)
    for num_tokens in (1, 4, 9, 64):
        hidden = torch.full((num_tokens, 64), sign)
        assert executor.logits(hidden).equal(product_reference(weight, hidden))


@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_come_out_as_they_went_in(size: tuple[int, int], variant: str) -> None:
    model = model_of(*size)
    weights = NativeWeights(model, variant, precision=Precision.INT4)
    rows = weights.rows(0, Part.EMBEDDING, torch.arange(size[0]), size[1])
    assert rows.equal(quantize_int4(model.embedding.weight).dense())
