"""RWKV-7's kernels for GPUs: the plain model's numbers in fp32, and equal bits at any batch and any cut."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from nsm_core.errors import CheckpointError, ConfigError
from nsm_core.execution.choose import choose_executor, gpu_kernels_missing_reason
from nsm_core.execution.rwkv7 import choose
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.tokenizer import Tokenizer
from tests.support.interpreter import sum_products_in_one_order
from tests.support.rwkv7 import random_rwkv7, random_tensors, small_config

executor_module = pytest.importorskip("nsm_core.execution.rwkv7.cuda.executor", reason="the compiler is not installed")
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights  # noqa: E402
from nsm_core.execution.rwkv7.cuda import options as options_module  # noqa: E402
from nsm_core.execution.rwkv7.cuda import segments  # noqa: E402
from nsm_core.execution.rwkv7.cuda.executor import MOST_PIECES, Rwkv7CudaExecutor, cut_texts  # noqa: E402
from nsm_core.execution.rwkv7.cuda.kernels.heads import VECTORS, scan  # noqa: E402
from nsm_core.execution.rwkv7.cuda.kernels.products import (  # noqa: E402
    STAGES,
    Activation,
    Part,
    pack_products,
    run_products,
)
from nsm_core.execution.rwkv7.cuda.self_check import failed_check  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
FP32 = CudaOptions(weights=CudaWeights.FP32, graphs=HAS_GPU)
# In the interpreter a token takes a tenth of a second and more
LONG = 300 if HAS_GPU else 7
LENGTHS = (9, 3, 6) if HAS_GPU else (5, 3, 4)
SIZES = {
    "small": small_config(),
    # heads of another size, widths that are no multiple of a step of the sum, ranks off everything
    "odd": small_config(width=96, head_size=32, hidden=144, decay_rank=8, rate_rank=24, gate_rank=72),
    "one-layer": small_config(num_layers=1, value_rank=0),
    "real-heads": small_config(width=128, head_size=64, hidden=256, num_layers=1, value_rank=0),
}
LAYERS = "small" if HAS_GPU else "one-layer"  # where the same bits are asked for twice, not those of the plain model
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        sum_products_in_one_order(monkeypatch)


@functools.cache
def model_of(size: str) -> Rwkv7Model:
    return Rwkv7Model(SIZES[size], random_tensors(SIZES[size], seed=2), DEVICE)


def make(size: str = "small", *, num_rows: int = 4, options: CudaOptions = FP32) -> Rwkv7CudaExecutor:
    return Rwkv7CudaExecutor(model_of(size), num_rows=num_rows, poison=True, options=options)


def opened(rows: Sequence[int], **arguments: object) -> Rwkv7CudaExecutor:
    executor = make(**arguments)  # type: ignore[arg-type]
    for row in rows:
        executor.pool.lease(row)
        executor.pool.write(row, executor.initial)
    return executor


def random_ids(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@torch.inference_mode()
def read_plain(size: str, ids: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    model = model_of(size)
    hidden, state = model.forward(torch.tensor([list(ids)], device=DEVICE), model.initial_state(1))
    return model.logits(hidden)[0], state


def read_parts(executor: Rwkv7CudaExecutor, row: int, parts: Sequence[Sequence[int]]) -> tuple[Tensor, bytes]:
    """One after the other, single tokens by `step`: all logits and the state."""
    hidden = [executor.step((row,), part) if len(part) == 1 else executor.read((row,), (part,))[0] for part in parts]
    return executor.logits(torch.cat(hidden)), executor.pool.pack(row)


@pytest.mark.parametrize("size", SIZES)
def test_texts_and_steps_are_the_plain_model(size: str) -> None:
    """Texts of different lengths in rows with gaps; free rows are NaN."""
    texts = {row: random_ids(LENGTHS[seed], seed) for seed, row in enumerate((0, 2, 3))}
    executor = opened(list(texts), size=size)
    hidden = executor.read((0, 2, 3), [ids[:-2] for ids in texts.values()])
    steps = [executor.step((0, 2, 3), [ids[at] for ids in texts.values()]) for at in (-2, -1)]
    for index, (row, ids) in enumerate(texts.items()):
        want, want_state = read_plain(size, ids)
        got = torch.cat((hidden[index], *(step[index : index + 1] for step in steps)))
        torch.testing.assert_close(executor.logits(got), want, **CLOSE)
        torch.testing.assert_close(executor.pool.copy(row), want_state, **CLOSE)


@functools.cache
def read_whole() -> tuple[Tensor, bytes]:
    return read_parts(opened((0,), size=LAYERS), 0, (random_ids(LONG),))


@pytest.mark.parametrize("cuts", [(2, 3), (1, 2, 3, 4, 5)], ids=str)
def test_R7_any_cut_gives_the_same_bits(cuts: tuple[int, ...]) -> None:
    ids = random_ids(LONG)
    want, want_state = read_whole()
    borders = [0, *cuts, LONG]
    logits, state = read_parts(
        opened((0,), size=LAYERS), 0, [ids[start:end] for start, end in itertools.pairwise(borders)]
    )
    assert logits.equal(want)
    assert state == want_state


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    ids, beside = random_ids(3), random_ids(2, 1)
    alone, state = read_parts(opened((0,), size=LAYERS), 0, (ids, ids[:1]))
    executor = opened(range(3), size=LAYERS)
    (_, read, _) = executor.read(range(3), (beside[:1], ids, beside))
    stepped = executor.step(range(3), (1, ids[0], 2))
    assert executor.logits(torch.cat((read, stepped[1:2]))).equal(alone)
    assert executor.pool.pack(1) == state


def test_long_texts_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_texts([5, 1, 4], most_tokens=4) == [[(0, 0, 4)], [(0, 4, 5), (1, 0, 1), (2, 0, 2)], [(2, 2, 4)]]
    assert [len(part) for part in cut_texts([1] * (MOST_PIECES + 1))] == [MOST_PIECES, 1]
    texts = (random_ids(5), random_ids(3, 1))
    whole = opened((1, 2), size=LAYERS).read((1, 2), texts)
    monkeypatch.setattr(executor_module, "cut_texts", functools.partial(cut_texts, most_tokens=4))
    for got, want in zip(opened((1, 2), size=LAYERS).read((1, 2), texts), whole, strict=True):
        assert got.equal(want)


def test_a_pass_in_segments_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, results = (random_ids(5), random_ids(4, 1)), []
    for shortest in (segments.SHORTEST, 2):
        monkeypatch.setattr(segments, "SHORTEST", shortest)
        executor = opened((1, 2), size=LAYERS)
        hidden = torch.cat(executor.read((1, 2), texts))
        results.append((hidden, [executor.pool.pack(row) for row in (1, 2)]))
    assert segments.PassShape(9, 2).num_segments == 5
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


def test_a_step_of_more_rows_than_the_largest_size_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = opened(range(3), size=LAYERS).step(range(3), (5, 6, 7))
    monkeypatch.setattr(executor_module, "STEP_SIZES", (1, 2))
    assert opened(range(3), size=LAYERS).step(range(3), (5, 6, 7)).equal(whole)


def test_rounding_affects_matrices_alone() -> None:
    weights = make(options=CudaOptions(graphs=False)).weights
    layer = weights.layers[1]
    assert {products.weight.dtype for products in (*layer.products, weights.head)} == {torch.bfloat16}
    assert {layer.time_shares.dtype, layer.heads.bonus.dtype, layer.time_norm.weight.dtype} == {torch.float32}


@pytest.mark.gpu
def test_on_a_gpu_bf16_matrices_stay_near_the_plain_model() -> None:
    ids = random_ids(6)
    executor = opened((0,), options=CudaOptions(graphs=HAS_GPU))
    logits, _ = read_parts(executor, 0, (ids[:4], ids[4:5], ids[5:]))
    want, _ = read_plain("small", ids)
    assert float((logits - want).norm() / want.norm()) < 0.03


def test_a_bad_tensor_is_named() -> None:
    tensors = random_tensors(SIZES["small"])
    tensors["blocks.1.att.w2"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"blocks\.1\.att\.w2 holds a number that is not finite"):
        Rwkv7CudaExecutor(Rwkv7Model(SIZES["small"], tensors, DEVICE), num_rows=1, options=FP32)


@pytest.mark.parametrize("rows", [1, 65])
def test_products_of_several_matrices(rows: int) -> None:
    """Each with inputs, width, bias and activation of its own; what a part does not have is not written."""
    x = torch.randn(rows, 100, device=DEVICE)
    parts = [
        Part(weight=torch.randn(33, 40) / 6, input_at=0, bias=torch.randn(33)),
        Part(weight=torch.randn(130, 20) / 4, input_at=48, activation=Activation.TANH, is_inner=True),
        Part(weight=torch.randn(16, 36) / 6, input_at=64, activation=Activation.SIGMOID),
        Part(weight=torch.randn(5, 64) / 8, input_at=32, activation=Activation.SQUARED_RELU),
    ]
    products = pack_products(parts, torch.float32, torch.device(DEVICE))
    out, inner = (torch.full((rows, products.num_columns), torch.nan, device=DEVICE) for _ in range(2))
    run_products(products, x, out=out, inner=inner)
    for part, start in zip(parts, products.starts, strict=True):
        number, width = part.weight.shape
        sums = x[:, part.input_at : part.input_at + width].double() @ part.weight.double().T.to(DEVICE)
        sums = sums if part.bias is None else sums + part.bias.double().to(DEVICE)
        activate = (lambda y: y, torch.tanh, torch.sigmoid, lambda y: torch.relu(y).square())[part.activation]
        own, other = (inner, out) if part.is_inner else (out, inner)
        torch.testing.assert_close(own[:, start : start + number].double(), activate(sums), rtol=1e-5, atol=1e-5)
        assert bool(own[:, start + number : start + -(-number // 128) * 128].isnan().all())
        assert bool(other[:, start : start + number].isnan().all())


def test_products_add_to_what_is_there_and_need_a_tensor_for_outputs() -> None:
    weight, x, before = torch.randn(40, 64), torch.randn(3, 64, device=DEVICE), torch.randn(3, 40, device=DEVICE)
    products, out = pack_products([Part(weight=weight)], torch.float32, torch.device(DEVICE)), before.clone()
    run_products(products, x, out=out, is_added=True)
    torch.testing.assert_close(out, before + x @ weight.T.to(DEVICE), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="products need out or inner"):
        run_products(products, x)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_a_scan_of_few_texts_has_the_bits_of_one_of_many(size: int) -> None:
    """Once by texts, once token by token."""
    moves = torch.randn(5, 2, VECTORS, size, device=DEVICE) / 4
    texts = torch.tensor([[2, -1, 0], [0, 0, 1], [1, 0, 4]], device=DEVICE)
    matrices = [torch.randn(3, 2, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE) for _ in range(2)]
    reads = [torch.zeros(5, 2 * size, device=DEVICE) for _ in range(2)]
    at = {"moves": moves, "is_chained": False}
    scan(rows=texts[0], starts=texts[1], counts=texts[2], matrix=matrices[0], read=reads[0], has_few_texts=True, **at)
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    for token, row in enumerate((2, 0, 0, 0, 0)):
        scan(
            rows=one * row, starts=one * token, counts=one, matrix=matrices[1], read=reads[1], has_few_texts=False, **at
        )
    if HAS_GPU:
        assert reads[0].equal(reads[1])
        assert matrices[0].equal(matrices[1])
    torch.testing.assert_close(reads[0], reads[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(matrices[0], matrices[1], rtol=1e-5, atol=1e-6)


@pytest.fixture
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a token takes a quarter of a second."""
    if not HAS_GPU:
        monkeypatch.setattr("nsm_core.execution.cuda.self_check.PROMPT_LENGTHS", (3, 2))
        monkeypatch.setattr("nsm_core.execution.cuda.self_check.REPEATS", 1)
        monkeypatch.setattr("nsm_core.execution.rwkv7.cuda.self_check.CUTS", (0, 1, 3))


