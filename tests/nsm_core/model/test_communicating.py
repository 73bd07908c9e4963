"""Slots that exchange what they hold: when, how much, and what stays true of them."""

from __future__ import annotations

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.errors import ConfigError
from nsm_core.model.boundaries import pieces
from nsm_core.model.communicating import CommunicatingMixer, Communication
from nsm_core.model.segments import Segments, token_positions

SHAPE = {"d_model": 16, "num_heads": 2, "num_memory_slots": 8, "write_top_k": 3, "communication_interval": 64}


def make_mixer(top_k: int = 0, **fields: object) -> CommunicatingMixer:
    torch.manual_seed(5)
    fields = {**SHAPE, "layer_pattern": "C", "communication_top_k": top_k, **fields}
    mixer = CommunicatingMixer(ModelConfig.from_dict(fields))
    mixer.initial_slots.data.normal_()
    return mixer.requires_grad_(False)


@pytest.mark.parametrize("top_k", [0, 3])
def test_an_exchange_happens_after_every_interval_and_nowhere_else(top_k: int) -> None:
    """Positions 63 and 127 end an interval: the layer equals the plain one with the exchange by hand there."""
    mixer, x = make_mixer(top_k), torch.randn(1, 150, 16)
    out, state = mixer(x, mixer.initial_state(1), Segments(torch.arange(150)[None]))
    by_hand, pieces = mixer.initial_state(1), []
    for start, end in ((0, 64), (64, 128), (128, 150)):
        plain = super(CommunicatingMixer, mixer)
        mixer.interval = 10**6
        piece, by_hand = plain.forward(x[:, start:end], by_hand, Segments(torch.arange(start, end)[None]))
        mixer.interval = 64
        if end < 150:
            by_hand["slots"] = mixer.communication(by_hand["slots"])
        pieces.append(piece)
    torch.testing.assert_close(out, torch.cat(pieces, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["slots"], by_hand["slots"], rtol=1e-4, atol=1e-5)


def test_communication_keeps_slots_in_their_hull() -> None:
    mixer = make_mixer()
    slots = torch.randn(3, 2, 8, 16)
    mixed = mixer.communication(slots)
    assert (mixed <= slots.amax(dim=2, keepdim=True) + 1e-6).all()
    assert (mixed >= slots.amin(dim=2, keepdim=True) - 1e-6).all()


def test_a_sparse_exchange_has_few_partners_and_is_continuous() -> None:
    exchange: Communication = make_mixer(top_k=3).communication
    slots = torch.randn(50, 2, 8, 16)
    weights = exchange.weights(slots)
    assert ((weights > 0).sum(-1) <= 3).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, 2, 8))
    assert (weights - exchange.weights(slots * (1 + 1e-6))).abs().max() < 1e-4


def read(mixer: CommunicatingMixer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and slots after x [T,d], from the start of a text."""
    out, state = mixer(x[None], mixer.initial_state(1), Segments(torch.arange(len(x))[None]))
    return out[0], state["slots"][0]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_upper_level_changes_in_exchanges_alone(router: str, top_k: int) -> None:
    mixer = make_mixer(top_k, upper_slots=3, router=router, write_top_k=8 if router == "sigmoid" else 3)
    x, start = torch.randn(150, 16), mixer.initial_slots
    for length, is_changed in ((1, False), (63, False), (64, True), (127, True)):
        _, slots = read(mixer, x[:length])
        assert torch.equal(slots[:, 5:], start[:, 5:]) != is_changed
        assert not torch.equal(slots[:, :5], start[:, :5])
    assert torch.equal(read(mixer, x[:64])[1][:, 5:], read(mixer, x[:127])[1][:, 5:])  # nothing between the two
    assert not torch.equal(read(mixer, x[:128])[1][:, 5:], slots[:, 5:])


def test_the_upper_level_takes_from_the_lower_and_tokens_read_both() -> None:
    mixer = make_mixer(upper_slots=3)
    weights = mixer.communication.weights(torch.randn(2, 2, 8, 16))
    assert not weights[..., 5:, 5:].any()
    assert (weights[..., :5] > 0).all()
    assert (weights[..., :5, 5:] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 8))
    mixer.out.weight.normal_()
    x = torch.randn(20, 16)
    before, _ = read(mixer, x)
    mixer.initial_slots[:, 5:, 8:] += 1.0
    assert not torch.allclose(read(mixer, x)[0], before)


def test_each_level_replaces_its_own_share() -> None:
    mixer = make_mixer(upper_slots=3)
    mixer.communication.upper_share.fill_(-100.0)
    slots = torch.randn(2, 2, 8, 16)
    after = mixer.communication(slots)
    assert torch.equal(after[:, :, 5:], slots[:, :, 5:])
    assert not torch.isclose(after[:, :, :5], slots[:, :, :5]).any(dim=-1).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"communication_interval": 100}, "multiple of 64, got 100"),
        ({"communication_top_k": 9}, r"0 \(all\) to .*8"),
        ({"upper_slots": 8}, r"upper_slots must be 0 to num_memory_slots - 1 \(7\), got 8"),
        ({"upper_slots": 2, "layer_pattern": "N"}, "upper_slots are of C layers, got 'N'"),
        ({"upper_slots": 6}, r"write_top_k \(3\) must be at most num_memory_slots - upper_slots \(2\)"),
        ({"upper_slots": 2, "communication_top_k": 6}, "must be below num_memory_slots - upper_slots"),
        ({"upper_slots": 3, "timescale_groups": 2}, r"num_memory_slots - upper_slots \(5\) must be a multiple"),
        ({"upper_slots": 2, "allocation": True}, "cannot be had with allocation or state_tiers"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict({"layer_pattern": "C", **SHAPE, **wrong})


@pytest.mark.parametrize("upper_slots", [0, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_stretches_together_equal_stretches_one_after_the_other(is_packed: bool, upper_slots: int) -> None:
    """Rows at different places of their texts, padded; or packed, with texts that start within a row."""
    mixer = make_mixer(upper_slots=upper_slots, communication_interval=128).requires_grad_(True)
    x, start = torch.randn(2, 640, 16), torch.tensor([64, 128 if is_packed else 70])
    lengths = None if is_packed else torch.tensor([640, 400])
    reset = None
    if is_packed:
        reset = torch.zeros(2, 10, dtype=torch.bool)
        reset[0, 3] = reset[1, 0] = reset[1, 7] = reset[1, 8] = True
    positions = token_positions(start, 640, reset)
    valid = None if lengths is None else torch.arange(640) < lengths[:, None]
    segments = Segments(positions, lengths, valid, reset)
    found = []
    for is_together in (True, False):
        mixer.zero_grad()
        tokens, _, _ = mixer._tokens(x, mixer.initial_state(2)["conv_tail"], reset, lengths)
        tokens["log_decay"] = mixer._route(x, valid)
        slots = mixer.initial_state(2)["slots"]
        if is_together:
            read, slots = mixer._scan(tokens, slots, segments)
        else:
            reads = []
            for piece in pieces(segments, mixer.interval):
                own = {name: value[:, piece.tokens] for name, value in tokens.items()}
                part, slots = mixer._scan_piece(own, slots, piece)
                reads.append(part)
            read = torch.cat(reads, dim=1)
        (read.square().sum() + slots.square().sum()).backward()
        gradients = {name: weight.grad.clone() for name, weight in mixer.named_parameters() if weight.grad is not None}
        found.append((read.detach() if valid is None else read.detach()[valid], slots.detach(), gradients))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
