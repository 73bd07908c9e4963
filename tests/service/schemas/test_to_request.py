"""Each generation body becomes one RequestSpec within the server's limits."""

from __future__ import annotations

from typing import Any

import pytest

from nsm_core.chat_template import get_template
from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import SamplingParams
from service.schemas.chat import ChatBody, core_messages
from service.schemas.common import Limits, RequestSpec
from service.schemas.completions import CompletionBody
from service.schemas.responses import CreateResponseBody
from service.schemas.sessions import GenerateBody

LIMITS = Limits(max_tokens=100, max_choices=8, vocab_size=50, timeout_s=60.0)
TEMPLATE = get_template("plain-v1")
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def completion(**fields: Any) -> RequestSpec:
    return CompletionBody(seed=1, **fields).to_request(LIMITS)


def test_completion_of_a_batch_has_all_prompts_and_choices() -> None:
    spec = completion(prompt=["a", "b"], n=2, max_tokens=5, temperature=0.5, timeout=3.0, include_routing=True)
    assert spec == RequestSpec(
        prompts=("a", "b"),
        n=2,
        sampling=SamplingParams(max_tokens=5, temperature=0.5, seed=1),
        timeout_s=3.0,
        include_routing=True,
    )
    assert spec.max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ("a",)), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))], ids=str
)
def test_prompt_of_ids_is_one_prompt_and_a_list_of_lists_is_several(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_echo_without_new_tokens_scores_the_prompt_only() -> None:
    spec = completion(prompt="a", echo=True, max_tokens=0)
    assert (spec.is_score_only, spec.max_tokens, spec.sampling.max_tokens, spec.prompt_logprobs) == (True, 0, 1, 0)
    scored = completion(prompt="a", echo=True, max_tokens=2, logprobs=3)
    assert (scored.is_score_only, scored.max_tokens, scored.prompt_logprobs) == (False, 2, 3)
    assert completion(prompt="a", logprobs=3).prompt_logprobs is None


def test_chat_prompt_is_rendered_and_has_the_stops_of_its_template() -> None:
    body = ChatBody(messages=[{"role": "user", "content": "Hello"}], seed=1, stop="x", max_completion_tokens=7)  # type: ignore[list-item]
    spec = body.to_request(LIMITS, TEMPLATE)
    assert spec.prompts == (TEMPLATE.render(core_messages(body.messages, TEMPLATE)),)
    assert (spec.sampling.stop, spec.max_tokens, spec.timeout_s) == (("x", *TEMPLATE.stop), 7, 60.0)


def test_16_stops_of_a_client_are_taken_beside_those_of_a_template() -> None:
    stop = [f"x{number}" for number in range(17)]
    assert TEMPLATE.stop
    for body in (ChatBody(**HELLO, stop=stop[:16]), CreateResponseBody(input="Hello", stop=stop[:16])):  # type: ignore[arg-type]
        assert body.to_request(LIMITS, TEMPLATE).sampling.stop == (*stop[:16], *TEMPLATE.stop)
    for body in (ChatBody(**HELLO, stop=stop), CreateResponseBody(input="Hello", stop=stop)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="at most 16 strings, got 17"):
            body.to_request(LIMITS, TEMPLATE)


def test_default_max_tokens_of_a_chat_is_within_the_limit() -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    assert ChatBody(messages=messages).to_request(LIMITS, TEMPLATE).max_tokens == LIMITS.max_tokens
    assert CreateResponseBody(input="Hello").to_request(LIMITS, TEMPLATE).max_tokens == LIMITS.max_tokens


def test_turn_has_its_input_as_the_only_prompt_and_a_response_has_none() -> None:
    assert GenerateBody(input=[1, 2]).to_request(LIMITS, TEMPLATE).prompts == ([1, 2],)
    assert CreateResponseBody(input="Hello").to_request(LIMITS, TEMPLATE).prompts == ()


def test_absent_seed_is_drawn_for_each_request() -> None:
    body = GenerateBody(input="a")
    assert body.to_request(LIMITS, TEMPLATE).sampling.seed != body.to_request(LIMITS, TEMPLATE).sampling.seed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt"),
        ({"prompt": "a", "max_tokens": 101}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logit_bias": {"50": 1.0}}, "logit_bias"),
        ({"prompt": "a", "stop_token_ids": [50]}, "stop_token_ids"),
        ({"prompt": "a", "temperature": 3.0}, "temperature"),
    ],
    ids=str,
)
def test_body_above_a_limit_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("body", "prompt"),
    [(CompletionBody, {"prompt": "x"}), (GenerateBody, {"input": "x"}), (ChatBody, HELLO)],
)
def test_both_names_of_the_length_mean_the_same_everywhere(body: Any, prompt: dict[str, Any]) -> None:
    template = () if body is CompletionBody else (TEMPLATE,)
    for fields in ({"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        assert body(**prompt, **fields).to_request(LIMITS, *template).max_tokens == 7
    with pytest.raises(InvalidRequest, match="differ"):
        body(**prompt, max_tokens=7, max_completion_tokens=8)
    with pytest.raises(InvalidRequest) as refusal:
        body(**prompt, max_completion_tokens=-1).to_request(LIMITS, *template)
    assert refusal.value.param == "max_completion_tokens"
