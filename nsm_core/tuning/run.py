"""From files of examples to a tuned state: the whole of a training, for the command and for jobs of a server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from nsm_core.chat_template import ChatTemplate
from nsm_core.errors import CheckpointError, InvalidRequest, NsmError
from nsm_core.hashing import identity, identity_of
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.tuning.checkpoint import Checkpoint
from nsm_core.tuning.config import TuneConfig, split_examples
from nsm_core.tuning.examples import Example, ExampleLimits, ExampleReader
from nsm_core.tuning.tuner import Report, Tuner

HELD_OUT = "validation_file"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneData:
    """`examples`, `held_out`: the bytes of files; without the second a tenth of the first is held out."""

    examples: bytes
    held_out: bytes | None
    template: ChatTemplate
    limits: ExampleLimits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TunedState:
    """`state`: packed by the model's `StateSpec`. `report`: the last one."""

    state: bytes
    report: Report


def read_data(data: TuneData, loaded: LoadedModel[SequenceModel], seed: int) -> tuple[list[Example], list[Example]]:
    """For training, and held out. Raises InvalidRequest, for a held-out file with the param HELD_OUT."""
    reader = ExampleReader(loaded.tokenizer, data.template, data.limits)
    examples = reader.read(data.examples)
    if data.held_out is None:
        return split_examples(examples, seed)
    try:
        return examples, reader.read(data.held_out)
    except InvalidRequest as error:
        error.param = HELD_OUT
        raise


def tune(
    loaded: LoadedModel[SequenceModel],
    config: TuneConfig,
    train: list[Example],
    held_out: list[Example],
    *,
    on_report: Callable[[Report], None] = lambda report: None,
    checkpoint: Path | None = None,
    run_id: str = "",
) -> TunedState:
    """Trains to the end. `checkpoint`: a file from which a run with the same `run_id` goes on; a damaged one is not
    used. Raises NumericalError, or NsmError when no step made the held-out loss better.
    """
    tuner = Tuner(loaded, config, train, held_out)
    if checkpoint is not None:
        before = _load(checkpoint, run_id)
        if before is not None:
            tuner.restore(before)

    def keep(made: Checkpoint) -> None:
        if checkpoint is not None:
            made.save(checkpoint, run_id=run_id)

    last: Report | None = None
    for last in tuner.run(keep):
        on_report(last)
    if last is None:
        raise NsmError("the checkpoint is of a run that had ended")
    if last.best_step == 0:
        raise NsmError(
            f"training made the held-out loss no better than {last.best_loss:.4f}: no state was made; try a lower rate "
            "or more examples"
        )
    return TunedState(state=loaded.model.state_spec.pack(tuner.best_state()), report=last)


def _load(checkpoint: Path, run_id: str) -> Checkpoint | None:
    try:
        return Checkpoint.load(checkpoint, run_id=run_id)
    except CheckpointError:
        return None


def run_id_of(fingerprint: str, config: TuneConfig, data: TuneData) -> str:
    """Equal for runs with the same model, config, template and examples."""
    held_out = "" if data.held_out is None else identity(data.held_out)
    fields = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return identity_of(fingerprint, fields, data.template.jinja, identity(data.examples), held_out)
