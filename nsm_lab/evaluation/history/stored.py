"""Measurements of history as `nsm eval --output` wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsm_core.errors import ConfigError
from nsm_lab.evaluation.history.estimates import Estimate
from nsm_lab.evaluation.history.fresh_starts import FreshStart, FreshStartResult
from nsm_lab.evaluation.history.keys import KeyCell, KeyResult
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.history.repeats import RepeatGain, RepeatResult

Fields = dict[str, Any]


def read_history(path: Path) -> HistoryResult:
    """The part `history` of a report. Raises ConfigError with the file's name."""
    try:
        return history_from_fields(json.loads(path.read_text("utf-8"))["history"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not the report of an evaluation with history: {error!r}") from error


def history_from_fields(fields: Fields) -> HistoryResult:
    """The inverse of `dataclasses.asdict`, also after a way through JSON. Raises KeyError or TypeError."""
    starts, repeats, keys = (fields[name] for name in ("fresh_starts", "repeats", "keys"))
    return HistoryResult(
        reach=fields["reach"],
        num_documents=fields["num_documents"],
        fresh_starts=None if starts is None else _fresh_starts(starts),
        repeats=None if repeats is None else _repeats(repeats),
        keys=None if keys is None else _keys(keys),
    )


def _fresh_starts(fields: Fields) -> FreshStartResult:
    starts = (FreshStart(**{**one, "gain": _estimate(one["gain"])}) for one in fields["starts"])
    loss, spans = _estimate(fields["loss"]), tuple(fields["spans"])
    return FreshStartResult(spans=spans, span_len=fields["span_len"], loss=loss, starts=tuple(starts))


def _repeats(fields: Fields) -> RepeatResult:
    gains = (RepeatGain(**{**one, "gain": _estimate(one["gain"])}) for one in fields["distances"])
    unread = _estimate(fields["unread_loss"])
    return RepeatResult(passage_len=fields["passage_len"], unread_loss=unread, distances=tuple(gains))


def _keys(fields: Fields) -> KeyResult:
    shares = ("is_likeliest", "is_written")
    cells = (KeyCell(**{**cell, **{name: _estimate(cell[name]) for name in shares}}) for cell in fields["cells"])
    return KeyResult(num_choices=fields["num_choices"], cells=tuple(cells))


def _estimate(fields: Fields) -> Estimate:
    return Estimate(**{**fields, "per_document": tuple(fields["per_document"])})
