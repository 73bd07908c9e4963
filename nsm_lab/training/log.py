"""The log of a run: progress bar, CSV, TensorBoard (if installed)."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

FIELDS = (
    "step", "tokens", "train_loss", "val_loss", "lr_factor", "grad_norm", "tokens_per_s", "elapsed_s",
    "routing_loss", "dead_slots", "effective_slots", "max_load", "slots_written", "half_life",
)  # fmt: skip

LOG_FILE = "log.csv"
QUIET_S = 20.0  # longest silence, if steps and validation batches are shorter


def log_line(line: str) -> None:
    """Prints a line about the run to standard error, above progress bars."""
    tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


def _header(file: Path) -> list[str]:
    """The columns of an existing log file."""
    with file.open(newline="") as lines:
        return next(csv.reader(lines), list(FIELDS))


def _tensorboard_writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # of the extra `lab`
    except ImportError:
        return None
    return SummaryWriter(str(directory))


class TrainLog:
    """One row each time `write` is called; a resumed run appends to its own file."""

    def __init__(
        self,
        directory: Path,
        *,
        total_steps: int,
        first_step: int,
        enabled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled = enabled
        self._clock = clock
        self._total_steps, self._first_step, self._done = total_steps, first_step, first_step
        self._started = self._last_line_s = clock()
        self._bar = tqdm(total=total_steps, initial=first_step, unit="step", disable=None if enabled else True)
        if not enabled:
            return
        file = directory / LOG_FILE
        is_new = first_step == 0 or not file.exists()
        fields = FIELDS if is_new else _header(file)
        self._file = file.open("w" if is_new else "a", newline="")
        self._csv = csv.DictWriter(self._file, fields, extrasaction="ignore")
        if is_new:
            self._csv.writeheader()
        self._board = _tensorboard_writer(directory / "tensorboard")

    def advance(self) -> None:
        """Counts a finished step. Prints a line for the first, and for a step after a long silence."""
        self._bar.update()
        self._done += 1
        self.progress(f"step {self._done} of {self._total_steps}", at_once=self._done == self._first_step + 1)

    def progress(self, line: str, *, at_once: bool = False) -> None:
        """Prints a line with the elapsed time after a long silence, or always if `at_once`."""
        now = self._clock()
        if self._enabled and (at_once or now - self._last_line_s >= QUIET_S):
            log_line(f"{line}, {now - self._started:.0f} s")
            self._last_line_s = now

    def write(self, row: dict[str, float]) -> None:
        """`row` holds some of FIELDS; elapsed time is added."""
        if not self._enabled:
            return
        row = {**row, "elapsed_s": round(self._clock() - self._started, 1)}
        self._csv.writerow(row)
        self._file.flush()
        self._bar.set_postfix(loss=f"{row['train_loss']:.3f}", refresh=False)
        self._bar.write("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
        sys.stdout.flush()  # readers of a pipe get it at once
        self._last_line_s = self._clock()
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
