"""What `benchmarks.gpu_decode` checks before it measures: the executor for a GPU against the model as it is written.

Each check yields rows of results, most with `ok`. They run without a GPU too, in the kernels' interpreter, with fp32
weights and without graphs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nsm_core.execution.cuda.decode import DecodeStep
from nsm_core.execution.cuda.executor import CudaExecutor
from nsm_core.execution.cuda.kernels.linear import Linear, Stream, make_stream, padded, run_linear, split
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.execution.cuda.weights import pack_weights
from nsm_core.execution.eager import EagerExecutor
from nsm_core.model.nsm import NsmModel
from nsm_core.sampling.device import sample_on_device
from nsm_core.sampling.params import SamplingParams
from nsm_core.sampling.sampler import Sampler, SamplingRow
from nsm_core.state.pool import StatePool
from nsm_core.state.spec import POSITION, State

FP32_TOLERANCE = 2e-4  # of benchmarks/notes/model.md, for whole steps
LINEAR_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BATCHES = (1, 7, 32, 128)  # of the test of invariance

Row = dict[str, Any]


def relative(got: Tensor, want: Tensor) -> float:
    """Of the norms; not a number when either side has one."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def random_states(model: NsmModel, num_rows: int, *, first: int = 0, last: int = 5000) -> State:
    """As after texts of `first` to `last` tokens: slots near the learned ones, everything else random."""
    state = model.initial_state(num_rows)
    device = state[POSITION].device
    state[POSITION] = torch.randint(first, last, (num_rows,), device=device)
    for name, value in state.items():
        if name != POSITION:
            state[name] = value + (0.3 if name.endswith("slots") else 1.0) * torch.randn_like(value)
    return state


def row_of(state: State, index: int) -> State:
    return {name: value[index : index + 1].clone() for name, value in state.items()}


def lease(executor: EagerExecutor | CudaExecutor, rows: Sequence[int], state: State) -> None:
    """Row rows[i] holds state i."""
    with torch.inference_mode():
        for index, row in enumerate(rows):
            executor.pool.lease(row)
            executor.pool.write(row, row_of(state, index))


def check_linears(model: NsmModel, dtype: torch.dtype, batches: Sequence[int]) -> Iterator[Row]:
    """Every form of the fused linear layer against fp64."""
    device = model.embedding.weight.device
    weights = pack_weights(model, dtype)
    layer = weights.layers[0]
    linears = {"project": layer.mixer.project, "out": layer.out, "up": layer.up, "down": layer.down}
    linears |= {"router": layer.mixer.router, "logits": weights.output}
    for batch in batches:
        for name, linear in linears.items():
            x = random_input(linear, name, batch, dtype)
            out: Tensor | Stream = output_of(linear, name, batch, dtype, device)
            residual = None
            if isinstance(out, Stream):
                out.full.normal_()
                residual = out.full.clone()
            run_linear(linear, x, out)
            got = out.full if isinstance(out, Stream) else out
            want = linear_reference(linear, x.full if isinstance(x, Stream) else x, residual)
            error = relative(got[:, : linear.num_outputs], want)
            own = torch.float32 if name == "router" else dtype
            yield {"form": name, "dtype": str(own), "batch": batch, "error": error} | _ok(error < LINEAR_TOLERANCE[own])


def random_input(linear: Linear, name: str, batch: int, dtype: torch.dtype) -> Tensor | Stream:
    """What the form of a linear layer is given in a step."""
    device = linear.weight.device
    x = torch.zeros(batch, linear.weight.shape[1], device=device)
    x[:, : linear.width] = torch.randn(batch, linear.width, device=device)
    return stream_of(x, dtype) if linear.is_normed else x if name == "logits" else x.to(dtype)


def stream_of(x: Tensor, dtype: torch.dtype) -> Stream:
    """x [B, padded width] fp32, in all forms."""
    stream = make_stream(len(x), x.shape[1], dtype, x.device)
    stream.full.copy_(x)
    stream.squares.copy_(x.square().unflatten(1, (-1, 16)).sum(dim=2))
    stream.low.copy_(x)
    for form, value in zip((stream.high, stream.rest), split(x).chunk(2), strict=True):
        form.copy_(value)
    return stream


