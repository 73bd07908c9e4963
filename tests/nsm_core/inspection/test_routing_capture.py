"""What is told of a token is what the layer computed: from the weights told, its output can be made again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsm_core.config import ModelConfig
from nsm_core.inspection.layer_hooks import HookedLayer, hookable_layers, hooked
from nsm_core.inspection.routing_capture import Capture, capture
from nsm_core.model.nsm import NsmModel
from nsm_core.model.segments import Segments
from nsm_core.ops.keyed_scan.reference import keyed_step
from nsm_core.state.spec import POSITION, State
from tests.support.models import random_model, small_config

WINDOW = 24


@dataclasses.dataclass
class Step:
    """One token of two rows, in the first layer."""

    layer: HookedLayer
    capture: Capture
    before: State
    after: State
    given_to_out: Tensor


def step_after(model: NsmModel, num_tokens: int) -> Step:
    """The token after `num_tokens` random ones."""
    ids = torch.randint(64, (2, num_tokens + 1), generator=torch.Generator().manual_seed(3))
    (layer, *_) = layers = hookable_layers(model)
    caught: list[Tensor] = []
    with torch.inference_mode():
        state = model.initial_state(2)
        if num_tokens:
            _, state = model(ids[:, :-1], state)
        handle = layer.mixer.out.register_forward_hook(lambda _module, inputs, _made: caught.append(inputs[0]))
        with hooked(layers):
            _, after = model.step(ids[:, -1], state)
        handle.remove()
        before = layer.state_of(state)
        seen = capture(layer, before, state[POSITION])
    assert seen is not None
    return Step(layer, seen, before, layer.state_of(after), caught[0].reshape(2, -1))


def gated_output(step: Step, read: Tensor) -> Tensor:
    """What goes into a mixer's last projection for read [B,H,K]."""
    mixer = step.layer.mixer
    gate = step.layer.outputs["project"].reshape(2, -1)[:, -read.shape[1] * read.shape[2] :]
    return F.rms_norm(read, read.shape[-1:], eps=mixer.eps).flatten(1) * mixer.out_norm * F.silu(gate)


@pytest.mark.parametrize("num_tokens", [0, 70])
@pytest.mark.parametrize(
    "changes",
    [
        {"router": "sigmoid", "write_top_k": 8},
        {"router": "softmax"},
        {"layer_pattern": "C", "communication_interval": 64},
        {"layer_pattern": "C", "upper_slots": 2},
        {"projector": "hybrid"},
        {"projector": "direct"},
        {"allocation": True, "start_slots": 4, "write_top_k": 2},
    ],
    ids=["sigmoid", "softmax", "communicating", "two-levels", "hybrid", "direct", "allocating"],
)
def test_weights_of_slots_give_the_layers_output(changes: dict[str, object], num_tokens: int) -> None:
    step = step_after(random_model(small_config(64, **changes)), num_tokens)
    write, read = step.capture.write, step.capture.read
    assert step.capture.kind == "slots"
    torch.testing.assert_close(read.sum(-1), torch.ones(2, 2))
    value = step.layer.outputs["conv"][-2][:, 0]
    values = torch.lerp(step.before["slots"][..., -16:], value[:, :, None].expand(2, 2, 8, 16), write[..., None])
    torch.testing.assert_close(values, step.after["slots"][..., -16:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gated_output(step, torch.einsum("bhm,bhmk->bhk", read, values)), step.given_to_out)


@pytest.mark.parametrize("num_tokens", [0, 70])
def test_weights_of_keyed_slots_are_the_share_that_a_slot_loses_and_the_squared_route(num_tokens: int) -> None:
    """Of a slot's own content the decay leaves a share, and the token removes its write from that."""
    step = step_after(random_model(small_config(64, layer_pattern="K")), num_tokens)
    write, read, mixer = step.capture.write, step.capture.read, step.layer.mixer
    assert step.capture.kind == "keyed"
    torch.testing.assert_close(read.sum(-1), torch.ones(2, 2))
    x = step.layer.inputs["project"].reshape(2, 1, -1)
    tokens, _, _ = mixer.tokens(x, step.before["conv_tail"], Segments(torch.tensor([[num_tokens]] * 2)))
    remaining = torch.empty_like(write)
    token = {name: value[:, 0] for name, value in tokens.items()} | {"v": torch.zeros(2, 2, 1)}
    for slot in range(write.shape[-1]):
        alone = F.one_hot(torch.tensor(slot), write.shape[-1]).float().expand(2, 2, -1)[..., None]
        _, after = keyed_step(**token, state=alone)
        remaining[..., slot] = after[..., slot, 0]
    torch.testing.assert_close(remaining, token["log_decay"].exp()[..., None] * (1 - write), rtol=1e-4, atol=1e-5)
    assert float(write.sum(-1).max()) <= 1
    assert torch.equal(mixer.shares(x, step.before["conv_tail"], torch.full((2,), num_tokens))[0], write)


@pytest.mark.parametrize("num_tokens", [0, 3, 8, 21])
@pytest.mark.parametrize("gate", ["gru", "lstm", "free"])
def test_weights_of_gated_slots_and_of_tokens_give_the_layers_output(gate: str, num_tokens: int) -> None:
    step = step_after(random_model(small_config(64, layer_pattern="G", gate=gate, gate_chunk=8)), num_tokens)
    read, seen = step.capture.read, step.capture.seen
    torch.testing.assert_close(read.sum(-1) + seen.sum(-1), torch.ones(2, 2))
    recent = step.after["recent"][..., 16:]  # the ring with the token in it, [B,C,H,K]
    row = (num_tokens - torch.arange(8)) % 8
    states = F.rms_norm(step.before["gated"], (16,), eps=step.layer.mixer.eps)
    out = torch.einsum("bhm,bhmk->bhk", read, states) + torch.einsum("bhc,bchk->bhk", seen, recent[:, row])
    torch.testing.assert_close(gated_output(step, out), step.given_to_out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 5, 24, 60])
