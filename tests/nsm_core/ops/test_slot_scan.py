"""The chunked scan and the single step against the token-by-token reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsm_core.ops.slot_scan.chunked import CHUNK_LEN, LOG_DECAY_MIN, slot_scan_chunked
from nsm_core.ops.slot_scan.dispatch import slot_scan
from nsm_core.ops.slot_scan.inputs import ScanInputs
from nsm_core.ops.slot_scan.reference import slot_scan_reference
from nsm_core.ops.slot_scan.step import slot_step
from tests.support.counts import scaled

HEADS, SLOTS, HEAD_DIM = 3, 16, 8
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}  # benchmarks/notes/model.md, "Tolerances"


def make_inputs(batch: int, num_tokens: int, dtype: torch.dtype, *, decay: str = "mixed") -> dict[str, Tensor]:
    q, k, v = torch.randn(3, batch, num_tokens, HEADS, HEAD_DIM, dtype=dtype).unbind(0)
    log_decay = LOG_DECAY_MIN * torch.rand(batch, num_tokens, HEADS, SLOTS, dtype=dtype) ** 4
    if decay == "worst":
        log_decay = torch.full_like(log_decay, LOG_DECAY_MIN)
    if decay == "none":
        log_decay = torch.zeros_like(log_decay)
    return {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": log_decay,
        "scale": torch.rand(HEADS, dtype=dtype) + 0.5,
        "state": torch.randn(batch, HEADS, SLOTS, 2 * HEAD_DIM, dtype=dtype),
    }


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    tolerance = TOLERANCE[want[0].dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 33, 63, 64, 65, 128, 333])
def test_R8_chunked_equals_reference(num_tokens: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(2, num_tokens, dtype)
    assert_same(slot_scan_chunked(ScanInputs(**inputs)), slot_scan_reference(ScanInputs(**inputs)))


@pytest.mark.parametrize("decay", ["worst", "none"])
def test_extreme_decays_stay_finite_and_exact(decay: str) -> None:
    inputs = make_inputs(2, 200, torch.float64, decay=decay)
    out, state = slot_scan_chunked(ScanInputs(**inputs))
    assert out.isfinite().all()
    assert state.isfinite().all()
    assert_same((out, state), slot_scan_reference(ScanInputs(**inputs)))


@settings(max_examples=scaled(15, 300))
@given(
    reset=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=3), seed=st.integers(0, 999)
)
def test_a_document_start_forgets_everything_before_it(reset: list[list[bool]], seed: int) -> None:
    torch.manual_seed(seed)
    inputs = make_inputs(len(reset), 3 * CHUNK_LEN, torch.float64)
    starts = {"reset": torch.tensor(reset), "initial": torch.randn(HEADS, SLOTS, 2 * HEAD_DIM, dtype=torch.float64)}
    got = slot_scan_chunked(ScanInputs(**inputs, **starts))
    assert_same(got, slot_scan_reference(ScanInputs(**inputs, **starts)))
    poisoned = {**inputs, "state": torch.full_like(inputs["state"], torch.nan)}
    out, state = slot_scan_chunked(ScanInputs(**poisoned, **starts))
    starts_at_once = starts["reset"][:, 0]
    assert out[starts_at_once].isfinite().all()
    assert state[starts_at_once].isfinite().all()


def test_chunks_read_tokens_in_bf16_beside_decays_in_fp32() -> None:
    torch.manual_seed(5)
    inputs = make_inputs(2, 70, torch.float32)
    halved = {name: inputs[name].bfloat16() for name in ("q", "k", "v")}
    widened = {name: value.float() for name, value in halved.items()}
    got, want = (slot_scan_chunked(ScanInputs(**{**inputs, **tokens})) for tokens in (halved, widened))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_step_equals_reference() -> None:
    inputs = make_inputs(4, 20, torch.float64)
    want, want_state = slot_scan_reference(ScanInputs(**inputs))
    state, outputs = inputs["state"], []
    for t in range(20):
        token = {name: inputs[name][:, t] for name in ("q", "k", "v")}
        write = -torch.expm1(inputs["log_decay"][:, t])
        out, state = slot_step(**token, write=write, scale=inputs["scale"], state=state)
        outputs.append(out)
    assert_same((torch.stack(outputs, dim=1), state), (want, want_state))


def test_gradients_equal_those_of_the_reference() -> None:
    names = ("q", "k", "v", "log_decay", "state")
    grads = []
    inputs = make_inputs(1, 100, torch.float64)
    for scan in (slot_scan_reference, slot_scan_chunked):
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        out, state = scan(ScanInputs(**leaves))
        (out.square().sum() + state.square().sum()).backward()
        grads.append([leaves[name].grad for name in names])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_tokens", [20, 150])
def test_implementations_agree_with_read_bias_and_inactive_slots(num_tokens: int) -> None:
    inputs = make_inputs(2, num_tokens, torch.float64)
    inputs["read_bias"] = torch.randn_like(inputs["log_decay"])
    inputs["active"] = torch.rand(2, HEADS, SLOTS) < 0.6
    want = slot_scan_reference(ScanInputs(**inputs))
    assert_same(slot_scan_chunked(ScanInputs(**inputs)), want)
    assert want[1][~inputs["active"]].equal(inputs["state"][~inputs["active"]])
    poisoned = inputs["state"].masked_fill(~inputs["active"][..., None], 1e6)
    assert slot_scan_reference(ScanInputs(**{**inputs, "state": poisoned}))[0].equal(want[0])
    everywhere = {**inputs, "active": inputs["active"][0]}
    assert_same(slot_scan_chunked(ScanInputs(**everywhere)), slot_scan_reference(ScanInputs(**everywhere)))


@pytest.mark.parametrize("num_tokens", [1, 40, 150])
def test_implementations_agree_without_keys(num_tokens: int) -> None:
    """Values alone, read by what a token says of the slots."""
    inputs = make_inputs(2, num_tokens, torch.float64)
    inputs["read_bias"] = torch.randn_like(inputs["log_decay"])
    inputs["state"] = inputs["state"][..., HEAD_DIM:]
    del inputs["q"], inputs["k"]
    want, want_state = slot_scan_reference(ScanInputs(**inputs))
    assert_same(slot_scan(ScanInputs(**inputs)), (want, want_state))
    # the same values as with keys that no query looks at
    blind = {**inputs, "state": torch.cat((torch.zeros_like(inputs["state"]), inputs["state"]), dim=-1)}
    blind["q"] = blind["k"] = torch.zeros_like(inputs["v"])
    keyed, keyed_state = slot_scan_reference(ScanInputs(**blind))
    assert_same((keyed, keyed_state[..., HEAD_DIM:]), (want, want_state))
    state, outputs = inputs["state"], []
    for t in range(num_tokens):
        token = {name: inputs[name][:, t] for name in ("v", "read_bias")}
        write = -torch.expm1(inputs["log_decay"][:, t])
        out, state = slot_step(**token, write=write, scale=inputs["scale"], state=state)
        outputs.append(out)
    assert_same((torch.stack(outputs, dim=1), state), (want, want_state))


def test_a_step_with_a_read_bias_equals_the_reference() -> None:
    inputs = make_inputs(3, 1, torch.float64)
    inputs["read_bias"] = torch.randn_like(inputs["log_decay"])
    want, want_state = slot_scan_reference(ScanInputs(**inputs))
    token = {name: inputs[name][:, 0] for name in ("q", "k", "v", "read_bias")}
    write = -torch.expm1(inputs["log_decay"][:, 0])
    out, state = slot_step(**token, write=write, scale=inputs["scale"], state=inputs["state"])
    assert_same((out[:, None], state), (want, want_state))


def test_scan_without_reads_is_refused() -> None:
    inputs = make_inputs(1, 3, torch.float64)
    for missing in (("q",), ("q", "k")):
        with pytest.raises(ValueError, match="slots are read by q and k, by a read_bias, or by both"):
            slot_scan(ScanInputs(**{name: value for name, value in inputs.items() if name not in missing}))


def test_sequences_end_to_end_are_sequences_alone() -> None:
    lengths = [1, 64, 0, 65, 70]
    inputs = make_inputs(1, 200, torch.float64)
    inputs["state"] = torch.randn(5, *inputs["state"].shape[1:], dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    want, want_state = slot_scan_reference(ScanInputs(**inputs, cu_seqlens=cu_seqlens))
    assert_same(slot_scan(ScanInputs(**inputs, cu_seqlens=cu_seqlens)), (want, want_state))
    tokens = {name: inputs[name][:, -70:] for name in ("q", "k", "v", "log_decay")}
    last, last_state = slot_scan_reference(ScanInputs(**tokens, scale=inputs["scale"], state=inputs["state"][4:]))
    assert_same((last, last_state), (want[:, -70:], want_state[4:]))
    assert want_state[2].equal(inputs["state"][2])


def test_sequences_exclude_resets_and_several_rows() -> None:
    inputs = make_inputs(2, 64, torch.float64)
    with pytest.raises(ValueError, match="one row and no reset"):
        slot_scan(ScanInputs(**inputs, cu_seqlens=torch.tensor([0, 64])))


def test_full_overwrite_of_slots_in_turn_is_sliding_window_attention() -> None:
    """The state can hold the key-value cache of M tokens: one-hot writes of weight 1 make the read exact attention."""
    num_tokens = 3 * SLOTS
    inputs = make_inputs(1, num_tokens, torch.float64)
    one_hot = torch.eye(SLOTS, dtype=torch.float64).repeat(3, 1)[None, :, None, :].expand(1, -1, HEADS, -1)
    inputs["log_decay"] = torch.where(one_hot > 0, -torch.inf, 0.0)
    out, _ = slot_scan_reference(ScanInputs(**inputs))
    t = num_tokens - 1
    window = slice(t - SLOTS + 1, t + 1)
    logits = torch.einsum("hk,thk->ht", inputs["q"][0, t], inputs["k"][0, window]) * inputs["scale"][:, None]
    want = torch.einsum("ht,thk->hk", logits.softmax(-1), inputs["v"][0, window])
    torch.testing.assert_close(out[0, t], want)
