"""The shapes of the Responses API: the response object, its usage, and the events of a stream in their order."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from nsm_core.engine.request import Finished, FinishReason
from nsm_core.errors import NsmError
from service.generate.choices import EVENTS_AT_ONCE
from service.generate.openai_format import energy_of
from service.schemas.items import Item
from service.schemas.responses import CreateResponseBody
from service.web.errors import answer, report, rule_of
from service.web.sse import frame, require_within

ENDED = ("completed", "incomplete", "failed", "cancelled")
LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",  # the protocol has no event of its own for it: the object inside tells
}

Response = dict[str, Any]
Event = dict[str, Any]


def opened_response(body: CreateResponseBody, *, response_id: str, model: str) -> Response:
    """The object of a response that has begun. `include_energy` is there if it was asked for."""
    return {
        **({"include_energy": True} if body.include_energy else {}),
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": body.background,
        "conversation": None if body.conversation is None else {"id": body.conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": body.text_format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
    }


def status_of(finished: Finished) -> str:
    """Of a response whose text is complete, or as long as it may be."""
    return "completed" if finished.reason is FinishReason.STOP else "incomplete"


def ended_response(
    opened: Response, finished: Finished, output: list[Item], *, reasoning_tokens: int = 0
) -> Response:  # fmt: skip
    """The object of a response that came to an end of its own."""
    status = status_of(finished)
    is_whole = status == "completed"
    return {
        **opened,
        "status": status,
        "completed_at": math.floor(time.time()) if is_whole else None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": usage(finished, reasoning_tokens=reasoning_tokens, has_energy="include_energy" in opened),
    }


def failed_response(opened: Response, error: NsmError) -> Response:
    code = "rate_limit_exceeded" if rule_of(error).status == 429 else "server_error"
    return {**opened, "status": "failed", "error": {"code": code, "message": str(error)}}


def cancelled_response(opened: Response) -> Response:
    return {**opened, "status": "cancelled"}


def usage(finished: Finished, *, reasoning_tokens: int, has_energy: bool = False) -> dict[str, Any]:
    """`input_tokens`: all that the answer stands on; `cached_tokens`: those that a state covered; `replayed_tokens`, if
    there are some: those that the chain had read before, and that were read again.
    """
    details = {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0}
    if finished.replayed_tokens:
        details["replayed_tokens"] = finished.replayed_tokens
    return {
        **({"energy": energy_of([finished])} if has_energy else {}),
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }


def opening_of(response: Response) -> Response:
    """The object as it was when the response had begun."""
    return {
        **response,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


async def frames(
    batches: AsyncGenerator[list[Event], None], *, request_id: str, starting_after: int = -1
) -> AsyncGenerator[bytes, None]:
    """Events as server-sent events, those that came together in one piece. Up to number `starting_after` they are
    left out; a number behind the last event is an error.

    What fails on the way is one more event: the status is out already. It is not of the response's own, so it takes no
    number, and whoever reads on after the last one that came gets the rest.
    """
    number, last = max(starting_after, 0), -1
    try:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                last = batch[-1]["sequence_number"] if batch else last
                for some in _parts_of([event for event in batch if event["sequence_number"] > starting_after]):
                    number = some[-1]["sequence_number"]
                    yield b"".join(
                        frame(event, event=event["type"], event_id=event["sequence_number"]) for event in some
                    )
        require_within(starting_after, last=last)
    except Exception as error:
        report(error, request_id=request_id)
        shown = answer(error, request_id=request_id)
        fields = {"code": shown.code, "message": shown.message, "param": shown.param, "sequence_number": number}
        yield frame({"type": "error", **fields}, event="error")


def _parts_of(events: list[Event]) -> Iterator[list[Event]]:
    """No more than is fit to be written at once: a slow reader holds so much."""
    for start in range(0, len(events), EVENTS_AT_ONCE):
        yield events[start : start + EVENTS_AT_ONCE]
