"""The small models that executors are compared on: every kind of layer, sizes off the width of a register."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nsm_core.config import ModelConfig
from nsm_core.execution.base import Executor
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.weights import NativeWeights
from nsm_core.formats.int4_groups import quantize_int4
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import quantize_rows
from nsm_core.state.spec import State
from tests.support.models import random_model, small_config

VOCABULARY = 300  # not a multiple of a register's width
CONFIGS: dict[str, ModelConfig] = {
    "sigmoid": small_config(VOCABULARY, router="sigmoid", write_top_k=8),
    "softmax": small_config(VOCABULARY, num_memory_slots=24, write_top_k=3, timescale_groups=4),
    "dense-softmax": small_config(VOCABULARY, num_memory_slots=16, write_top_k=16),
    "window": small_config(VOCABULARY, layer_pattern="NW", window=24),
    "full": small_config(VOCABULARY, layer_pattern="NA", max_context=64, conv_taps=3),
    "keyed": small_config(VOCABULARY, layer_pattern="KW", num_memory_slots=24, slot_width=32, window=24),
    # more columns than any variant takes together, and some that are left; beside slots of another size
    "keyed-wide": small_config(
        VOCABULARY, layer_pattern="KN", num_memory_slots=36, write_top_k=3, slot_width=144, conv_taps=3
    ),
    "wide-heads": small_config(  # the sizes of a head that have code of their own, grouped as in the bundled model
        VOCABULARY,
        layer_pattern="NW",
        d_model=512,
        num_heads=8,
        num_kv_heads=2,
        router="sigmoid",
        num_memory_slots=64,
        write_top_k=64,
        window=40,
    ),
}
# Of the native executor: a configuration, or one with its matrices in int4, or with its running states in fp16
INT4, HALF = "-int4", "-fp16-states"
KINDS = [
    *CONFIGS,
    *(f"{name}{kind}" for kind in (INT4, HALF) for name in ("sigmoid", "full", "keyed-wide", "wide-heads")),
]
NATIVE = variants()
FINE = ("router.logits", "router.strength", "rates")  # matrices in fp16


@functools.cache
def model_of(name: str) -> NsmModel:
    """A random model of this kind; shared, nothing changes it."""
    model = random_model(CONFIGS[name.removesuffix(INT4).removesuffix(HALF)])
    model.embedding.weight.mul_(0.3)
    return model.eval()


@functools.cache
def weights_of(name: str, variant: str) -> NativeWeights:
    return NativeWeights(model_of(name), variant, precision=precision_of(name))


def precision_of(name: str) -> Precision:
    return Precision.INT4 if name.endswith(INT4) else Precision.INT8


def make_native(name: str, variant: str = "", *, num_rows: int = 4, num_threads: int = 1) -> NativeExecutor:
    """`variant`: the fastest when it is empty. Free rows are NaN."""
    return NativeExecutor(
        model_of(name),
        num_rows=num_rows,
        poison=True,
        num_threads=num_threads,
        weights=weights_of(name, variant or NATIVE[0]),
        half_states=name.endswith(HALF),
    )


def make_eager(name: str, *, num_rows: int = 4) -> EagerExecutor:
    return EagerExecutor(model_of(name), num_rows=num_rows, poison=True)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCABULARY, (num_tokens,), generator=generator).tolist()
    return ids


def open_rows(executor: Executor, rows: Sequence[int]) -> None:
    """Leases the rows, at the start of a text."""
    for row in rows:
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)


def read_parts(executor: Executor, row: int, parts: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
    """One after the other, single tokens by `step`: all logits and the state."""
    hidden = [
        executor.step((row,), part) if len(part) == 1 else executor.read((row,), (part,))[0] for part in parts if part
    ]
    return executor.logits(torch.cat(hidden)), executor.pool.copy(row)


def quantised_copy(model: NsmModel, precision: Precision = Precision.INT8) -> NsmModel:
    """The model in fp64 with what the native executor rounds rounded: weights by rows or groups, inputs by tokens."""
    copy = NsmModel(model.config).requires_grad_(False)
    copy.load_state_dict(model.state_dict())
    for name, module in copy.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(FINE):
            module.weight.copy_(_rounded(module.weight, precision))
            module.register_forward_pre_hook(lambda _, inputs: (round_tokens(inputs[0]),))
        elif isinstance(module, nn.Linear):
            module.weight.copy_(module.weight.half())
    copy.embedding.weight.copy_(_rounded(copy.embedding.weight, precision))
    copy.logits = _rounding(copy.logits)  # type: ignore[method-assign]
    return copy.double().eval()


@torch.inference_mode()
def read_by_copy(copy: NsmModel, ids: Sequence[int]) -> tuple[Tensor, State]:
    """hidden [len(ids), d] and the state, fp32."""
    start = {name: x.double() if x.is_floating_point() else x for name, x in copy.initial_state(1).items()}
    hidden, state = copy.forward(torch.tensor([list(ids)]), start)
    return hidden[0].float(), {name: x.float() if x.is_floating_point() else x for name, x in state.items()}


def _rounding(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda hidden: logits(round_tokens(hidden))


def _rounded(weight: Tensor, precision: Precision) -> Tensor:
    if precision is Precision.INT4:
        return quantize_int4(weight).dense()
    quantized, scale = quantize_rows(weight)
    return quantized.float() * scale[:, None]


def round_tokens(x: Tensor) -> Tensor:
    """x [..., C]: 127 steps to the largest magnitude of each token."""
    step = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / step).round() * step
