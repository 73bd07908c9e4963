"""The executor that was chosen for a model."""

from __future__ import annotations

import dataclasses

from nsm_core.execution.base import ExecutorFactory
from nsm_core.loaded_model import SequenceModel


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenExecutor:
    """`model`: for the factory and for observers: the loaded model, or a copy that needs less memory.

    `numerics`: the class within which equal input gives equal bits, of states that the executor computes.
    """

    name: str
    factory: ExecutorFactory
    model: SequenceModel
    numerics: str
