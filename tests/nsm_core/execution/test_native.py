"""The native executor: the model in int8, the same bits however a text is cut, batched, threaded or vectorised."""

from __future__ import annotations

import math
import struct
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.library import variants
from nsm_core.execution.native.precision import Precision
from nsm_core.execution.native.weights import NativeWeights, exact_exp, native_unsupported_reason
from nsm_core.state.spec import State
from tests.nsm_core.execution.small_models import (
    CONFIGS,
    HALF,
    KINDS,
    NATIVE,
    VOCABULARY,
    make_eager,
    make_native,
    model_of,
    open_rows,
    precision_of,
    quantised_copy,
    random_ids,
    read_by_copy,
    read_parts,
)
from tests.support.models import RandomModel, random_model, small_config

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built: there is no C++ compiler")

# Rounding to int8 is a jump where a number lies between two steps: there fp32 and fp64 may differ by one of them.
COPY_TOLERANCE = 2e-2
COPY_MEAN_TOLERANCE = 5e-5
# In which no input lies so near a border
TEXTS = {Precision.INT8: random_ids(70, 5), Precision.INT4: random_ids(70, 4), "wide-heads-int4": random_ids(29, 30)}


def is_same(got: tuple[Tensor, State], want: tuple[Tensor, State]) -> bool:
    """To the last bit."""
    return got[0].equal(want[0]) and all(got[1][name].equal(want[1][name]) for name in want[1])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith(HALF)])
@pytest.mark.parametrize("variant", NATIVE)
def test_it_is_the_model_with_weights_and_inputs_rounded(kind: str, variant: str) -> None:
    ids = TEXTS.get(kind, TEXTS[precision_of(kind)])
    executor = make_native(kind, variant)
    open_rows(executor, [2])
    logits, state = read_parts(executor, 2, [ids[:30], ids[30:31], ids[31:]])
    copy = quantised_copy(model_of(kind), precision_of(kind))
    hidden, want_state = read_by_copy(copy, ids)
    difference = (logits - copy.logits(hidden.double())).abs()
    assert difference.max() < COPY_TOLERANCE
    assert difference.mean() < COPY_MEAN_TOLERANCE
    torch.testing.assert_close(state, want_state, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith(HALF)])
def test_fp16_states_are_fp32_ones_but_for_their_rounding(kind: str) -> None:
    ids, halves, whole = random_ids(70), make_native(kind), make_native(kind.removesuffix(HALF))
    open_rows(halves, [0])
    open_rows(whole, [0])
    got, want = read_parts(halves, 0, [ids]), read_parts(whole, 0, [ids])
    assert (got[0] - want[0]).square().mean().sqrt() < 0.03 * want[0].square().mean().sqrt()
    for name, state in want[1].items():
        held = halves.pool.tensors[name]
        assert (held.dtype == torch.float16) == name.endswith((".slots", ".kv"))
        assert got[1][name].dtype == state.dtype


def test_rounding_costs_a_share_of_a_logit(kind: str) -> None:
    """Against the model in fp32, whose random weights are a harder case than trained ones."""
    ids = random_ids(48)
    native, eager = make_native(kind), make_eager(kind)
    open_rows(native, [0])
    open_rows(eager, [0])
    got, want = read_parts(native, 0, [ids])[0], read_parts(eager, 0, [ids])[0]
    most = 0.15 if precision_of(kind) is Precision.INT8 else 1.0
    assert (got - want).square().mean().sqrt() < most * want.square().mean().sqrt()


def test_all_variants_give_the_same_bits(kind: str) -> None:
    """Read in parts that products take in one block of tokens, in two, three and more."""
    ids, ends = random_ids(105), list(accumulate([0, 45, 1, 2, 3, 4, 5, 6, 8, 13, 18]))
    results = []
    for variant in NATIVE:
        executor = make_native(kind, variant)
        open_rows(executor, [1])
        results.append(read_parts(executor, 1, [ids[start:end] for start, end in pairwise(ends)]))
    assert all(is_same(result, results[0]) for result in results)


