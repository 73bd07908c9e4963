"""Cancels, retries and lost connections. After each the conversation must go on as if nothing had been."""

from __future__ import annotations

import gevent

from loadtests.asking import Answer, Reader, ask, begin, expect
from loadtests.client import Client
from loadtests.conversations import Conversation
from loadtests.run_state import RunState, new_id
from loadtests.samples import Sample
from loadtests.scripts import GREEDY
from loadtests.together import all_results

# Of a turn that is cancelled before it can end: text that repeats itself comes by thousands of tokens a second
LONG_TOKENS = 30_000
FEW = 2  # pieces of text that are read before something happens


def leave_for_good(run: RunState, clients: list[Client]) -> None:
    """A completion whose client is killed: the server stops within a step."""
    sample = begin("leave")
    body = {**GREEDY, "prompt": run.script("completion").inputs[0], "max_tokens": LONG_TOKENS}
    try:
        ask(run.turn_of(clients), "/v1/completions", body, sample, reader=Reader(leave_after=FEW))
    finally:
        run.recorder.add(sample)


def leave_and_read_on(conversation: Conversation, scenario: str) -> None:
    """The connection breaks; the rest of the stream comes from another replica, each event once."""
    first, begun = conversation.take_turn(f"{scenario}_cut", reader=Reader(leave_after=FEW))
    if first.outcome != "cancelled":
        conversation.insist(scenario)
        return
    sample = begin(scenario)
    last_id = begun.event_ids[-1]
    try:
        rest = ask(
            conversation.run.turn_of(conversation.clients),
            f"/v1/streams/{begun.stream_id}",
            None,
            sample,
            method="GET",
            headers={"Last-Event-ID": str(last_id)},
        )
        _check_rest(conversation, sample, begun, rest)
    finally:
        conversation.run.recorder.add(sample)
    if sample.outcome == "ok":
        conversation.move_on(rest)
        conversation.insist(f"{scenario}_next")


def _check_rest(conversation: Conversation, sample: Sample, begun: Answer, rest: Answer) -> None:
    text = conversation.script.answers[conversation.done]
    expect(sample, begun.text + rest.text == text, f"expected {text!r}, got {begun.text!r} and then {rest.text!r}")
    ids = begun.event_ids + rest.event_ids
    expect(sample, sorted(set(ids)) == ids, f"the ids of the events do not rise: {ids}")


def cancel_turn(conversation: Conversation, scenario: str) -> None:
    """A long turn is cancelled while it is written; the session stays where it was, and its next turn is right."""
    sample = begin(scenario)
    body = {**conversation.turn_body(), "max_tokens": LONG_TOKENS}
    turn = gevent.spawn(ask, _any(conversation), conversation.path, body, sample)
    try:
        _cancel_until_over(conversation, turn)
        answer: Answer = turn.get()
        code = (answer.error or {}).get("code")
        if code == "turn_cancelled":
            sample.outcome, sample.problem = "cancelled", ""
        expect(sample, False, "the turn came to its end, though it was cancelled")
    finally:
        turn.kill()
        conversation.run.recorder.add(sample)
    conversation.insist(f"{scenario}_next")


def _cancel_until_over(conversation: Conversation, turn: gevent.Greenlet) -> None:
    """It may not have begun yet, or run in another process, which hears of it with its next write."""
    while not turn.ready():
        gevent.sleep(0.05)
        _any(conversation).request("POST", f"/v1/sessions/{conversation.id}/cancel")


def send_twice(conversation: Conversation, scenario: str) -> None:
    """The same turn with the same key, at once and on different replicas: it is done once, and both get its answer."""
    key = new_id("key")
    version, done = conversation.version, conversation.done
    first, second = all_results([lambda: _insist_on_a_copy(conversation, scenario, key)] * 2)
    sample = begin(f"{scenario}_equal")
    sample.outcome, sample.e2e_ms = "ok", 0.0
    expect(sample, first.session == second.session, f"one turn, two commits: {first.session}, {second.session}")
    expect(sample, first.session["version"] == version + 1, f"version {version} became {first.session['version']}")
    conversation.run.recorder.add(sample)
    conversation.done = done
    conversation.move_on(first)


def _insist_on_a_copy(conversation: Conversation, scenario: str, key: str) -> Answer:
    copy = Conversation(conversation.run, conversation.clients, conversation.script, conversation.id)
    copy.done, copy.version, copy.position = conversation.done, conversation.version, conversation.position
    return copy.insist(scenario, key=key)


def _any(conversation: Conversation) -> Client:
    return conversation.run.turn_of(conversation.clients)
