"""Formats log records: one line each, as text or as JSON."""

from __future__ import annotations

import datetime
import logging
import sys
import time
from typing import Any, Literal

import orjson

from service.telemetry.request_context import current_request

LogFormat = Literal["text", "json"]
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """One line for each record, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter(TEXT))
    # No line has the place in the source, the thread or the process: records are made without them, at half the cost
    logging._srcfile = None  # as logging's own page of optimisations says
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("nsm").setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """The library's, which would break each record's time down into a date again."""

    _second = -1
    _date = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # the library's
        second = int(record.created)
        if second != self._second:
            self._date = time.strftime(self.default_time_format, time.localtime(second))
            self._second = second
        return f"{self._date},{record.msecs:03.0f}"


class JsonFormatter(logging.Formatter):
    """One object for each line: time, level, logger, message, the fields of `extra={"fields": …}`, and the ids of the
    current request and its trace.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = current_request()
        if request is not None:
            line["request_id"] = request.request_id
            if request.trace_id is not None:
                line["trace_id"] = request.trace_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
