"""One streamed request: sent, read to its end, timed at the socket, and held against what its answer must be."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from gevent import GreenletExit, sleep

from loadtests.client import BLOCK_BYTES, Client, Received, Response
from loadtests.samples import Sample

# Unix time of a reading of the monotonic clock, the same for all of this process's samples
UNIX_S = time.time() - time.monotonic()
REJECTIONS = (429, 503)


@dataclasses.dataclass(slots=True)
class Answer:
    """What came. `last_id`: the newest event's `id:` line. `at`: when each piece of text was received."""

    text: str = ""
    at: list[float] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    session: dict[str, Any] = dataclasses.field(default_factory=dict)
    stream_id: str = ""
    event_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    is_complete: bool = False
    was_replayed: bool = False

    def add(self, received: Received) -> None:
        event = received.event
        if event.event_id:
            self.event_ids.append(int(event.event_id))
        if event.is_done:
            self.is_complete = True
            return
        body = event.json()
        self.error = body.get("error", self.error)
        self.stream_id = body.get("id", self.stream_id)
        self.usage = body.get("usage") or self.usage
        self.session = body.get("session") or self.session
        for choice in body.get("choices", ()):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if piece:
                self.text += piece
                self.at.append(received.at)


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """How an answer is read. `leave_after`: pieces of text, then the connection breaks; `pause_s`: after an event."""

    leave_after: int | None = None
    pause_s: float = 0.0
    block_bytes: int = BLOCK_BYTES

    def read(self, response: Response, answer: Answer) -> None:
        for received in response.events(block_bytes=self.block_bytes):
            answer.add(received)
            if self.leave_after is not None and len(answer.at) >= self.leave_after:
                return
            if self.pause_s:
                sleep(self.pause_s)


def begin(scenario: str, *, step: str = "", intended_at: float | None = None) -> Sample:
    """A sample that begins now, or should have begun at a reading of `time.monotonic()`."""
    now = time.monotonic()
    intended_at = now if intended_at is None else intended_at
    lag_ms = (now - intended_at) * 1000
    return Sample(scenario=scenario, step=step, intended_s=intended_at + UNIX_S, lag_ms=lag_ms, outcome="unfinished")


def ask(
    client: Client,
    path: str,
    body: Mapping[str, Any] | None,
    sample: Sample,
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    reader: Reader | None = None,
) -> Answer:
    """Fills `sample`; its outcome is `ok` for a stream that is complete, whatever it says: see `expect`."""
    answer = Answer()
    if body is not None:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with client.open(method, path, body, headers) as response:
            sample.status = response.status_code
            answer.was_replayed = response.header("idempotent-replayed") == "true"
            if response.status_code == 200:
                (reader or Reader()).read(response, answer)
            else:
                _refused(response, sample, answer)
        _set_outcome(sample, answer, left=reader is not None and reader.leave_after is not None)
    except GreenletExit:
        sample.outcome = "unfinished"
        raise
    except OSError as error:
        sample.outcome, sample.problem = "failed", f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        sample.outcome, sample.problem = "failed", f"an answer of another kind of service: {error!r}"
    finally:
        _time(sample, answer)
    return answer


def expect(sample: Sample, is_right: bool, problem: str) -> None:
    """An answer that came must also be right."""
    if sample.outcome == "ok" and not is_right:
        sample.outcome, sample.problem = "wrong", problem


def expect_text(sample: Sample, answer: Answer, text: str) -> None:
    expect(sample, answer.text == text, f"expected {text!r}, got {answer.text!r}")


def _refused(response: Response, sample: Sample, answer: Answer) -> None:
    retry_after = response.header("retry-after")
    sample.retry_after_s = _seconds(retry_after)
    answer.error = response.json().get("error") or {}
    code = answer.error.get("code")
    sample.outcome = "busy" if code == "session_busy" else "rejected" if sample.status in REJECTIONS else "failed"
    sample.problem = f"{sample.status} {code}"


def _seconds(retry_after: str | None) -> float | None:
    """None for a date too, which nobody in a load test waits for."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None


def _set_outcome(sample: Sample, answer: Answer, *, left: bool) -> None:
    if sample.status != 200:
        return
    if answer.error is not None:
        sample.outcome, sample.problem = "failed", f"error in the stream: {answer.error.get('code')}"
    elif answer.is_complete:
        sample.outcome = "ok"
    elif left:
        sample.outcome = "cancelled"
    else:
        sample.outcome, sample.problem = "failed", "the stream ended without [DONE]"


def _time(sample: Sample, answer: Answer) -> None:
    start = sample.intended_s - UNIX_S
    sample.e2e_ms = (time.monotonic() - start) * 1000
    if answer.at:
        sample.ttft_ms = (answer.at[0] - start) * 1000
        sample.itl_ms = [(after - before) * 1000 for before, after in zip(answer.at, answer.at[1:], strict=False)]
    details = answer.usage.get("prompt_tokens_details") or {}
    sample.prompt_tokens = answer.usage.get("prompt_tokens", 0)
    sample.resumed_tokens = details.get("cached_tokens", 0)
    sample.tokens = answer.usage.get("completion_tokens", 0)
