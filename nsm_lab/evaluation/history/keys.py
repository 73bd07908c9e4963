"""Recall of a key by how many tokens ago it was read: the likeliest of ten, and written out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nsm_core.errors import ConfigError
from nsm_core.execution.base import SequenceModel
from nsm_core.state.spec import State
from nsm_lab.evaluation.history.estimates import Estimate, share_estimate
from nsm_lab.evaluation.history.key_tasks import KeyTask
from nsm_lab.evaluation.history.rows import DocumentMeans, batches, read, spread_rows
from nsm_lab.evaluation.losses import IntArray
from nsm_lab.evaluation.reading import EvaluatedModel, reading, rows_that_fit

DEFAULT_CONTEXTS = (1024, 2048, 8192, 16384, 32768)  # tokens of a prompt
DEFAULT_DISTANCES = (64, 256, 768, 1536, 3072, 6144, 12288, 24576)  # tokens from the key to the end of the prompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyCell:
    """Prompts of `context` tokens in which `distance` tokens follow the key, the question included.

    `is_likeliest`: share of prompts whose right key is likelier than each of nine others; `is_written`: share after
    which the model writes the key (greedy, in the tokens that the tokenizer makes of it).
    """

    context: int
    distance: int
    is_beyond_windows: bool
    num_prompts: int
    is_likeliest: Estimate
    is_written: Estimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyResult:
    """One cell for each context and each distance that it has room for."""

    num_choices: int
    cells: tuple[KeyCell, ...]

    @property
    def chance(self) -> float:
        return 1 / self.num_choices


def measure_keys(
    model: EvaluatedModel,
    texts: Sequence[IntArray],
    tasks: Sequence[KeyTask],
    *,
    reach: int,
    contexts: Sequence[int] = DEFAULT_CONTEXTS,
    distances: Sequence[int] = DEFAULT_DISTANCES,
    prompts: int = 1,
    max_rows: int = 32,
    autocast: bool = False,
) -> KeyResult:
    """Up to `prompts` prompts from each of `texts` (ids [N] of a document) for each context and distance.

    Prompt i of a cell asks for task i, from the first again when there are fewer tasks, which must all have equally
    many tokens. `reach`: see `attention_reach`. Raises ConfigError when documents and contexts leave no room for any
    distance.
    """
    _require_equal_lengths(tasks)
    cells: list[KeyCell] = []
    with reading(model, autocast=autocast) as device:
        for context in sorted(contexts):
            rows = [row for number, tokens in enumerate(texts) for row in spread_rows(number, tokens, context, prompts)]
            fitting = [distance for distance in sorted(distances) if _has_room(tasks[0], context, distance)]
            outcomes = Outcomes()
            asked = itertools.cycle(tasks)
            for documents, ids in batches(rows, rows_that_fit(model, max_rows), device):
                own_tasks = list(itertools.islice(asked, len(ids)))
                for distance, (is_likeliest, is_written) in _answers(model, ids, own_tasks, fitting):
                    outcomes.likeliest.add(distance, documents, is_likeliest)
                    outcomes.written.add(distance, documents, is_written)
            cells.extend(outcomes.cells(context, len(rows), reach))
    if not cells:
        raise ConfigError("no document and no context is long enough for a key at one of the distances")
    return KeyResult(num_choices=len(tasks[0].answers), cells=tuple(cells))


class Outcomes:
    """What became of the prompts of one context, by distance."""

    def __init__(self) -> None:
        self.likeliest, self.written = DocumentMeans(), DocumentMeans()

    def cells(self, context: int, num_prompts: int, reach: int) -> Iterator[KeyCell]:
        written = self.written.means()
        for distance, shares in self.likeliest.means().items():
            yield KeyCell(
                context=context,
                distance=distance,
                is_beyond_windows=distance > reach,
                num_prompts=num_prompts,
                is_likeliest=share_estimate(shares),
                is_written=share_estimate(written[distance]),
            )


def _require_equal_lengths(tasks: Sequence[KeyTask]) -> None:
    shapes = {(len(task.needle), len(task.question), *map(len, task.answers)) for task in tasks}
    if len(shapes) != 1:
        raise ConfigError(f"key tasks must all have equally many tokens, got {len(shapes)} different lengths")


def _has_room(task: KeyTask, context: int, distance: int) -> bool:
    """Whether the question fits behind the key, and the key into the prompt with a token before it."""
    return len(task.question) <= distance < context - len(task.needle)


def _answers(
    model: SequenceModel, ids: Tensor, tasks: Sequence[KeyTask], distances: Sequence[int]
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """ids [B, context]; for each distance [B] bool: whether the right key is the likeliest, and whether it is written.

    Key and question overwrite the text's tokens where they stand, so all prompts have one length. The text up to a key
    is read once for all nearer ones.
    """
    needle, question = (_stacked([getattr(task, name) for task in tasks], ids) for name in ("needle", "question"))
    answers = torch.stack([_stacked(task.answers, ids) for task in tasks], dim=1)  # [choices, B, length]
    state, position, context = model.initial_state(len(ids)), 0, ids.shape[1]
    for distance in sorted(distances, reverse=True):
        start = context - distance - needle.shape[1]
        state = read(model, ids[:, position:start], state)
        position = start
        filler = ids[:, context - distance : context - question.shape[1]]
        after_text = read(model, torch.cat((needle, filler), dim=1), state)
        hidden, after_question = model.forward(question, after_text)
        yield distance, _judge(model, hidden[:, -1], after_question, answers)


def _stacked(rows: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


def _judge(model: SequenceModel, hidden: Tensor, state: State, answers: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [B, d] and the state after the question; answers [choices, B, length], the right one first."""
    totals: list[Tensor] = []
    is_written = torch.empty(0)
    for number, answer in enumerate(answers):
        later = hidden[:, None]
        if answer.shape[1] > 1:
            following, _ = model.forward(answer[:, :-1], state)
            later = torch.cat((later, following), dim=1)
        logits = model.logits(later)
        totals.append(torch.log_softmax(logits, dim=-1).gather(-1, answer[..., None])[..., 0].sum(dim=1))
        if number == 0:
            # greedy decoding writes the key if each of its tokens is the likeliest after those before it
            is_written = (logits.argmax(dim=-1) == answer).all(dim=1)
    right, *others = totals
    return right > torch.stack(others).amax(dim=0), is_written