@pytest.mark.usefixtures("short_checks")
def test_the_check_at_the_start_passes_and_frees_its_rows() -> None:
    executor = make("one-layer", num_rows=2)
    assert failed_check(executor, model_of("one-layer")) is None
    assert executor.pool.num_leased == 0


@pytest.mark.usefixtures("short_checks")
def test_wrong_numbers_are_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Rwkv7CudaExecutor):
        def logits(self, hidden: Tensor) -> Tensor:
            return super().logits(hidden) * 1.5

    monkeypatch.setattr("nsm_core.execution.rwkv7.cuda.executor.Rwkv7CudaExecutor", Wrong)
    monkeypatch.setattr("nsm_core.execution.rwkv7.cuda.self_check.Rwkv7CudaExecutor", Wrong)
    with pytest.raises(ConfigError, match=r"check on .* \(logits are off by 0\.5, 0\.0001 is allowed\)"):
        choose._make_cuda(model_of("one-layer"), num_rows=2, poison=False, options=FP32)


@pytest.mark.skipif(HAS_GPU, reason="for machines without a GPU")
def test_without_a_gpu_it_is_refused_by_name(tiny_tokenizer: Tokenizer) -> None:
    loaded = random_rwkv7(tiny_tokenizer)
    with pytest.raises(ConfigError, match="executor for GPUs: it is not on a GPU"):
        choose_executor(loaded, "cuda")
    assert gpu_kernels_missing_reason(loaded) is not None


