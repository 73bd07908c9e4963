"""Sessions as a client drives them: created, continued on any replica, forked, and gone at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from loadtests.asking import Answer, Reader, ask, begin, expect, expect_text
from loadtests.client import Client
from loadtests.run_state import RunState, new_id, wait_retry_after
from loadtests.samples import Sample
from loadtests.scripts import GREEDY, Script


class Refused(Exception):
    """A call that is not a turn was refused, or a turn did not come about in many tries: this conversation is over."""


class Conversation:
    """One session, at the state that follows `done` turns of its script. `with` it: it is deleted at the end."""

    def __init__(self, run: RunState, clients: list[Client], script: Script, session_id: str | None = None) -> None:
        self.run = run
        self.clients = clients
        self.script = script
        self.id = session_id or new_id("load")
        self.done = 0
        self.version = 0
        self.position = 0

    def __enter__(self) -> Conversation:
        self.call("POST", "/v1/sessions", {"id": self.id})
        return self

    def __exit__(self, *_: object) -> None:
        status = self._any().request("DELETE", f"/v1/sessions/{self.id}")[0]
        if status != 200:
            raise Refused(f"DELETE: {status}")

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A call that is answered at once, asked again when the server has no room. Raises Refused."""
        sample = begin("call")
        for _ in range(20):
            status, found = self._any().request(method, path, body)
            if status == 200:
                return found
            if status not in (409, 429, 503):
                break
            wait_retry_after(sample)
        raise Refused(f"{method} {path}: {status} {found}")

    def turn_body(self) -> dict[str, Any]:
        text = self.script.inputs[self.done]
        return {**GREEDY, "input": text, "max_tokens": self.script.max_tokens, "expected_version": self.version}

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.id}/generate"

    def take_turn(
        self,
        scenario: str,
        *,
        key: str | None = None,
        client: Client | None = None,
        step: str = "",
        intended_at: float | None = None,
        reader: Reader | None = None,
    ) -> tuple[Sample, Answer]:
        """Sends the next turn once and records it. The conversation moves on if it was answered in full."""
        sample = begin(scenario, step=step, intended_at=intended_at)
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = Answer()
        try:
            client = client or self._any()
            answer = ask(client, self.path, self.turn_body(), sample, headers=headers, reader=reader)
            self.check(sample, answer)
        finally:
            self.run.recorder.add(sample)
        return sample, answer

    def insist(self, scenario: str, **options: Any) -> Answer:
        """Takes the next turn; where there is no room for it, or the session is busy, again. Raises Refused."""
        for _ in range(100):
            sample, answer = self.take_turn(scenario, **options)
            if sample.outcome == "ok":
                self.move_on(answer)
                return answer
            if self.run.is_over or sample.outcome not in ("busy", "rejected"):
                break
            wait_retry_after(sample)
        raise Refused(sample.problem)

    def check(self, sample: Sample, answer: Answer) -> None:
        """The text, and that the turn resumed the stored state: no earlier token was read again."""
        expect_text(sample, answer, self.script.answers[self.done])
        expect(
            sample,
            sample.resumed_tokens == self.position,
            f"the state stood at {self.position} tokens, {sample.resumed_tokens} were resumed",
        )
        ids = answer.event_ids
        expect(sample, sorted(set(ids)) == ids, f"the ids of the events do not rise: {ids}")

    def move_on(self, answer: Answer) -> None:
        self.done += 1
        self.version = answer.session["version"]
        self.position = answer.session["position"]

    def fork(self) -> Conversation:
        """Another session at the same state. The time of the call is recorded."""
        other = Conversation(self.run, self.clients, self.script)
        sample = begin("fork")
        try:
            started_at = time.monotonic()
            answer = self.call("POST", f"/v1/sessions/{self.id}/fork", {"id": other.id})
            sample.e2e_ms = (time.monotonic() - started_at) * 1000
            sample.status, sample.outcome = 200, "ok"
            expect(sample, answer["position"] == self.position, f"the fork is at position {answer['position']}")
        finally:
            self.run.recorder.add(sample)
        other.done, other.version, other.position = self.done, self.version, self.position
        return other

    def _any(self) -> Client:
        return self.run.turn_of(self.clients)