def test_weights_of_attention_give_the_layers_output(num_tokens: int) -> None:
    step = step_after(random_model(small_config(64, layer_pattern="W", window=WINDOW)), num_tokens)
    assert step.capture.write is None
    assert step.capture.read is None
    ages = torch.arange(WINDOW)
    ring = step.after["kv"][:, :, 1, (num_tokens - ages) % WINDOW]  # values by age
    oldest = step.before["kv"][:, :, 1, num_tokens % WINDOW]  # the token has taken its place
    values = torch.cat((ring, oldest[:, :, None]), dim=2).repeat_interleave(2, dim=1)
    out = torch.einsum("bhw,bhwk->bhk", step.capture.seen, values).flatten(1)
    torch.testing.assert_close(out, step.given_to_out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 3, 7, 23])
def test_weights_of_a_memory_give_the_layers_output_and_what_it_writes(num_tokens: int) -> None:
    """Tokens 7 and 23 complete a chunk: with what the write heads erase and add there, the new rows are made again."""
    step = step_after(random_model(memory_config()), num_tokens)
    capture, mixer = step.capture, step.layer.mixer
    assert capture.kind == "memory"
    torch.testing.assert_close(capture.read.sum(-1), torch.ones(2, 2))
    assert torch.equal(capture.write[:, 0], capture.write[:, 1])
    torch.testing.assert_close(capture.usage, step.after["usage"])
    out = torch.einsum("bhr,brn->bhn", capture.read, step.before["memory"])
    torch.testing.assert_close(gated_output(step, out), step.given_to_out, rtol=1e-4, atol=1e-5)
    if (num_tokens + 1) % 8:
        assert not capture.write.any()
        return
    (summary,), (weight, _, _) = (step.layer.inputs["write"],), step.layer.extra_inputs["write"]
    normed = F.rms_norm(summary, (16,), eps=mixer.eps)
    controls = torch.einsum("bpn,pnc->bpc", normed, mixer.write.controls) + mixer.write.bias
    erase, candidate = controls[:, 0, 16:32].sigmoid(), controls[:, 0, 32:48].tanh()
    difference = capture.write[:, 0, :, None] * erase[:, None] * (candidate[:, None] - step.before["memory"])
    assert float(capture.write.max()) > 0.01
    assert bool((weight > 0).all())
    torch.testing.assert_close(step.before["memory"] + difference, step.after["memory"], rtol=1e-4, atol=1e-5)


def memory_config() -> ModelConfig:
    """With one write head: what several do in turn is not told one by one."""
    return small_config(64, layer_pattern="M", gate_chunk=8, memory_rows=12, memory_width=16, memory_heads=1)


def test_several_write_heads_are_told_as_one() -> None:
    """A row that all of them pass over keeps its numbers, and those that were addressed more moved."""
    config = dataclasses.replace(memory_config(), memory_heads=3)
    step = step_after(random_model(config), 15)
    difference = (step.after["memory"] - step.before["memory"]).norm(dim=-1)
    bound = step.capture.write[:, 0] * (step.before["memory"].norm(dim=-1) + 16**0.5)
    assert bool((difference <= bound + 1e-5).all())
    assert bool((step.capture.write > 0).any())


def test_a_recurrence_tells_how_far_each_channel_moved() -> None:
    step = step_after(random_model(small_config(64, layer_pattern="L")), 5)
    move = step.capture.write[:, 0]
    candidate = step.layer.outputs["project"].reshape(2, -1)[:, :32]
    torch.testing.assert_close((1 - move) * step.before["hidden"] + move * candidate, step.after["hidden"])


def test_a_step_that_was_watched_leaves_no_hooks() -> None:
    model = random_model(small_config(64, layer_pattern="(NW)"))
    step_after(model, 3)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("pattern", ["(NW)", "[NW]"])
def test_mixers_in_one_layer_have_numbers_of_their_own(pattern: str) -> None:
    model = random_model(small_config(64, layer_pattern=pattern))
    assert [layer.name for layer in hookable_layers(model)] == ["0.0", "0.1", "1.0", "1.1"]
