"""What becomes visible for one gateway, gathered for its next message."""

from __future__ import annotations

import array
from collections import Counter

import numpy as np
import numpy.typing as npt

from nsm_core.engine.request import Event, Finished, PromptScored, PromptState, TokenEvent
from nsm_core.wire.local import Step


def step_of_tokens(numbers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], num_others: int) -> Step:
    """A step with nothing but plain tokens, whose text the gateway makes. Both [n]. `num_others`: see `Step`."""
    return Step(
        numbers.astype(np.uint32).tobytes(), ids.astype(np.uint32).tobytes(), b"", b"", [], [], [], [], [], num_others
    )


class StepCollector:
    """Events by the gateway's numbers of its requests, until `take`."""

    def __init__(self) -> None:
        self._begin()

    def count_tokens(self) -> Counter[int]:
        """How many tokens of which request wait."""
        counts = Counter(self._numbers)
        counts.update(self._shown_numbers)
        counts.update(number for number, _ in self._step.tokens)
        return counts

    def add_tokens(self, numbers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> None:
        """Plain tokens, whose text the gateway makes. Both [n]."""
        self._numbers.frombytes(numbers.astype(np.uint32).tobytes())
        self._ids.frombytes(ids.astype(np.uint32).tobytes())

    def add(self, number: int, event: Event, *, has_free_text: bool) -> None:
        """`has_free_text`: whether the gateway makes the text."""
        if isinstance(event, TokenEvent):
            self._add_token(number, event, has_free_text)
        elif isinstance(event, Finished):
            self._step.ends.append((number, event))
        elif isinstance(event, PromptState):
            self._step.states.append((number, event))
        elif isinstance(event, PromptScored):
            self._step.scored.append((number, event))

    def _add_token(self, number: int, event: TokenEvent, has_free_text: bool) -> None:
        if event.logprob is not None or event.routing is not None:
            self._step.tokens.append((number, event))
        elif has_free_text:
            self._numbers.append(number)
            self._ids.append(event.token_id)
        else:
            self._shown_numbers.append(number)
            self._shown_ids.append(event.token_id)
            self._step.texts.append(event.text)

    def take(self, num_others: int) -> Step:
        """All of it. `num_others`: requests of other gateways."""
        step = self._step
        step.numbers, step.ids = self._numbers.tobytes(), self._ids.tobytes()
        step.shown_numbers, step.shown_ids = self._shown_numbers.tobytes(), self._shown_ids.tobytes()
        step.num_others = num_others
        self._begin()
        return step

    def _begin(self) -> None:
        self._numbers, self._ids = array.array("I"), array.array("I")
        self._shown_numbers, self._shown_ids = array.array("I"), array.array("I")
        self._step = Step(b"", b"", b"", b"", [], [], [], [], [], 0)
