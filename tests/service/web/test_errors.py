from __future__ import annotations

import logging

import pytest
from starlette.exceptions import HTTPException

from nsm_core.errors import (
    EngineDead,
    InvalidRequest,
    LogCorrupt,
    NotFound,
    NsmError,
    Overloaded,
    ServerStopping,
    SessionBusy,
    SnapshotCorrupt,
    StorageFull,
    StoreDamaged,
    StoreReplaced,
    VersionConflict,
)
from service.web.errors import RULES, answer, report, rule_of, shown


def test_every_error_has_a_status() -> None:
    direct = set(NsmError.__subclasses__())
    assert direct <= set(RULES) <= direct | {ServerStopping, StoreDamaged, StoreReplaced, LogCorrupt}


def test_a_subclass_is_answered_like_its_parent() -> None:
    class QueueFull(Overloaded):
        pass

    assert rule_of(QueueFull("full")) is RULES[Overloaded]


@pytest.mark.parametrize(
    ("error", "status", "body", "headers"),
    [
        (
            InvalidRequest("n must be at least 1, got 0", param="n"),
            400,
            {"message": "n must be at least 1, got 0", "type": "invalid_request_error", "param": "n", "code": None},
            {},
        ),
        (
            NotFound("no such model", param="model", code="model_not_found"),
            404,
            {"message": "no such model", "type": "not_found_error", "param": "model", "code": "model_not_found"},
            {},
        ),
        (
            SessionBusy("busy", retry_after_s=0.2),
            409,
            {"message": "busy", "type": "invalid_request_error", "param": None, "code": "session_busy"},
            {"retry-after": "1"},
        ),
        (
            VersionConflict("moved on"),
            409,
            {"message": "moved on", "type": "invalid_request_error", "param": None, "code": "version_conflict"},
            {"x-should-retry": "false"},
        ),
        (
            Overloaded("full", retry_after_s=2.5),
            503,
            {"message": "full", "type": "server_error", "param": None, "code": "overloaded"},
            {"retry-after": "3"},
        ),
        (
            ServerStopping(),
            503,
            {
                "message": "the server is stopping and takes no new work",
                "type": "server_error",
                "param": None,
                "code": "server_stopping",
            },
            {"retry-after": "1"},
        ),
        (
            EngineDead("dead"),
            503,
            {"message": "dead", "type": "server_error", "param": None, "code": "engine_dead"},
            {"retry-after": "1"},
        ),
        (
            StorageFull("full"),
            507,
            {"message": "full", "type": "server_error", "param": None, "code": "storage_full"},
            {"retry-after": "60", "x-should-retry": "false"},
        ),
        (
            StorageFull("a value too large", retry_after_s=None),
            507,
            {"message": "a value too large", "type": "server_error", "param": None, "code": "storage_full"},
            {"x-should-retry": "false"},
        ),
        (
            HTTPException(405, "Method Not Allowed", {"Allow": "POST"}),
            405,
            {
                "message": "Method Not Allowed",
                "type": "invalid_request_error",
                "param": None,
                "code": "method_not_allowed",
            },
            {"Allow": "POST"},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_as_clients_see_them(
    error: Exception, status: int, body: dict[str, object], headers: dict[str, str]
) -> None:
    seen = answer(error)
    assert (seen.status, seen.body(), dict(seen.headers)) == (status, {"error": body}, headers)


def test_an_unexpected_error_shows_its_request_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("the secret is 42")
    seen = answer(error, request_id="req_1")
    assert seen.status == 500
    assert "req_1" in seen.message
    assert "42" not in seen.message
    with caplog.at_level(logging.ERROR, logger="nsm.errors"):
        report(error, request_id="req_1")
    assert "req_1" in caplog.text
    assert "the secret is 42" in caplog.text


@pytest.mark.parametrize(
    ("error", "level"), [(SnapshotCorrupt("session 's1': bad"), logging.ERROR), (StorageFull("full"), logging.WARNING)]
)
def test_damaged_stored_data_is_an_error_in_the_log(
    error: NsmError, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    report(error, request_id="r1")
    (record,) = caplog.records
    assert (record.levelno, str(error) in record.message) == (level, True)


def test_notes_are_for_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    error = StorageFull("the session store is full")
    error.add_note("/srv/nsm/sessions.db: database or disk is full")
    assert answer(error).message == "the session store is full"
    report(error, request_id="r1")
    assert "full (/srv/nsm/sessions.db: database or disk is full)" in caplog.text


def test_a_refusal_is_not_worth_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nsm.errors"):
        report(InvalidRequest("n must be at least 1, got 0"), request_id="req_1")
    assert caplog.text == ""


def deep_list(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("5", '"5"'),
        (True, "true"),
        (None, "null"),
        ({"a": [1.5]}, '{"a": [1.5]}'),
        (list(range(1000)), "a list of 1000 items"),
        ({str(n): n for n in range(1000)}, "an object of 1000 items"),
        (deep_list(2000), "a deeply nested value"),
    ],
    ids=["string", "bool", "null", "object", "list", "big-object", "deep"],
)
def test_given_values_are_shown_as_json_and_short(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_huge_string_is_cut() -> None:
    assert len(shown("x" * 10_000_000)) < 100
