from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from service.telemetry.logs import JsonFormatter, configure_logging
from service.telemetry.request_context import answering
from tests.service.telemetry.tracing.test_traces import TRACE_ID, TRACEPARENT, Spans
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway

SECRET = "the canary sings at midnight"


class Lines(logging.Handler):
    """What would be written, as it would be."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def of(self, logger: str) -> dict[str, object]:
        (line,) = [line for line in map(json.loads, self.texts) if line["logger"] == logger]
        return dict(line)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Of everything, at the lowest level."""
    handler, root, ours = Lines(), logging.getLogger(), logging.getLogger("nsm")
    levels = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    ours.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def whole_log() -> Iterator[None]:
    """Puts the process's log back as it was."""
    root, ours = logging.getLogger(), logging.getLogger("nsm")
    before = root.level, list(root.handlers), ours.level
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])


async def test_the_access_log_is_an_object_with_its_request_and_trace(lines: Lines) -> None:
    spans = Spans()
    async with gateway(FakeBackend(), tracing=spans.tracing) as server:
        headers = {"x-request-id": "mine", "traceparent": TRACEPARENT}
        await server.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    line = lines.of("nsm.access")
    assert isinstance(line.pop("time"), str)
    assert isinstance(line.pop("duration_ms"), float)
    assert str(line.pop("message")).startswith(
        "request_id=mine method=POST path=/v1/completions status=200 duration_ms="
    )
    assert line == {
        "level": "info",
        "logger": "nsm.access",
        "request_id": "mine",
        "trace_id": TRACE_ID,
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
    }


async def test_whatever_is_logged_for_a_request_has_its_id(lines: Lines) -> None:
    async with gateway(FakeBackend(fail_after=1)) as server:
        await server.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    errors = lines.of("nsm.errors")
    assert errors["request_id"] == "mine"
    assert "trace_id" not in errors


def test_outside_of_requests_there_is_no_id(lines: Lines) -> None:
    logging.getLogger("nsm.test").info("%d things", 3)
    with answering("mine"):
        logging.getLogger("nsm.inside").info("here")
    line = lines.of("nsm.test")
    assert line["message"] == "3 things"
    assert "request_id" not in line
    assert lines.of("nsm.inside")["request_id"] == "mine"


def test_a_traceback_stays_on_its_line(lines: Lines) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("nsm.test").exception("failed")
    assert len(lines.texts[0].splitlines()) == 1
    assert str(lines.of("nsm.test")["exception"]).endswith("ValueError: two\nlines")


async def say(server: Gateway) -> None:
    """In every way a client can."""
    post = server.client.post
    await post("/v1/completions", json={"prompt": SECRET, "max_tokens": 40})
    await post("/v1/completions", json={"prompt": SECRET, "temperature": SECRET})
    await post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}], "stream": True})
    await post("/v1/responses", json={"input": SECRET, "instructions": SECRET})
    await post("/v1/sessions", json={"id": "s1"})
    await post("/v1/sessions/s1/generate", json={"input": SECRET})
    await post("/v1/sessions/s1/generate", json={"input": SECRET, "session": SECRET})
    await post("/tokenize", json={"prompt": SECRET})


def is_logged(lines: Lines) -> bool:
    return any("canary" in line or "midnight" in line for line in lines.texts)


async def test_no_log_line_holds_text_of_a_client(lines: Lines) -> None:
    async with gateway(FakeBackend(SECRET)) as server:
        await say(server)
    assert len(lines.texts) >= 8
    assert not is_logged(lines)


async def test_prompts_are_there_when_they_are_asked_for(lines: Lines) -> None:
    async with gateway(FakeBackend(), log_prompts=True) as server:
        await server.client.post("/v1/completions", json={"prompt": SECRET})
    assert lines.of("nsm.prompts")["prompt"] == SECRET


@pytest.mark.usefixtures("whole_log")
@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_go_to_standard_error(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", form)  # type: ignore[arg-type]
    logging.getLogger("nsm.test").info("quiet")
    logging.getLogger("nsm.test").warning("loud")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING nsm.test loud") if form == "text" else json.loads(line)["message"] == "loud"
