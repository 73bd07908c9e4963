"""RWKV-7 on the native kernels: the plain model's numbers in fp32, near them in int8, and equal bits at any cut, batch
and number of threads.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.errors import CheckpointError
from nsm_core.execution.base import Executor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.rwkv7.executor import Rwkv7Executor
from nsm_core.execution.rwkv7.library import Numbers
from nsm_core.execution.rwkv7.weights import (
    HALVES,
    Rwkv7Weights,
    pack_rwkv7,
    rwkv7_unsupported_reason,
)
from nsm_core.formats.int4_groups import quantize_int4
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.opening import OpenModel, open_files
from nsm_core.rwkv7.saving import LARGE, save_model
from nsm_core.state.spec import State
from tests.support.rwkv7 import random_tensors, small_config
from tests.support.rwkv7_files import WRITERS, model_tensors

NATIVE = variants()
pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels are not built")

VOCABULARY = 300  # not a multiple of a register's width
SIZES = {
    "small": small_config(num_layers=3, decay_rank=8, rate_rank=24),  # ranks off the width of a register
    "wide-heads": small_config(width=128, head_size=64, hidden=256),
    "three-registers": small_config(width=96, head_size=48),
    # Off the width of a strip and of a block of columns, see columns.inc
    "two-blocks": small_config(width=96, head_size=48, hidden=560),
}
PRECISIONS = list(Precision)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@functools.cache
def model_of(size: str) -> Rwkv7Model:
    return Rwkv7Model(SIZES[size], random_tensors(SIZES[size], seed=2))


@functools.cache
def weights_of(size: str, precision: Precision, variant: str) -> Rwkv7Weights:
    return Rwkv7Weights(model_of(size), precision, variant)


def make(
    precision: Precision, size: str = "small", variant: str = "", *, num_rows: int = 4, num_threads: int = 1
) -> Rwkv7Executor:
    weights = weights_of(size, precision, variant or NATIVE[0])
    return Rwkv7Executor(model_of(size), num_rows=num_rows, poison=True, num_threads=num_threads, weights=weights)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def open_rows(executor: Executor, rows: Sequence[int]) -> None:
    for row in rows:
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)


def read_parts(executor: Executor, parts: Sequence[Sequence[int]], row: int = 0) -> tuple[Tensor, bytes]:
    """One after the other on top of the row, single tokens by `step`: all logits and the state."""
    hidden = [
        executor.step((row,), part) if len(part) == 1 else executor.read((row,), (part,))[0] for part in parts if part
    ]
    return executor.logits(torch.cat(hidden)), executor.pool.pack(row)


def read_whole(executor: Executor, ids: Sequence[int]) -> tuple[Tensor, bytes]:
    open_rows(executor, (0,))
    return read_parts(executor, (ids,))


@torch.inference_mode()
def read_plain(size: str, ids: Sequence[int]) -> tuple[Tensor, State]:
    model = model_of(size)
    hidden, state = model.forward(torch.tensor([list(ids)]), model.initial_state(1))
    return model.logits(hidden)[0], state


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", NATIVE)
def test_fp32_kernels_are_the_plain_model(size: str, variant: str) -> None:
    ids = random_ids(100)
    executor = make(Precision.FP32, size, variant)
    open_rows(executor, (0,))
    logits, _ = read_parts(executor, (ids[:70], ids[70:71], ids[71:]))
    want, want_state = read_plain(size, ids)
    torch.testing.assert_close(logits, want, **CLOSE)
    torch.testing.assert_close(executor.pool.copy(0), want_state, **CLOSE)


@pytest.mark.parametrize("weight_format", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", NATIVE)
def test_half_precision_files_give_the_bits_of_fp32(weight_format: str, variant: str) -> None:
    """What the file holds is not rounded, whether it is held as it is or as fp32."""
    numbers, dtype = HALVES[weight_format]
    stored = {name: value.to(dtype) for name, value in random_tensors(SIZES["small"]).items()}
    model = Rwkv7Model(SIZES["small"], stored)
    ids, results = random_ids(70), []
    for own in (Numbers.FP32, numbers):
        weights = Rwkv7Weights(model, Precision.FP32, variant, numbers=own)
        results.append(read_whole(Rwkv7Executor(model, num_rows=1, weights=weights), ids))
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


def test_layers_that_threads_pack_give_the_same_bits() -> None:
    ids, results = random_ids(70), []
    for num_threads in (1, 3):
        weights = Rwkv7Weights(model_of("small"), Precision.INT8, num_threads=num_threads)
        results.append(read_whole(Rwkv7Executor(model_of("small"), num_rows=1, weights=weights), ids))
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


def test_of_several_bad_tensors_the_first_is_named() -> None:
    tensors = random_tensors(SIZES["small"])
    for layer in (2, 1):
        tensors[f"blocks.{layer}.att.key.weight"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"blocks\.1\.att\.key\.weight holds a number that is not finite"):
        Rwkv7Weights(Rwkv7Model(SIZES["small"], tensors), Precision.INT8, num_threads=3)


@pytest.mark.parametrize("variant", NATIVE)
def test_int8_files_are_packed_as_they_are(tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of their weights in fp32 that are rounded again."""
    from nsm_core.execution.rwkv7 import weights

    source, out = WRITERS["safetensors"](tmp_path, model_tensors()), tmp_path / "int8"
    save_model(OpenModel(source), out, "int8", chat_template="rwkv-v1")
    opened = open_files(out)
    dense = {name: value.clone() for name, value in opened.tensors.items()}
    ids, results = random_ids(70), []
    for tensors in (dense, opened.tensors):
        model = Rwkv7Model(opened.config, tensors)
        packed = Rwkv7Weights(model, Precision.INT8, variant)
        results.append(read_whole(Rwkv7Executor(model, num_rows=1, weights=packed), ids))
        monkeypatch.delattr(weights, "quantize_rows", raising=False)  # the file's own numbers need no rounding
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


