"""Where a run's numbers go: progress bar, CSV, TensorBoard (when installed)."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

FIELDS = (
    "step", "tokens", "train_loss", "val_loss", "lr_factor", "grad_norm", "tokens_per_s", "elapsed_s",
    "routing_loss", "dead_slots", "effective_slots", "max_load", "slots_written", "half_life",
)  # fmt: skip


def _header(file: Path) -> list[str]:
    """The columns that the file of an earlier start has."""
    with file.open(newline="") as lines:
        return next(csv.reader(lines), list(FIELDS))


def _tensorboard_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # an extra: nsm[train]
    except ImportError:
        return None
    return SummaryWriter(str(directory))


class TrainLog:
    """One row each time `write` is called; a resumed run appends to its own file."""

    def __init__(self, directory: Path, *, total_steps: int, first_step: int, enabled: bool) -> None:
        self._enabled = enabled
        self._started = time.monotonic()
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", disable=None if enabled else True)
        if not enabled:
            return
        file = directory / "log.csv"
        is_new = first_step == 0 or not file.exists()
        fields = FIELDS if is_new else _header(file)
        self._file = file.open("w" if is_new else "a", newline="")
        self._csv = csv.DictWriter(self._file, fields, extrasaction="ignore")
        if is_new:
            self._csv.writeheader()
        self._board = _tensorboard_writer(directory / "tensorboard")

    def advance(self) -> None:
        """One more step is done."""
        self._bar.update()

    def write(self, row: dict[str, float]) -> None:
        """`row` holds some of FIELDS; elapsed time is added."""
        if not self._enabled:
            return
        row = {**row, "elapsed_s": round(time.monotonic() - self._started, 1)}
        self._csv.writerow(row)
        self._file.flush()
        self._bar.set_postfix(loss=f"{row['train_loss']:.3f}", refresh=False)
        self._bar.write("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, int(row["step"]))

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._enabled:
            self._file.close()
            if self._board is not None:
                self._board.close()