def output_of(linear: Linear, name: str, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor | Stream:
    """What it writes to: the residual stream after `out` and `down`."""
    if name in ("out", "down"):
        return make_stream(batch, linear.num_outputs, dtype, device)
    own = dtype if name in ("project", "up") else torch.float32
    return torch.full((batch, padded(linear.num_outputs)), torch.nan, device=device, dtype=own)


def everything_written(
    linear: Linear, x: Tensor | Stream, name: str, dtype: torch.dtype, columns: int | None
) -> Tensor:
    """What a launch writes, of each row side by side."""
    batch = len(x.full) if isinstance(x, Stream) else len(x)
    out = output_of(linear, name, batch, dtype, linear.weight.device)
    run_linear(linear, x, out, columns=columns)
    if isinstance(out, Stream):
        return torch.cat((out.full, out.low, out.high, out.rest, out.squares), dim=1)
    return out[:, : linear.num_outputs]


def linear_reference(linear: Linear, x: Tensor, residual: Tensor | None) -> Tensor:
    """The same in fp64."""
    wide, weight = x[:, : linear.width].double(), linear.weight[:, : linear.width].double()
    if linear.is_split:
        weight = sum(weight.chunk(2))
    if linear.is_normed:
        wide = wide / (wide.square().mean(dim=1, keepdim=True) + linear.eps).sqrt()
    out = wide @ weight.T
    if linear.is_gated:
        gate, value = out.chunk(2, dim=1)
        out = torch.nn.functional.silu(gate) * value
    if linear.bias is not None:
        out = out + linear.bias.double()
    return out if residual is None else out + residual[:, : linear.num_outputs]


@torch.inference_mode()
def check_same_bits(model: NsmModel, dtype: torch.dtype, *, times: int = 20) -> Iterator[Row]:
    """Products again and again, and in tiles of other widths: a race shows as another bit."""
    rows = 512
    weights = pack_weights(model, dtype)
    layer = weights.layers[0]
    linears = {"project": layer.mixer.project, "out": layer.out, "up": layer.up, "down": layer.down}
    for name, linear in (linears | {"router": layer.mixer.router, "logits": weights.output}).items():
        x = random_input(linear, name, rows, dtype)
        outputs = []
        for columns in (None, *((16, 32) if linear.is_split else (16, 32, 64))) * times:
            outputs.append(everything_written(linear, x, name, dtype, columns))
        one = x.rows(slice(100, 101)) if isinstance(x, Stream) else x[100:101]
        alone = everything_written(linear, one, name, dtype, None)
        same = sum(out.equal(outputs[0]) for out in outputs)
        is_alone = alone.equal(outputs[0][100:101])
        yield {"form": name, "same": same, "of": len(outputs), "alone": is_alone} | _ok(
            same == len(outputs) and is_alone
        )


@torch.inference_mode()
def check_blocks(model: NsmModel) -> Iterator[Row]:
    """One block of each kind in fp32, states included."""
    kinds = {type(block.mixer).__name__: index for index, block in enumerate(model.layers)}
    for kind, index in kinds.items():
        state = random_states(model, 5)
        pool = StatePool(model.state_spec, 5, model.embedding.weight.device)
        for row in range(5):
            pool.lease(row)
        pool.scatter(range(5), state)
        step = DecodeStep(pack_weights(model, torch.float32), model.config, pool.tensors, 8)
        step.inputs(5).fill_(-1)
        step.inputs(5)[:, :5] = torch.tensor([[4, 2, 0, 1, 3], [1, 2, 3, 4, 5]])
        rows = step.inputs(5)[0, :5]
        on = step.buffers(5)
        step.begin(on)
        width = model.config.d_model
        x = on.x.full[:, :width].clone()
        prefix = f"layers.{index}."
        carried = {name.removeprefix(prefix): value[rows] for name, value in state.items() if name.startswith(prefix)}
        want, want_state = model.layers[index].step(x, carried, state[POSITION][rows])
        step.block(index, on)
        errors = {"x": relative(on.x.full[:, :width], want)}
        errors |= {name: relative(pool.tensors[prefix + name][rows], value) for name, value in want_state.items()}
        yield {"block": kind, "errors": errors} | _ok(max(errors.values()) < FP32_TOLERANCE)


@torch.inference_mode()
def check_steps(model: NsmModel, options: CudaOptions, *, num_steps: int, num_rows: int) -> Iterator[Row]:
    """Whole steps against eager fp32: the same tokens, states carried on by each; rows out of order, with gaps."""
    rows = tuple(range(1, 2 * num_rows, 2))
    eager = EagerExecutor(model, num_rows=2 * num_rows, poison=True)
    fused = CudaExecutor(model, num_rows=2 * num_rows, poison=True, options=options)
    state = random_states(model, num_rows)
    rounded = EagerExecutor(model, num_rows=2 * num_rows)
    for executor in (eager, fused, rounded):
        lease(executor, rows, state)
    worst, worst_rounded, agreed = 0.0, 0.0, 0
    for _ in range(num_steps):
        ids = torch.randint(model.config.vocab_size, (num_rows,)).tolist()
        want = eager.logits(eager.step(rows, ids))
        got = fused.logits(fused.step(rows, ids))
        worst = max(worst, relative(got, want))
        with torch.autocast(want.device.type, torch.bfloat16):
            worst_rounded = max(worst_rounded, relative(rounded.logits(rounded.step(rows, ids)), want))
        agreed += int((got.argmax(dim=1) == want.argmax(dim=1)).sum())
    errors = {
        name: relative(fused.pool.tensors[name][list(rows)], eager.pool.tensors[name][list(rows)]) for name in state
    }
    free = [name for name, value in fused.pool.tensors.items() if name != POSITION and not value[0].isnan().all()]
    limit = FP32_TOLERANCE if options.weights is CudaWeights.FP32 else 0.05
    result = {"weights": str(options.weights), "graphs": options.graphs, "logits_error": worst}
    result |= {"eager_bf16_logits_error": worst_rounded}
    result |= {"same_argmax": agreed / (num_rows * num_steps), "state_error": max(errors.values())}
    yield result | _ok(worst < limit and errors[POSITION] == 0.0 and not free)


@torch.inference_mode()
def check_replays(model: NsmModel, weights: CudaWeights) -> Iterator[Row]:
    """Graphs give the bits of single launches while rows and batch sizes change; other rows keep theirs."""
    executors = [
        CudaExecutor(model, num_rows=20, options=CudaOptions(weights=weights, graphs=graphs))
        for graphs in (False, True)
    ]
    state = random_states(model, 20)
    for executor in executors:
        lease(executor, range(20), state)
    batches: tuple[tuple[int, ...], ...] = (
        (3, 4, 9),
        (0,),
        (1, 2, 5, 6, 7, 8, 10, 11, 12, 13),
        (3, 9, 11),
        (0,),
        (19,),
    )
    for rows in batches:
        ids = torch.randint(model.config.vocab_size, (len(rows),)).tolist()
        before = {name: value.clone() for name, value in executors[1].pool.tensors.items()}
        want, got = (executor.step(rows, ids) for executor in executors)
        others = [row for row in range(20) if row not in rows]
        is_unchanged = all(
            before[name][others].equal(value[others]) for name, value in executors[1].pool.tensors.items()
        )
        yield {"rows": len(rows), "bits_equal": got.equal(want), "others_kept": is_unchanged} | _ok(
            got.equal(want) and is_unchanged
        )
    pairs = zip(*(executor.pool.tensors.values() for executor in executors), strict=True)
    yield {"states_equal": (equal := all(a.equal(b) for a, b in pairs))} | _ok(equal)


@torch.inference_mode()
def check_invariance(model: NsmModel, options: CudaOptions, batches: Sequence[int] = BATCHES) -> Iterator[Row]:
    """A row's hidden vector, logits and state, alone and among others, in other rows of the pool: the same bits."""
    subject = random_states(model, 1, first=2000)
    ids = torch.randint(model.config.vocab_size, (4,)).tolist()
    alone: tuple[Tensor, Tensor, State] | None = None
    for batch in batches:
        executor = CudaExecutor(model, num_rows=batch, options=options)
        lease(executor, range(batch), random_states(model, batch))
        row = batch // 2
        executor.pool.write(row, subject)
        for token in ids:
            others = torch.randint(model.config.vocab_size, (batch,)).tolist()
            others[row] = token
            hidden = executor.step(range(batch), others)
        logits = executor.logits(hidden)[row].clone()
        result = (hidden[row].clone(), logits, executor.pool.copy(row))
        alone = alone or result
        equal = [result[0].equal(alone[0]), result[1].equal(alone[1])]
        equal.append(all(value.equal(alone[2][name]) for name, value in result[2].items()))
        yield {
            "batch": batch,
            "equal": dict(zip(("hidden", "logits", "state"), equal, strict=True)),
            "largest_difference": float((result[1] - alone[1]).abs().max()),
        } | _ok(all(equal))


@torch.inference_mode()
def check_prompts(
    model: NsmModel, options: CudaOptions, batches: Sequence[int] = BATCHES, *, length: int = 1500
) -> Iterator[Row]:
    """A prompt alone and at once, cut and beside others: its hidden vectors and its state have the same bits."""
    subject = random_states(model, 1, first=2000)
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    unit, draw = CudaExecutor.prompt_unit, random.Random(0)
    alone: tuple[Tensor, State] | None = None
    for batch in batches:
        executor = CudaExecutor(model, num_rows=batch, options=options)
        lease(executor, range(batch), random_states(model, batch))
        row, start, hidden = batch // 2, 0, []
        executor.pool.write(row, subject)
        while start < length:
            cut = length if batch == 1 else min(length, start + unit * draw.randint(1, 1 + length // unit // 3))
            texts = [[1] * draw.randint(1, max(1, cut - start)) for _ in range(batch)]
            texts[row] = ids[start:cut]
            hidden.append(executor.read(range(batch), texts)[row])
            start = cut
        result = (torch.cat(hidden), executor.pool.copy(row))
        alone = alone or result
        differing = [name for name, value in result[1].items() if not value.equal(alone[1][name])]
        same = int((result[0] == alone[0]).all(dim=1).sum())
        yield {
            "batch": batch,
            "calls": len(hidden),
            "same_tokens": same,
            "of": length,
            "other_states": differing,
        } | _ok(same == length and not differing)


def check_sampler(logits: Tensor) -> Iterator[Row]:
    """The device's choice against the host's, by wishes drawn at random; a row that is not finite."""
    draw = random.Random(0)
    rows = [
        SamplingRow(
            params=SamplingParams(
                temperature=draw.choice((0.0, 0.3, 1.0, 1.7)),
                top_p=draw.choice((1.0, 0.95, 0.5)),
                top_k=draw.choice((0, 0, 1, 40)),
                min_p=draw.choice((0.0, 0.05)),
                seed=draw.getrandbits(64),
                choice_index=draw.randrange(3),
            ),
            position=draw.getrandbits(30),
            generated_counts={},
        )
        for _ in range(logits.shape[0])
    ]
    want = [token.token_id for token in Sampler().sample(logits.cpu(), rows) if hasattr(token, "token_id")]
    got = sample_on_device(logits, rows)
    same = sum(a == b for a, b in zip(got, want, strict=True))
    broken = logits[:3].clone()
    broken[1, 5] = torch.nan
    is_found = [token is None for token in sample_on_device(broken, rows[:3])] == [False, True, False]
    # a draw within rounding of a border is possible, and rare
    yield {"rows": len(rows), "same": same, "nan_found": is_found} | _ok(same >= len(rows) - 1 and is_found)


def _ok(ok: bool) -> Row:
    return {"ok": bool(ok)}
