"""Errors as one line of text, which is all that Triton hands from a model to its clients, and back.

`code: message {"detail": …}`; the object is left out where there is nothing in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nsm_core.errors import (
    DeadlineExceeded,
    EngineDead,
    GrammarFailed,
    InvalidRequest,
    NsmError,
    NumericalError,
    Overloaded,
    SnapshotCorrupt,
    StateMismatch,
    StepFailed,
)
from nsm_core.wire.tensors import CONTRACT_VERSION


class StateMissing(Exception):
    """The worker does not have the state that `resume.state_id` names: ask again, with its bytes.

    No NsmError, because no client of the gateway ever sees it.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """`triton`: the name of Triton's status code."""

    code: str
    triton: str
    make: Callable[[str, Mapping[str, Any]], Exception]


_KINDS: Mapping[type[Exception], _Kind] = {
    InvalidRequest: _Kind(
        "invalid_request",
        "INVALID_ARG",
        lambda message, details: InvalidRequest(message, param=details.get("param"), code=details.get("code")),
    ),
    StateMismatch: _Kind("state_mismatch", "INVALID_ARG", lambda message, _: StateMismatch(message)),
    SnapshotCorrupt: _Kind("snapshot_corrupt", "INVALID_ARG", lambda message, _: SnapshotCorrupt(message)),
    StateMissing: _Kind("state_missing", "NOT_FOUND", lambda message, _: StateMissing(message)),
    Overloaded: _Kind(
        "overloaded",
        "UNAVAILABLE",
        lambda message, details: Overloaded(
            message, retry_after_s=details.get("retry_after_s", 1.0), param=details.get("param")
        ),
    ),
    EngineDead: _Kind("engine_dead", "UNAVAILABLE", lambda message, _: EngineDead(message)),
    DeadlineExceeded: _Kind("deadline_exceeded", "CANCELLED", lambda message, _: DeadlineExceeded(message)),
    GrammarFailed: _Kind("grammar_failed", "INTERNAL", lambda message, _: GrammarFailed(message)),
    NumericalError: _Kind("numerical_error", "INTERNAL", lambda message, _: NumericalError(message)),
    StepFailed: _Kind("step_failed", "INTERNAL", lambda message, _: StepFailed(message)),
}
_BY_CODE = {kind.code: kind for kind in _KINDS.values()}
_DETAILS = ("param", "code", "retry_after_s")
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error with the work done before it; zeros where the request was refused."""

    error: Exception
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def encode_failure(failure: Failure) -> str:
    """One line. An error of no known kind becomes an EngineDead that tells its class only."""
    error: Exception = failure.error
    if type(error) not in _KINDS:
        message = str(error) if isinstance(error, NsmError) else f"the worker failed: {type(error).__name__}"
        error = EngineDead(message)
    details = {name: getattr(error, name, None) for name in _DETAILS}
    details |= {name: getattr(failure, name) or None for name in _USAGE}
    given = {name: value for name, value in details.items() if value is not None}
    tail = f" {json.dumps(given)}" if given else ""
    return f"{_KINDS[type(error)].code}: {' '.join(str(error).split())}{tail}"


def triton_code(error: Exception) -> str:
    """The name of Triton's status code for an error, an attribute of `pb_utils.TritonError`."""
    kind = _KINDS.get(type(error))
    return "INTERNAL" if kind is None else kind.triton


def decode_failure(line: str) -> Failure:
    """The inverse of `encode_failure`. Triton's own messages (a dead stub, say) become an EngineDead."""
    code, colon, rest = line.partition(": ")
    kind = _BY_CODE.get(code)
    if kind is None or not colon:
        return Failure(error=EngineDead(f"the worker's server answered: {' '.join(line.split())}"))
    message, details = _split_details(rest)
    usage = {name: int(details.get(name, 0)) for name in _USAGE}
    return Failure(error=kind.make(message, details), **usage)


@contextlib.contextmanager
def reading_answer() -> Iterator[None]:
    """A faulty answer of a worker is not the caller's fault: it becomes an EngineDead."""
    try:
        yield
    except (InvalidRequest, LookupError, TypeError, ValueError) as error:
        raise EngineDead(f"the worker's answer is not of contract {CONTRACT_VERSION}: {error}") from error


def _split_details(text: str) -> tuple[str, dict[str, Any]]:
    """The message, and the object behind it: it is flat, so it begins at the last brace that leads to valid JSON."""
    start = text.rfind(" {")
    while start >= 0:
        try:
            details = json.loads(text[start + 1 :])
        except ValueError:
            start = text.rfind(" {", 0, start)
            continue
        if set(details) <= {*_DETAILS, *_USAGE}:
            return text[:start], details
        break
    return text, {}
