from __future__ import annotations

from nsm_core.model.nsm import NsmModel
from nsm_core.tokenizer import Tokenizer
from nsm_lab.evaluation.model_facts import STATE_POSITIONS, ModelFacts, megabytes, model_facts, state_bytes_after
from tests.nsm_lab.evaluation.models import small_config


def test_slots_have_one_size_and_caches_fill_up(tiny_tokenizer: Tokenizer) -> None:
    slots = NsmModel(small_config(tiny_tokenizer)).state_spec
    assert {state_bytes_after(slots, tokens) for tokens in (0, 10, 10**6)} == {slots.num_bytes}
    attention = NsmModel(small_config(tiny_tokenizer, layer_pattern="A", max_context=2048)).state_spec
    position, per_token = 8, 2 * 2 * 32 * 4  # layers, keys and values, width, bytes
    assert [state_bytes_after(attention, tokens) - position for tokens in (0, 1, 2048, 5000)] == [
        0,
        per_token,
        2048 * per_token,
        2048 * per_token,
    ]
    assert attention.num_bytes == position + 2048 * per_token


def test_facts_hold_the_config_and_a_size_for_each_position(tiny_tokenizer: Tokenizer) -> None:
    config = small_config(tiny_tokenizer)
    spec = NsmModel(config).state_spec
    facts = model_facts(config, spec)
    assert facts.config["num_memory_slots"] == 8
    assert facts.state_bytes == tuple((tokens, spec.num_bytes) for tokens in STATE_POSITIONS)
    assert facts.state_summary() == f"a state of {megabytes(spec.num_bytes)}"
    growing = ModelFacts(config={}, state_bytes=((1024, 1_500_000), (8192, 12_000_000)))
    assert growing.state_summary() == "a state of 1.5 MB after 1,024, 12 MB after 8,192 tokens"