def test_a_file_of_two_kinds_of_numbers_is_held_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    config = SIZES["small"]
    stored = {name: value.bfloat16() for name, value in random_tensors(config).items()}
    stored["blocks.1.att.key.weight"] = stored["blocks.1.att.key.weight"].float() * 1.001
    model = Rwkv7Model(config, stored)
    caplog.set_level(logging.INFO, logger="nsm.execution")
    executor = Rwkv7Executor(model, num_rows=1, weights=pack_rwkv7(model, Precision.FP32, "bf16"))
    assert "weights are held in fp32: the tensor blocks.1.att.key.weight holds torch.float32" in caplog.text
    logits, _ = read_whole(executor, random_ids(9))
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor([random_ids(9)]), model.initial_state(1))
    torch.testing.assert_close(logits, model.logits(hidden)[0], **CLOSE)


@pytest.mark.parametrize(("precision", "most"), [(Precision.INT8, 0.03), (Precision.INT4, 0.3)])
@pytest.mark.parametrize("size", SIZES)
def test_rounded_weights_cost_a_share_of_a_logit(size: str, precision: Precision, most: float) -> None:
    """Random weights are the hardest case: none is near another."""
    ids = random_ids(100)
    logits, _ = read_whole(make(precision, size), ids)
    want, _ = read_plain(size, ids)
    assert float((logits - want).abs().mean() / want.std()) < most


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", NATIVE)
def test_int4_kernels_are_the_plain_model_with_weights_on_grids(size: str, variant: str) -> None:
    """Up to what the rounding of inputs to int8 costs."""
    tensors = {
        name: quantize_int4(value).dense() if name.endswith(LARGE) else value
        for name, value in random_tensors(SIZES[size], seed=2).items()
    }
    model, ids = Rwkv7Model(SIZES[size], tensors), random_ids(100)
    logits, _ = read_whole(make(Precision.INT4, size, variant), ids)
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor([ids]), model.initial_state(1))
        want = model.logits(hidden)[0]
    assert float((logits - want).abs().mean() / want.std()) < 0.03


@pytest.mark.parametrize("size", ["wide-heads", "two-blocks"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_variants_give_the_same_bits(precision: Precision, size: str) -> None:
    ids = random_ids(70)
    (first, first_state), *others = (read_whole(make(precision, size, one), ids) for one in NATIVE)
    for logits, state in others:
        assert logits.equal(first)
        assert state == first_state


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 89)), precision=st.sampled_from(PRECISIONS))
def test_R7_any_split_gives_the_same_bits(cuts: set[int], precision: Precision) -> None:
    ids = random_ids(90, seed=3)
    want, want_state = read_whole(make(precision), ids)
    executor = make(precision)
    open_rows(executor, (0,))
    borders = [0, *sorted(cuts), len(ids)]
    parts = [ids[start:end] for start, end in itertools.pairwise(borders)]
    logits, state = read_parts(executor, parts)
    assert logits.equal(want)
    assert state == want_state


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_rows", [5, 7, 32, 70])
def test_R8_a_request_has_the_same_bits_at_any_batch_size(precision: Precision, num_rows: int) -> None:
    ids = random_ids(12, seed=4)
    want, want_state = read_whole(make(precision), ids)
    executor = make(precision, num_rows=num_rows)
    open_rows(executor, range(num_rows))
    row = num_rows // 2
    texts = [random_ids(1 + index % 9, seed=index) for index in range(num_rows)]
    texts[row] = ids[:5]
    hidden = [executor.read(range(num_rows), texts)[row]]
    for token in ids[5:]:
        tokens = [index % VOCABULARY for index in range(num_rows)]
        tokens[row] = token
        hidden.append(executor.step(range(num_rows), tokens)[row : row + 1])
    assert executor.logits(torch.cat(hidden)).equal(want)
    assert executor.pool.pack(row) == want_state


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_no_bit(precision: Precision, num_threads: int) -> None:
    ids = random_ids(90)
    want, want_state = read_whole(make(precision, "wide-heads"), ids)
    executor = make(precision, "wide-heads", num_threads=num_threads)
    open_rows(executor, (0,))
    logits, state = read_parts(executor, (ids[:64], *([token] for token in ids[64:])))
    assert logits.equal(want)
    assert state == want_state


