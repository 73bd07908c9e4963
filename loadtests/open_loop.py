"""Requests that are sent when the trace says so, however the server fares. Latency counts from that moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import gevent

from loadtests.arrivals import Arrival
from loadtests.asking import UNIX_S, ask, begin, expect
from loadtests.client import Client
from loadtests.conversations import Conversation, Refused
from loadtests.run_profile import OpenLoop as OpenLoopProfile
from loadtests.run_state import RunState, new_id
from loadtests.scripts import GREEDY

LEAD_S = 0.5  # until the first arrival


class ArrivalLoop:
    """The share of one process in the arrivals. Whatever is under way at the end is recorded as unfinished."""

    def __init__(self, run: RunState, arrivals: Sequence[Arrival], loop: OpenLoopProfile) -> None:
        self._run = run
        self._arrivals = arrivals
        self._as_sessions = loop.trace == "mooncake"
        self._max_open = loop.max_open
        self._clients: list[Client] = run.clients()
        self._open: set[gevent.Greenlet] = set()
        self._sessions: dict[int, Conversation] = {}
        self._newest: dict[int, gevent.Greenlet] = {}  # turn of each conversation
        self._waiting: dict[int, tuple[Arrival, float]] = {}  # due, and not sent yet
        self._sending: gevent.Greenlet | None = None

    def start(self) -> None:
        self._sending = gevent.spawn(self._send)

    @property
    def is_done(self) -> bool:
        """Everything was sent, and is over."""
        return self._sending is not None and self._sending.ready() and not self._open

    def close(self) -> None:
        """Gives up requests that are still under way; those that were never sent are recorded too."""
        gevent.killall([*self._open, self._sending])
        for arrival, intended_at in list(self._waiting.values()):
            self._add_unsent(arrival, intended_at, "the run ended before it could be sent")
        for conversation in self._sessions.values():
            with contextlib.suppress(OSError):  # a server that is gone has been noticed
                self._clients[0].request("DELETE", f"/v1/sessions/{conversation.id}")

    def _send(self) -> None:
        start = time.monotonic() + LEAD_S
        for arrival in self._arrivals:
            intended_at = start + arrival.at_s
            gevent.sleep(max(0.0, intended_at - time.monotonic()))
            if len(self._open) >= self._max_open:
                self._add_unsent(arrival, intended_at, "the client has too many open requests")
                continue
            self._waiting[arrival.number] = (arrival, intended_at)
            greenlet = self._spawn(arrival, intended_at)
            self._open.add(greenlet)
            greenlet.link(self._open.discard)

    def _spawn(self, arrival: Arrival, intended_at: float) -> gevent.Greenlet:
        if not self._as_sessions:
            return gevent.spawn(self._serve_completion, arrival, intended_at)
        before = self._newest.get(arrival.conversation)
        greenlet = gevent.spawn(self._serve_turn, arrival, intended_at, before)
        self._newest[arrival.conversation] = greenlet
        return greenlet

    def _add_unsent(self, arrival: Arrival, intended_at: float, problem: str) -> None:
        scenario = "turn" if self._as_sessions else "arrival"
        sample = begin(scenario, step=arrival.step, intended_at=intended_at)
        sample.problem, sample.e2e_ms = problem, 0.0
        self._run.recorder.add(sample)

    def _serve_completion(self, arrival: Arrival, intended_at: float) -> None:
        """A shorter answer is the beginning of a longer one; a character cut at its end is U+FFFD."""
        del self._waiting[arrival.number]
        sample = begin("arrival", step=arrival.step, intended_at=intended_at)
        fitting = self._run.scripts.nearest(arrival.prompt_tokens)
        script = fitting[arrival.number % len(fitting)]
        body = {**GREEDY, "prompt": script.inputs[0], "max_tokens": arrival.output_tokens, "cache_prompt": False}
        try:
            answer = ask(self._run.turn_of(self._clients), "/v1/completions", body, sample)
            is_right = script.answers[0].startswith(answer.text.rstrip("\ufffd"))
            expect(sample, is_right, f"expected the beginning of {script.answers[0]!r}, got {answer.text!r}")
            expect(sample, sample.tokens == arrival.output_tokens, f"{sample.tokens} tokens, not those asked for")
        finally:
            self._run.recorder.add(sample)

    def _serve_turn(self, arrival: Arrival, intended_at: float, before: gevent.Greenlet | None) -> None:
        """A conversation's turn waits for the one before it; that time is part of its latency."""
        if before is not None:
            before.join()
        try:
            conversation = self._session_of(arrival)
        except (Refused, OSError) as error:
            self._add_failed(arrival, intended_at, error)
            return
        finally:
            del self._waiting[arrival.number]
        sample, answer = conversation.take_turn("turn", step=arrival.step, intended_at=intended_at)
        if sample.outcome == "ok":
            conversation.move_on(answer)
        elif sample.outcome != "rejected":
            self._sessions.pop(arrival.conversation, None)

    def _add_failed(self, arrival: Arrival, intended_at: float, error: Exception) -> None:
        sample = begin("turn", step=arrival.step, intended_at=intended_at)
        sample.outcome, sample.problem = "failed", str(error)
        sample.e2e_ms = (time.monotonic() + UNIX_S - sample.intended_s) * 1000
        self._run.recorder.add(sample)

    def _session_of(self, arrival: Arrival) -> Conversation:
        """The conversation's session, or a new one when its script has been played to its end."""
        conversation = self._sessions.get(arrival.conversation)
        if conversation is None or conversation.done == len(conversation.script.inputs):
            return self._new_session(arrival)
        return conversation

    def _new_session(self, arrival: Arrival) -> Conversation:
        scripts = self._run.scripts.of("session")
        script = scripts[arrival.conversation % len(scripts)]
        conversation = Conversation(self._run, self._clients, script, new_id("trace"))
        conversation.__enter__()
        self._sessions[arrival.conversation] = conversation
        return conversation
