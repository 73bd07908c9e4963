"""How slots are used: what is measured, the penalties, and the rescue of slots that nothing chooses."""

from __future__ import annotations

import math

import pytest
import torch

from nsm_core.config import ModelConfig
from nsm_core.model.balance import balance_loss, slot_use, token_mean, weighted
from nsm_core.model.router import Router, build_router

HEADS, SLOTS, TOP_K = 2, 8, 2


def make_router(kind: str = "softmax") -> Router:
    torch.manual_seed(4)
    top_k = SLOTS if kind == "sigmoid" else TOP_K
    return build_router(
        ModelConfig(d_model=16, num_heads=HEADS, num_memory_slots=SLOTS, write_top_k=top_k, router=kind)
    ).train()


def test_padding_is_not_counted() -> None:
    x, valid = torch.randn(2, 5, HEADS, SLOTS), torch.rand(2, 5) < 0.5
    torch.testing.assert_close(token_mean(x, valid), x[valid].mean(dim=0))
    torch.testing.assert_close(token_mean(x, None), x.mean(dim=(0, 1)))
    assert not token_mean(x, torch.zeros(2, 5, dtype=torch.bool)).any()


def test_the_balance_penalty_is_one_when_slots_are_alike_and_their_number_when_one_takes_all() -> None:
    alike, one = torch.full((HEADS, SLOTS), 0.25), torch.zeros(HEADS, SLOTS)
    one[:, 3] = 1.0
    assert float(balance_loss(alike, alike)) == pytest.approx(1.0)
    assert float(balance_loss(one, one)) == pytest.approx(SLOTS)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_penalties_have_gradients(kind: str) -> None:
    router, x = make_router(kind), torch.randn(3, 40, 16)
    with torch.no_grad():
        router.logits.bias.view(HEADS, SLOTS)[:, 0] += 4.0  # one slot is the favourite
    router.has_penalties = True
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    history = []
    for _ in range(30):
        router.penalties.clear()
        router(x)
        (penalty,) = router.penalties
        history.append((penalty.balance.item(), penalty.z.item()))
        optimizer.zero_grad()
        weighted([penalty], 1.0, 0.1).backward()
        optimizer.step()
    assert history[-1][0] < history[0][0]
    assert history[-1][1] < history[0][1]


def test_without_coefficients_or_outside_training_no_penalty_is_computed() -> None:
    router, x = make_router(), torch.randn(1, 10, 16)
    router(x)
    router.has_penalties = True
    router.eval()(x)
    assert router.penalties == []
    assert weighted([], 1.0, 1.0) == 0.0


def test_measured_use_is_that_of_the_router() -> None:
    router, x, valid = make_router(), torch.randn(3, 40, 16), torch.rand(3, 40) < 0.7
    log_decay = router(x, valid)[valid].detach()
    load, written, decay = router.take_use()
    torch.testing.assert_close(load, (log_decay < 0).float().mean(dim=0))
    torch.testing.assert_close(written, -torch.expm1(log_decay).mean(dim=0))
    torch.testing.assert_close(decay, log_decay.mean(dim=0))
    assert router.take_use() is None
    router.eval()(x)
    assert router.take_use() is None


def test_slot_use_in_numbers() -> None:
    load = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    use = slot_use([torch.stack((load, 0.1 * load, torch.full_like(load, -math.log(2.0) / 20)))])
    assert use is not None
    assert use.dead_slots == 0.25
    assert use.effective_slots == pytest.approx(3.0)  # two of four, and four of four
    assert use.max_load == pytest.approx(1.5)
    assert use.slots_written == pytest.approx(0.1)
    assert use.half_life == pytest.approx(20.0)
    assert slot_use([]) is None


def test_slot_use_of_routers_with_other_numbers_of_slots() -> None:
    """As two levels beside plain slots have them: tokens do not write to the upper level."""
    uses = [torch.stack((load, 0.1 * load, -load)) for load in (torch.ones(2, 8), torch.ones(2, 4))]
    use = slot_use(uses)
    assert use is not None
    assert use.effective_slots == pytest.approx(6.0)
    assert use.slots_written == pytest.approx(0.6)
    assert use.half_life == pytest.approx(math.log(2.0))


def test_unused_slot_is_raised_until_it_is_chosen() -> None:
    router, x = make_router(), torch.randn(4, 64, 16)
    with torch.no_grad():
        router.logits.bias.view(HEADS, SLOTS)[:, 5] -= 6.0
        router.logits.bias.view(HEADS, SLOTS)[:, 2] += 6.0  # and one that everything chooses
    for _ in range(400):
        router(x)
        router.rescue_dead_slots(rate=0.05)
    router.take_use()
    router(x)
    load, _, _ = router.take_use()
    assert (load[:, 5] > 0).all()
    assert (load[:, 2] < 1.0).all()
    bias = router.selection_bias
    assert (bias[:, 5] > 0).all()
    assert (bias[:, 2] < 0).all()


def test_the_selection_bias_never_weighs() -> None:
    """Raised alike, no slot is chosen or weighed otherwise; it only decides who is chosen."""
    router, x = make_router().eval(), torch.randn(1, 30, 16)
    before = router(x)
    router.selection_bias += 3.0
    torch.testing.assert_close(router(x), before, rtol=1e-4, atol=1e-5)


def test_X25_slot_use_of_routers_with_different_numbers_of_slots_is_the_mean_over_their_heads() -> None:
    generator = torch.Generator().manual_seed(2)
    small, large = (torch.rand(3, HEADS, slots, generator=generator) + 0.1 for slots in (4, 8))
    for use in (small, large):
        use[2].neg_()  # log decays
    both, one, other = slot_use([small, large]), slot_use([small]), slot_use([large])
    assert both is not None
    assert one is not None
    assert other is not None
    for name in ("effective_slots", "max_load", "slots_written"):
        assert getattr(both, name) == pytest.approx((getattr(one, name) + getattr(other, name)) / 2)
    assert min(one.half_life, other.half_life) <= both.half_life <= max(one.half_life, other.half_life)