@pytest.mark.parametrize(("num_rows", "num_threads"), [(5, 2), (70, 2), (7, 3), (5, 5)])
def test_R8_rows_that_threads_decode_apart_have_the_same_bits(num_rows: int, num_threads: int) -> None:
    """Some rows for each thread, more than a thread's piece, and too few for lanes."""
    rows, results = range(num_rows), []
    for threads in (1, num_threads):
        executor = make(Precision.INT8, num_rows=num_rows, num_threads=threads)
        open_rows(executor, rows)
        hidden = [executor.step(rows, random_ids(num_rows, seed=token)) for token in range(3)]
        results.append((torch.cat(hidden), [executor.pool.pack(row) for row in rows]))
    (want, want_states), (got, got_states) = results
    assert got.equal(want)
    assert got_states == want_states


@pytest.mark.parametrize("num_threads", [2, 3])
def test_prompts_that_threads_read_side_by_side_have_the_same_bits(num_threads: int) -> None:
    results = []
    for threads in (1, num_threads):
        executor = make(Precision.INT8, "wide-heads", num_threads=threads)
        open_rows(executor, (0, 1, 2))
        hidden = [
            torch.cat(executor.read((0, 1, 2), [random_ids(count, seed) for seed, count in enumerate(lengths)]))
            for lengths in ((31, 1, 100), (1, 130, 1), (16, 16, 48))
        ]
        results.append((torch.cat(hidden), [executor.pool.pack(row) for row in range(3)]))
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_R10_resume_from_packed_bytes_is_exact(precision: Precision) -> None:
    ids = random_ids(40)
    want, want_state = read_whole(make(precision), ids)
    first = make(precision)
    _, stored = read_whole(first, ids[:17])
    second = make(precision)
    second.pool.lease(2)
    second.pool.write(2, second.pool.spec.unpack(stored))
    logits, state = read_parts(second, (ids[17:],), row=2)
    assert logits.equal(want[17:])
    assert state == want_state


@pytest.mark.parametrize("precision", PRECISIONS)
def test_R4_drafts_are_taken_back_to_the_bit(precision: Precision) -> None:
    executor = make(precision)
    _, before = read_whole(executor, random_ids(9))
    savepoint = executor.savepoint(0, 5)
    (drafted,) = executor.read((0,), (random_ids(5, seed=1),))
    savepoint.restore()
    assert executor.pool.pack(0) == before
    one_by_one = torch.cat([executor.step((0,), (token,)) for token in random_ids(5, seed=1)])
    assert one_by_one.equal(drafted)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stay_in_their_row(precision: Precision, value: float) -> None:
    ids = random_ids(6)
    want, want_state = read_whole(make(precision), ids)
    executor = make(precision)
    open_rows(executor, (0, 1))
    executor.pool.tensors["layers.1.matrix"][1, 0, 3, 5] = value
    hidden = executor.read((0, 1), (ids, ids))
    assert executor.logits(hidden[0]).equal(want)
    assert executor.pool.pack(0) == want_state
    assert not bool(executor.logits(hidden[1]).isfinite().any())


def test_an_id_that_is_no_token_is_refused_before_anything_is_read() -> None:
    executor = make(Precision.INT8)
    open_rows(executor, (0,))
    before = executor.pool.pack(0)
    for bad in (VOCABULARY, -1):
        with pytest.raises(IndexError):
            executor.step((0,), (bad,))
    assert executor.pool.pack(0) == before


def test_logits_are_those_of_the_tokenizers_ids() -> None:
    config = SIZES["small"]
    model = Rwkv7Model(config, random_tensors(config), num_ids=290)
    executor = Rwkv7Executor(model, num_rows=1, weights=Rwkv7Weights(model, Precision.FP32))
    open_rows(executor, (0,))
    assert executor.logits(executor.step((0,), (1,))).shape == (1, 290)
    assert model.logits(torch.zeros(1, config.width)).shape == (1, 290)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 72, "head_size": 24}, "multiple of 16: width is 72"),
        ({"hidden": 100}, "hidden is 100"),
        ({"width": 544, "head_size": 272}, "at most 256: head_size is 272"),
    ],
)
def test_unsupported_sizes_are_named(changes: dict[str, int], reason: str) -> None:
    assert reason in str(rwkv7_unsupported_reason(small_config(**changes)))


def test_a_bad_tensor_is_named_while_it_is_packed() -> None:
    config = SIZES["small"]
    tensors = random_tensors(config)
    tensors["blocks.1.ffn.key.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ffn\.key\.weight has the shape"):
        Rwkv7Weights(Rwkv7Model(config, tensors), Precision.INT8)


def test_kernels_that_find_no_memory_are_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(Precision.INT8)
    open_rows(executor, [0])
    hidden = executor.step([0], [1])
    library = SimpleNamespace(nsm_rwkv7_run=lambda *_: 0, nsm_rwkv7_logits=lambda *_: 0)
    monkeypatch.setattr(executor, "_library", library)
    with pytest.raises(MemoryError):
        executor.step([0], [1])
    with pytest.raises(MemoryError):
        executor.logits(hidden)
