"""The memory layer against its equations token by token, and what stays true of its rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.model.memory import MemoryMixer, Rows
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.state.spec import State
from tests.support.gradients import require_every_gradient

SHAPE = {"d_model": 16, "num_heads": 2, "num_memory_slots": 8, "write_top_k": 3, "mlp_hidden": 32, "num_layers": 1}
ROWS, WIDTH = 6, 8


def make_mixer(chunk: int, heads: int = 2) -> MemoryMixer:
    torch.manual_seed(3)
    fields = {"layer_pattern": "M", "memory_rows": ROWS, "memory_width": WIDTH, "memory_heads": heads}
    mixer = MemoryMixer(ModelConfig.from_dict({**SHAPE, **fields, "gate_chunk": chunk})).requires_grad_(False)
    mixer.out.weight.normal_(std=0.25)
    mixer.log_strength.normal_()
    mixer.count.weight.normal_()
    return mixer


def run(mixer: MemoryMixer, x: Tensor, state: State, start: int = 0) -> tuple[Tensor, State]:
    return mixer(x[None], state, Segments(torch.arange(start, start + len(x))[None]))


def read_token_by_token(mixer: MemoryMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T,d]: outputs, memory and usage at the end, straight from the equations."""
    memory, usage = mixer.initial_memory.clone(), torch.zeros(ROWS)
    sums, weights = torch.zeros(mixer.write_heads, WIDTH), torch.zeros(mixer.write_heads)
    outputs, writes = [], 0
    for t, token in enumerate(x):
        queries, said, gate = mixer.project(token).split(mixer.parts)
        read = []
        for query, strength in zip(queries.view(-1, WIDTH), mixer.log_strength.exp(), strict=True):
            read.append((strength * F.cosine_similarity(query[None], memory)).softmax(0) @ memory)
        normed = F.rms_norm(torch.stack(read), (WIDTH,), eps=mixer.eps).flatten() * mixer.out_norm
        outputs.append(mixer.out(normed * F.silu(gate)))
        count = torch.sigmoid(mixer.count(token))
        sums += count[:, None] * said.view(-1, WIDTH)
        weights += count
        if (t + 1) % mixer.chunk:
            continue
        for head in range(mixer.write_heads):
            summary = F.rms_norm(sums[head] / (weights[head] + 1e-6), (WIDTH,), eps=mixer.eps)
            key, erase, candidate, rest = (summary @ mixer.write.controls[head] + mixer.write.bias[head]).split(
                [WIDTH, WIDTH, WIDTH, 3]
            )
            content = ((1 + F.softplus(rest[0])) * F.cosine_similarity(key[None], memory)).softmax(0)
            allocated, left = torch.zeros(ROWS), 1.0
            for shift in range(ROWS):
                row = (writes + shift) % ROWS
                allocated[row] = left * (1 - usage[row])
                left = left * float(usage[row])
            share = torch.sigmoid(rest[2])
            address = (1 - torch.exp(-weights[head])) * torch.sigmoid(rest[1])
            address = address * (share * content + (1 - share) * allocated)
            erase = torch.sigmoid(erase)
            added = erase * torch.tanh(candidate)
            memory = memory * (1 - address[:, None] * erase) + address[:, None] * added
            usage = usage + address - usage * address
            writes += 1
        usage *= mixer.write.decay
        sums, weights = torch.zeros_like(sums), torch.zeros_like(weights)
    return torch.stack(outputs), memory, usage


@pytest.mark.parametrize(("chunk", "heads"), [(1, 1), (4, 2), (32, 3)])
def test_R8_chunks_equal_the_equations_token_by_token(chunk: int, heads: int) -> None:
    mixer, x = make_mixer(chunk, heads), torch.randn(75, 16)
    want, memory, usage = read_token_by_token(mixer, x)
    first, state = run(mixer, x[:31], mixer.initial_state(1))
    second, state = run(mixer, x[31:], state, 31)
    torch.testing.assert_close(torch.cat((first, second), 1)[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["memory"][0], memory, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["usage"][0], usage, rtol=1e-4, atol=1e-5)


def test_free_rows_are_taken_in_turn_and_rows_in_use_are_passed_over() -> None:
    write = make_mixer(8).write
    turn = torch.tensor([0, 4, 11])
    free = write.allocation(torch.zeros(3, ROWS), turn)
    assert torch.equal(free, F.one_hot(turn % ROWS, ROWS).float())
    used = torch.zeros(3, ROWS)
    used[:, 4], used[:, 5] = 1.0, 0.75
    taken = write.allocation(used, turn)
    assert torch.equal(taken[0], free[0])  # its turn is that of a free row
    assert taken[1].tolist() == [0.75, 0, 0, 0, 0, 0.25]  # row 4 is in use, row 5 mostly
    assert taken[2].tolist() == [0.75, 0, 0, 0, 0, 0.25]
    assert not write.allocation(torch.ones(1, ROWS), torch.tensor([1])).any()


def test_rows_stay_between_their_start_and_one_however_long_the_text() -> None:
    """Erase and add have one gate: numbers of a state may not grow with its age."""
    mixer, state = make_mixer(1), make_mixer(1).initial_state(1)
    mixer.write.bias[:, 2 * WIDTH : 3 * WIDTH] = 50.0  # what is written is 1 everywhere
    for start in range(0, 600, 200):
        _, state = run(mixer, torch.randn(200, 16), state, start)
    assert (state["memory"] <= mixer.initial_memory.max().clamp(min=1.0) + 1e-6).all()
    assert ((state["usage"] >= 0) & (state["usage"] <= 1)).all()


def test_rounding_does_not_grow_over_hundreds_of_writes() -> None:
    """Two readings 1e-6 apart stay about that far apart: no choice between rows hangs on their last bits."""
    mixer, x = make_mixer(2).double(), torch.randn(1200, 16, dtype=torch.float64)
    start = {name: value.double() for name, value in mixer.initial_state(1).items()}
    perturbed = {name: value + 1e-6 * torch.rand_like(value) for name, value in start.items()}
    (want, _), (got, _) = run(mixer, x, start), run(mixer, x, perturbed)
    assert (got - want)[0, -200:].abs().max() < 1e-5


def test_token_of_weight_zero_writes_no_memory() -> None:
    write = make_mixer(8).write
    rows = Rows(torch.randn(2, ROWS, WIDTH), torch.rand(2, ROWS))
    weight = torch.zeros(2, 2)
    after = write(torch.zeros(2, 2, WIDTH), weight, torch.zeros(2, dtype=torch.int64), rows)
    assert torch.equal(after.memory, rows.memory)


def test_every_weight_gets_a_finite_gradient() -> None:
    torch.manual_seed(0)
    model = NsmModel(ModelConfig.from_dict({**SHAPE, "layer_pattern": "M", "gate_chunk": 8, "vocab_size": 50}))
    require_every_gradient(model)
