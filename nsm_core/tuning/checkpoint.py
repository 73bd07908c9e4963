"""Where a tuning run is, as one safetensors file that is there as a whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nsm_core.errors import CheckpointError, reason_of

KEY = "run"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """After `step` steps. `tensors`: `tuned.NAME`, `best.NAME`, and Adam's moments `first.NAME` and `second.NAME`."""

    step: int
    num_tokens: int
    num_worse: int
    best_step: int
    best_loss: float
    start_loss: float
    tensors: Mapping[str, Tensor]

    def save(self, path: Path, *, run_id: str) -> None:
        """`run_id`: names model, config and examples, so that no other run goes on from it. Raises OSError, and leaves
        nothing then.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["tensors"]
        metadata = {KEY: json.dumps({"run_id": run_id, **fields})}
        partial = path.with_name(path.name + ".partial")
        raw = save({name: value.cpu().contiguous() for name, value in self.tensors.items()}, metadata)
        try:
            partial.write_bytes(raw)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path, *, run_id: str) -> Checkpoint | None:
        """None where there is none of this run. Raises CheckpointError for a damaged file."""
        if not path.exists():
            return None
        try:
            with safe_open(str(path), framework="pt") as file:
                fields = json.loads((file.metadata() or {})[KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            return None if fields.pop("run_id") != run_id else cls(**fields, tensors=tensors)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"cannot read the checkpoint {path}: {reason_of(error)}") from error