@given(cuts=st.sets(st.integers(1, 89), max_size=6), seed=st.integers(0, 3), kind=st.sampled_from(KINDS))
def test_R7_any_split_gives_the_same_bits(cuts: set[int], seed: int, kind: str) -> None:
    ids = random_ids(90, seed)
    executor = make_native(kind)
    open_rows(executor, [0, 3])
    whole = read_parts(executor, 0, [ids])
    parts = [ids[start:end] for start, end in pairwise([0, *sorted(cuts), len(ids)])]
    assert is_same(read_parts(executor, 3, parts), whole)


def test_scales_are_exact_on_every_processor() -> None:
    """In fp32 the library's exp differs in the last bit between instruction sets."""
    logs = torch.linspace(-3, 3, 4096)
    wanted = [struct.unpack("f", struct.pack("f", math.exp(log)))[0] for log in logs.tolist()]
    assert exact_exp(logs).tolist() == wanted


@pytest.mark.parametrize("num_rows", [5, 7, 16, 32, 128])
def test_R8_a_request_has_the_same_bits_at_any_batch_size(kind: str, num_rows: int) -> None:
    """Prompts of different lengths in one call, then decoding side by side; each row against its run alone."""
    prompts = [random_ids(1 + 5 * row % 17, seed=row) for row in range(num_rows)]
    executor = make_native(kind, num_rows=num_rows + 1)
    rows = list(range(num_rows))
    open_rows(executor, rows)
    read = executor.read(rows, prompts)
    steps = [executor.step(rows, [(row * 7 + step) % VOCABULARY for row in rows]) for step in range(3)]
    logits = [executor.logits(step) for step in steps]
    executor.pool.lease(num_rows)
    for row in rows[:: max(1, num_rows // 8)]:
        executor.pool.write(num_rows, executor.initial)
        assert executor.read((num_rows,), (prompts[row],))[0].equal(read[row])
        for step in range(3):
            alone = executor.step((num_rows,), ((row * 7 + step) % VOCABULARY,))
            assert alone[0].equal(steps[step][row])
            assert executor.logits(alone)[0].equal(logits[step][row])
        assert executor.pool.pack(num_rows) == executor.pool.pack(row)


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_change_no_bit(kind: str, num_threads: int) -> None:
    results = []
    for threads in (1, num_threads):
        executor = make_native(kind, num_threads=threads)
        open_rows(executor, [0, 1, 3])
        hidden = executor.read([0, 1, 3], [random_ids(20, 0), random_ids(70, 1), random_ids(1, 2)])
        steps = [executor.step([0, 1, 3], [step, step + 1, step + 2]) for step in range(20)]
        results.append((executor.logits(torch.cat([*hidden, *steps])), executor.pool.pack(1)))
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_prompts_that_threads_read_side_by_side_have_the_same_bits(kind: str, num_threads: int) -> None:
    """Pieces within one text, that end one and begin the next, and of many; beside a row that decodes."""
    results = []
    for threads in (1, num_threads):
        executor = make_native(kind, num_threads=threads)
        open_rows(executor, [0, 1, 2, 3])
        counts = [(31, 1, 2, 40), (1, 257, 1, 1), (16, 16, 64, 3), (100, 1, 1, 100)]
        hidden = [
            torch.cat(executor.read([0, 1, 2, 3], [random_ids(count, seed) for seed, count in enumerate(lengths)]))
            for lengths in counts
        ]
        results.append((torch.cat(hidden), [executor.pool.pack(row) for row in range(4)]))
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


def test_R10_resume_from_packed_bytes_is_exact(kind: str) -> None:
    ids = random_ids(50)
    executor, other = make_native(kind), make_native(kind)
    open_rows(executor, [0])
    executor.read((0,), (ids[:33],))
    other.pool.lease(2)
    other.pool.write(2, executor.pool.spec.unpack(executor.pool.pack(0)))
    assert is_same(read_parts(other, 2, [ids[33:]]), read_parts(executor, 0, [ids[33:]]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_stay_in_their_row(kind: str, value: float) -> None:
    """As with the eager executor: the sick row's logits are not finite, its neighbours are what they would be alone."""
    executor, eager = make_native(kind), make_eager(kind)
    for each in (executor, eager):
        open_rows(each, [0, 1, 2])
        each.read([0, 1, 2], [random_ids(30, row) for row in range(3)])
    healthy = executor.pool.copy(1)
    for each in (executor, eager):
        sick = each.pool.copy(1)
        for name in sick:
            if name.endswith(("slots", "kv")):
                sick[name][0, 0].fill_(value)  # a head's keys and values
        each.pool.write(1, sick)
    got = executor.logits(executor.step([0, 1, 2], [1, 2, 3]))
    want = eager.logits(eager.step([0, 1, 2], [1, 2, 3]))
    assert got.isfinite().all(dim=-1).tolist() == want.isfinite().all(dim=-1).tolist() == [True, False, True]
    fresh = make_native(kind)
    open_rows(fresh, [0, 1, 2])
    fresh.read([0, 1, 2], [random_ids(30, row) for row in range(3)])
    fresh.pool.write(1, healthy)
    assert fresh.logits(fresh.step([0, 2], [1, 3])).equal(got[[0, 2]])


def test_an_id_that_is_no_token_is_refused_before_anything_is_read() -> None:
    executor = make_native("sigmoid")
    open_rows(executor, [0])
    before = executor.pool.pack(0)
    for bad in (-1, VOCABULARY):
        with pytest.raises(IndexError, match="token ids must be below 300"):
            executor.read((0,), ([1, bad],))
    assert executor.pool.pack(0) == before


def test_int8_weights_are_packed_without_loss() -> None:
    """Packed and read back, through the one matrix whose rows come out one by one."""
    model = random_model(CONFIGS["sigmoid"])
    weight = torch.randint(-127, 128, model.embedding.weight.shape, generator=torch.Generator().manual_seed(0)).float()
    weight[:, 0] = 127  # so that the scale of each row is what it is given as
    model.embedding.weight.copy_(weight * 0.01)
    for block in model.layers:  # every layer adds zero, so that hidden vectors are normalised embeddings
        block.mlp.down.weight.zero_()
        block.mixer.out.weight.zero_()  # type: ignore[operator, union-attr]
    for variant in NATIVE:
        executor = NativeExecutor(model, num_rows=1, weights=NativeWeights(model, variant))
        open_rows(executor, [0])
        hidden = executor.read((0,), (list(range(VOCABULARY)),))[0]
        want = torch.nn.functional.rms_norm(weight * 0.01 * 32**0.5, (32,), eps=1e-6)
        torch.testing.assert_close(hidden, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d_model": 24}, "d_model is 24"),
        ({"d_model": 48, "num_heads": 4}, "head_dim is 12"),
        ({"mlp_hidden": 40}, "mlp_hidden is 40"),
        ({"d_model": 512, "num_heads": 1}, "head_dim is 512"),
    ],
)
def test_unsupported_sizes_are_named(changes: dict[str, int], reason: str) -> None:
    model = random_model(small_config(VOCABULARY, **changes))
    assert reason in (native_unsupported_reason(model) or "")
    with pytest.raises(ValueError, match=reason):
        NativeExecutor(model, num_rows=1)


def test_other_models_are_refused() -> None:
    assert "RandomModel" in (native_unsupported_reason(RandomModel()) or "")


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match=f"no kernels sse; it has {', '.join(variants())}"):
        NativeWeights(model_of("sigmoid"), "sse")


def test_kernels_that_find_no_memory_are_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_native("sigmoid")
    open_rows(executor, [0])
    hidden = executor.step([0], [1])
    monkeypatch.setattr(executor, "_library", SimpleNamespace(nsm_run=lambda *_: -1, nsm_logits=lambda *_: 0))
    with pytest.raises(MemoryError):
        executor.step([0], [1])
    with pytest.raises(MemoryError):
        executor.logits(hidden)
