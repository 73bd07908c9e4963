"""How much of a text a model's state holds: all measurements of history together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from nsm_lab.evaluation.history import fresh_starts, keys, repeats
from nsm_lab.evaluation.history.fresh_starts import FreshStartResult, measure_fresh_starts
from nsm_lab.evaluation.history.key_tasks import KeyTask
from nsm_lab.evaluation.history.keys import KeyResult, measure_keys
from nsm_lab.evaluation.history.repeats import RepeatResult, measure_repeats
from nsm_lab.evaluation.losses import IntArray
from nsm_lab.evaluation.reading import EvaluatedModel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """Lengths and distances in tokens; a measurement with an empty list is left out."""

    starts: tuple[int, ...] = fresh_starts.DEFAULT_STARTS
    spans: tuple[int, ...] = fresh_starts.DEFAULT_SPANS
    repeat_distances: tuple[int, ...] = repeats.DEFAULT_DISTANCES
    passages: int = 4  # of a document
    key_contexts: tuple[int, ...] = keys.DEFAULT_CONTEXTS
    key_distances: tuple[int, ...] = keys.DEFAULT_DISTANCES
    prompts: int = 1  # of a document, in each context
    max_rows: int = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistoryResult:
    """`reach`: tokens that the attention layers reach back together. A part that was left out is None."""

    reach: int
    num_documents: int
    fresh_starts: FreshStartResult | None
    repeats: RepeatResult | None
    keys: KeyResult | None


def measure_history(
    model: EvaluatedModel,
    texts: Sequence[IntArray],
    tasks: Sequence[KeyTask],
    *,
    reach: int,
    settings: HistorySettings,
    autocast: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> HistoryResult:
    """Measures `model` on `texts`, the ids [N] of whole documents, on the device it is on, in bf16 if `autocast`.

    `log` gets a line after each measurement. Raises ConfigError when documents are too short for one.
    """
    rows = settings.max_rows
    fresh, repeated, asked = None, None, None
    if settings.starts and settings.spans:
        starts, spans = settings.starts, settings.spans
        fresh = measure_fresh_starts(
            model, texts, reach=reach, starts=starts, spans=spans, max_rows=rows, autocast=autocast
        )
        log("history: fresh starts are measured")
    if settings.repeat_distances:
        repeated = measure_repeats(
            model,
            texts,
            reach=reach,
            distances=settings.repeat_distances,
            passages=settings.passages,
            max_rows=rows,
            autocast=autocast,
        )
        log("history: repeated passages are measured")
    if settings.key_contexts and settings.key_distances:
        asked = measure_keys(
            model,
            texts,
            tasks,
            reach=reach,
            contexts=settings.key_contexts,
            distances=settings.key_distances,
            prompts=settings.prompts,
            max_rows=rows,
            autocast=autocast,
        )
    return HistoryResult(reach=reach, num_documents=len(texts), fresh_starts=fresh, repeats=repeated, keys=asked)
