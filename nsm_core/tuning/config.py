"""How a start state is trained, and in which order it sees the examples. No torch here."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from nsm_core.errors import ConfigError, InvalidRequest
from nsm_core.tuning.examples import Example

WARMUP_STEPS = 10
FINAL_RATE_SHARE = 0.1  # of the rate, after a cosine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """`num_epochs`: passes over the examples. `rate`: Adam's, after the warm-up; it falls to a tenth. `patience`:
    held-out losses without a better one before the run stops. `eval_every`: steps between two of them; None: 20 in a
    run. `max_tokens_at_once`: of the examples, with padding, whose activations are in memory together.
    """

    num_epochs: int = 3
    batch_size: int = 8
    rate: float = 0.1
    seed: int = 0
    patience: int = 5
    eval_every: int | None = None
    max_tokens_at_once: int = 2048

    def __post_init__(self) -> None:
        for name in ("num_epochs", "batch_size", "patience", "max_tokens_at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.eval_every is not None and self.eval_every < 1:
            raise ConfigError(f"eval_every must be at least 1, got {self.eval_every}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"rate must be a finite number above 0, got {self.rate}")

    def num_steps(self, num_examples: int) -> int:
        return self.num_epochs * math.ceil(num_examples / self.batch_size)

    def steps_between(self, num_examples: int) -> int:
        """From one held-out loss to the next."""
        return self.eval_every or max(1, self.num_steps(num_examples) // 20)

    def batch(self, examples: Sequence[Example], step: int) -> list[Example]:
        """The examples of a step, from 0; each epoch has an order of its own."""
        epoch, number = divmod(step, math.ceil(len(examples) / self.batch_size))
        order = random.Random(f"{self.seed} {epoch}").sample(examples, len(examples))
        return order[number * self.batch_size : (number + 1) * self.batch_size]

    def rate_at(self, step: int, num_steps: int) -> float:
        """A linear warm-up, then a cosine."""
        share = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * step / num_steps)) / 2
        return self.rate * share * min(1.0, (step + 1) / WARMUP_STEPS)


def split_examples(examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """For training and held out: a tenth, at least one, drawn by the seed. Raises InvalidRequest for one example."""
    if len(examples) < 2:
        raise InvalidRequest("the file must have at least 2 examples where none are given to hold out, it has 1")
    held_out = {*random.Random(seed).sample(range(len(examples)), max(1, len(examples) // 10))}
    rest = [example for index, example in enumerate(examples) if index not in held_out]
    return rest, [examples[index] for index in sorted(held_out)]