def test_fp16_is_refused_with_its_reason(tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "rwkv7_cuda_unsupported_reason", lambda model: None)
    with pytest.raises(ConfigError, match="beyond the range of fp16: set the executor to cuda"):
        choose_executor(random_rwkv7(tiny_tokenizer), "cuda-fp16")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_size": 8}, "its heads have 8 channels, which must be one of 16, 32, 64, 128"),
        ({"hidden": 100}, "its hidden is 100, which must be a multiple of 16"),
    ],
)
def test_sizes_that_fit(changes: dict[str, int], reason: str | None) -> None:
    model = Rwkv7Model(small_config(**changes), {}, "cuda")
    assert options_module.rwkv7_cuda_unsupported_reason(model) == reason


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [CudaWeights.BF16, CudaWeights.FP32])
@pytest.mark.parametrize("size", SIZES)
def test_on_a_gpu_graphs_give_the_bits_of_single_launches(size: str, weights: CudaWeights) -> None:
    results = []
    for graphs in (False, True):
        executor = opened(range(9), size=size, num_rows=9, options=CudaOptions(weights=weights, graphs=graphs))
        hidden = executor.read((1, 4, 8), (random_ids(70), random_ids(5, 1), random_ids(3000, 2)))
        hidden.append(executor.step((0, 1, 2, 4, 8), (1, 2, 3, 4, 5)))
        results.append((torch.cat(hidden), [executor.pool.pack(row) for row in range(9)]))
    assert results[0][0].equal(results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [CudaWeights.BF16, CudaWeights.FP32])
