"""The measurements of history as Markdown."""

from __future__ import annotations

from nsm_lab.evaluation.history.estimates import Estimate
from nsm_lab.evaluation.history.fresh_starts import FreshStartResult
from nsm_lab.evaluation.history.keys import KeyResult
from nsm_lab.evaluation.history.measure import HistoryResult
from nsm_lab.evaluation.history.repeats import RepeatResult
from nsm_lab.evaluation.markdown import short, table

NOT_FOUND = "not found"


def history_lines(result: HistoryResult) -> str:
    parts = [
        f"## History\n\n{result.num_documents} documents; 95 % intervals over documents. {_reach(result.reach)} "
        f"**{NOT_FOUND.capitalize()}**: the interval includes what a model without memory gets.",
        _fresh_start_lines(result.fresh_starts) if result.fresh_starts else "",
        _repeat_lines(result.repeats) if result.repeats else "",
        _key_lines(result.keys) if result.keys else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _reach(reach: int) -> str:
    if reach == 0:
        return "The model has no attention: all it knows of the text lies in its recurrent state."
    return (
        f"The attention layers together reach {reach:,} tokens back. What lies within may come from them; what lies "
        "beyond (marked *) came through the recurrent state."
    )


def _fresh_start_lines(result: FreshStartResult) -> str:
    spans = ", ".join(f"{first:,}" for first in result.spans)
    rows = [
        [_marked(start.start, start.is_beyond_windows), str(len(start.gain.per_document)), *_gain(start.gain)]
        for start in result.starts
    ]
    heads = ("fresh start before the span (tokens)", "documents", "gain (nats/token)", "95 % interval", "")
    return (
        "### Text: what the history before a fresh start is worth\n\n"
        f"Loss on spans of {result.span_len:,} tokens from token {spans} of a book. Read from token 0 it is "
        f"{_plain(result.loss)} nats a token; the gain is by how much more it is for a fresh state that starts "
        "so many tokens before the span, where at least as many tokens again lie before that.\n\n" + table(heads, rows)
    )


def _repeat_lines(result: RepeatResult) -> str:
    rows = [
        [_marked(one.distance, one.is_beyond_windows), str(len(one.gain.per_document)), *_gain(one.gain)]
        for one in result.distances
    ]
    heads = ("read before, tokens back", "documents", "gain (nats/token)", "95 % interval", "")
    return (
        "### A passage that was read before\n\n"
        f"Gain on {result.passage_len} tokens of which a copy was read so many tokens before, against the same tokens "
        f"at the same place with no copy before ({_plain(result.unread_loss)} nats a token).\n\n" + table(heads, rows)
    )


def _key_lines(result: KeyResult) -> str:
    rows = [
        [
            f"{short(cell.context)}",
            _marked(cell.distance, cell.is_beyond_windows),
            f"{cell.num_prompts} in {len(cell.is_likeliest.per_document)}",
            *_share(cell.is_likeliest, result.chance),
            *_share(cell.is_written, 0.0),
        ]
        for cell in result.cells
    ]
    heads = (
        "context (tokens)",
        "key, tokens from the end",
        "prompts in documents",
        f"likeliest of {result.num_choices}",
        "95 % interval",
        "",
        "written out",
        "95 % interval",
        "",
    )
    return (
        "### Keys\n\nA five-digit key in a book, asked for at the end. Likeliest: the right key has a higher "
        f"probability than {result.num_choices - 1} others (chance {result.chance:.0%}); written out: greedy decoding "
        "gives it.\n\n" + table(heads, rows)
    )


def _marked(tokens: int, is_beyond: bool) -> str:
    return f"{tokens:,}{' *' if is_beyond else ''}"


def _gain(estimate: Estimate) -> tuple[str, str, str]:
    verdict = "" if estimate.exceeds(0.0) else NOT_FOUND
    return f"{estimate.mean:+.4f}", _interval(estimate, "+.4f"), verdict


def _share(estimate: Estimate, chance: float) -> tuple[str, str, str]:
    verdict = "" if estimate.exceeds(chance) else NOT_FOUND
    return f"{estimate.mean:.0%}", _interval(estimate, ".0%"), verdict


def _interval(estimate: Estimate, style: str) -> str:
    if estimate.low is None or estimate.high is None:
        return "one document"
    return f"{estimate.low:{style}} … {estimate.high:{style}}"


def _plain(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{estimate.mean:.4f}"
    return f"{estimate.mean:.4f} ± {estimate.mean - estimate.low:.4f}"
