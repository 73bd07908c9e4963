"""Gated layers against their equations token by token, and what their gates can do that the linear one cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.config import GATES, ModelConfig
from nsm_core.model.gated import GatedMixer
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.ops.short_conv.reference import short_conv_reference
from nsm_core.state.spec import State
from tests.support.gradients import require_every_gradient

SHAPE = {"d_model": 16, "num_heads": 2, "num_memory_slots": 8, "write_top_k": 3, "num_layers": 1, "mlp_hidden": 32}


def make_mixer(gate: str, chunk: int) -> GatedMixer:
    torch.manual_seed(3)
    mixer = GatedMixer(ModelConfig(layer_pattern="G", gate=gate, gate_chunk=chunk, **SHAPE)).requires_grad_(False)
    mixer.out.weight.normal_(std=0.25)
    mixer.log_scale.normal_()
    return mixer


def read_token_by_token(mixer: GatedMixer, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T,d] from the start of a text: outputs [T,d] and the slots [H,M,K] after it, straight from the equations."""
    width, head_dim, chunk = x.shape[-1], mixer.head_dim, mixer.chunk
    qkv, z = mixer.project(x[None]).split((3 * width, width), dim=-1)
    tail = torch.zeros(1, *mixer.state_shapes()["conv_tail"])
    q, k, v, _ = short_conv_reference(
        qkv=qkv, weight=mixer.conv.weight, tail=tail, num_heads=mixer.heads, eps=mixer.eps, reset=None, lengths=None
    )
    weights = -mixer.router(x)  # [T,H,M]
    slots, cells = mixer.initial_slots.clone(), torch.zeros_like(mixer.initial_slots)
    sums, totals = torch.zeros_like(slots), torch.zeros(slots.shape[:2])
    outputs = []
    for t in range(len(x)):
        near = slice(max(0, t - chunk + 1), t + 1)
        normed = F.rms_norm(slots, (head_dim,), eps=mixer.eps)
        slot_keys = F.rms_norm(normed @ mixer.slot_keys, (head_dim,), eps=mixer.eps)
        read = []
        for h in range(mixer.heads):
            keys, values = torch.cat((k[0, near, h], slot_keys[h])), torch.cat((v[0, near, h], normed[h]))
            read.append((mixer.scale[h] * keys @ q[0, t, h]).softmax(0) @ values)
        normed_read = F.rms_norm(torch.stack(read), (head_dim,), eps=mixer.eps).flatten() * mixer.out_norm
        outputs.append(mixer.out(normed_read * F.silu(z[0, t])))
        sums += weights[t][..., None] * v[0, t][:, None, :]
        totals += weights[t]
        if (t + 1) % chunk == 0:
            coverage = 1.0 - torch.exp(-totals[..., None])
            slots, cells = mixer.gate(sums / (totals[..., None] + 1e-6), coverage, slots, cells)
            sums, totals = torch.zeros_like(sums), torch.zeros_like(totals)
    return torch.stack(outputs), slots


def run(mixer: GatedMixer, x: Tensor, state: State, start: int) -> tuple[Tensor, State]:
    return mixer(x[None], state, Segments(torch.arange(start, start + len(x))[None]))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_R8_chunks_equal_the_equations_token_by_token(gate: str, chunk: int) -> None:
    mixer, x = make_mixer(gate, chunk), torch.randn(45, 16)
    want, want_slots = read_token_by_token(mixer, x)
    first, state = run(mixer, x[:19], mixer.initial_state(1), 0)
    second, state = run(mixer, x[19:], state, 19)
    torch.testing.assert_close(torch.cat((first, second), 1)[0], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["gated"][0], want_slots, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", GATES)
def test_unrouted_slot_keeps_its_bits(gate: str) -> None:
    mixer, x = make_mixer(gate, 2), torch.randn(2, 16)  # two tokens write to three of eight slots each
    _, state = run(mixer, x, mixer.initial_state(1), 0)
    untouched = (mixer.router(x) == 0).all(dim=0)
    assert untouched.any()
    assert not untouched.all()
    before = mixer.initial_state(1)
    assert torch.equal(state["gated"][0][untouched], before["gated"][0][untouched])
    assert not torch.equal(state["gated"], before["gated"])


@pytest.mark.parametrize("gate", GATES)
def test_every_weight_gets_a_finite_gradient(gate: str) -> None:
    torch.manual_seed(0)
    model = NsmModel(ModelConfig(layer_pattern="G", gate=gate, gate_chunk=8, vocab_size=50, **SHAPE))
    require_every_gradient(model)


def parity_accuracy(**kind: object) -> float:
    """Of a one-layer model, trained on strings of 2 to 14 bits, on strings of 32: is the number of ones odd so far?"""
    torch.manual_seed(0)
    shape = {"d_model": 32, "num_heads": 2, "num_memory_slots": 2, "write_top_k": 2, "mlp_hidden": 32}
    config = ModelConfig.from_dict({"vocab_size": 4, "num_layers": 1, "router": "sigmoid", **shape, **kind})
    model = NsmModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def logits(bits: Tensor) -> Tensor:
        return model.logits(model(bits, model.initial_state(len(bits)))[0])[..., :2]

    for step in range(150):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 50)
        bits = torch.randint(2, (64, 2 + step * 12 // 149))
        loss = F.cross_entropy(logits(bits).flatten(0, 1), (bits.cumsum(1) % 2).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    bits = torch.randint(2, (128, 32))
    with torch.no_grad():
        return float((logits(bits).argmax(-1) == bits.cumsum(1) % 2).float().mean())


def test_a_gru_gate_counts_parity_and_the_linear_gate_cannot() -> None:
    """Finite-state tracking needs a recurrence that is not linear in the state, at every token."""
    assert parity_accuracy(layer_pattern="G", gate="gru", gate_chunk=1) > 0.95
    assert parity_accuracy(layer_pattern="N") < 0.75