def test_on_a_gpu_bits_depend_neither_on_cuts_nor_on_batches(weights: CudaWeights) -> None:
    options, ids = CudaOptions(weights=weights), random_ids(2500)
    want, want_state = read_parts(opened((0,), size="real-heads", options=options), 0, (ids,))
    for num_rows, cuts in ((2, (1, 2, 1000)), (40, (17, 18, 19, 600, 2499)), (300, (64, 65, 2048))):
        executor = opened(range(num_rows), size="real-heads", num_rows=num_rows, options=options)
        row, hidden = num_rows // 2, []
        for start, end in itertools.pairwise((0, *cuts, len(ids))):
            texts = [[1] * (1 + other % 7) for other in range(num_rows)]
            texts[row] = ids[start:end]
            if end - start == 1:
                hidden.append(executor.step(range(num_rows), [text[0] for text in texts])[row : row + 1])
            else:
                hidden.append(executor.read(range(num_rows), texts)[row])
        assert executor.logits(torch.cat(hidden)).equal(want)
        assert executor.pool.pack(row) == want_state


@pytest.mark.gpu
def test_on_a_gpu_products_have_the_same_bits_in_every_tile_and_every_time() -> None:
    parts = [Part(weight=torch.randn(768, 768) / 28), Part(weight=torch.randn(100, 768) / 28)]
    products = pack_products(parts, torch.bfloat16, torch.device("cuda"))
    x = torch.randn(300, 768, device="cuda").bfloat16()
    results = []
    for columns in [*STAGES, None] * 10:
        out = torch.zeros(300, products.num_columns, device="cuda")
        run_products(products, x, out=out, columns=columns)
        results.append(out)
    assert all(out.equal(results[0]) for out in results)
    alone = torch.zeros(1, products.num_columns, device="cuda")
    run_products(products, x[100:101], out=alone)
    assert alone.equal(results[0][100:101])
