"""One session's words never move another session's probabilities."""

from __future__ import annotations

import pytest
import torch

from nsm_core.engine.request import GenerationRequest
from nsm_core.tokenizer import Tokenizer
from tests.nsm_core.engine.harness import (
    Outcome,
    make_engine,
    make_request,
    random_ids,
    resume_from,
    run_all,
    small_model,
)
from tests.support.counts import scaled

pytestmark = pytest.mark.usefixtures("waiting_or_overlapped")

SECRET_LEN = 12
QUESTION = random_ids(99, 6)


def secret_of(number: int) -> tuple[int, ...]:
    return random_ids(10_000 + number, SECRET_LEN)


def asks(name: str, with_secrets: Outcome, secret: tuple[int, ...]) -> GenerationRequest:
    """The session's next turn: how likely is `secret` after the question, and what is said then?"""
    resume, pending = resume_from(with_secrets.end_state)
    return make_request(name, pending + QUESTION + secret, resume=resume, prompt_logprobs=0, max_tokens=4)


def logprobs(outcome: Outcome) -> list[float]:
    return [entry.logprob for entry in outcome.scored.logprobs if entry is not None]


@pytest.mark.parametrize("num_sessions", [scaled(12, 50)])
def test_L1_secret_of_one_session_is_unknown_to_all_others(num_sessions: int, tiny_tokenizer: Tokenizer) -> None:
    """Every session but the first is told a secret of its own; the first is asked for all of them, beside the others.

    Its answers equal those on an engine where no secret was ever told.
    """
    engine = make_engine(small_model(), tiny_tokenizer, max_slots=6, queue_limit=200)
    story = random_ids(1, 20)
    tellings = [make_request(str(number), (*story, *secret_of(number))) for number in range(1, num_sessions)]
    with_secrets = run_all(engine, [make_request("0", story), *tellings])

    fresh = make_engine(small_model(), tiny_tokenizer)
    without_secrets = run_all(fresh, [make_request("0", story)])
    assert with_secrets["0"].ids == without_secrets["0"].ids
    for number in range(1, num_sessions):
        secret = secret_of(number)
        beside = asks(str(number), with_secrets[str(number)], secret)
        answers = run_all(engine, [asks("0", with_secrets["0"], secret), beside])
        want = run_all(fresh, [asks("0", without_secrets["0"], secret)])["0"]
        assert answers["0"].ids == want.ids
        torch.testing.assert_close(logprobs(answers["0"]), logprobs(want), rtol=2e-4, atol=2e-4)
        # the probe itself can tell: to the session that was told, the same question has another answer
        assert abs(sum(logprobs(answers[str(number)])) - sum(logprobs(want))) > 0.01
