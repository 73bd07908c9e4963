"""The process of one job: `python -m service.tuning.process`, with what to do as a line of JSON on standard input.

It answers with lines of JSON on standard output, and ends when its input does: with the server that started it. It has
the lowest priority and few threads, so that serving is not starved.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from nsm_core.control_group import usable_threads
from nsm_core.errors import InvalidRequest, NsmError, StateMismatch

TRAINING_FILE, VALIDATION_FILE, STATE_FILE, CHECKPOINT_FILE = (
    "training.jsonl",
    "validation.jsonl",
    "state.bin",
    "checkpoint.safetensors",
)
LOWEST_PRIORITY = 19
MAX_EXAMPLE_TOKENS = 1024
MAX_EXAMPLES = 10_000
MAX_TRAINED_TOKENS = 20_000_000  # of all epochs
THREAD_SHARE = 4  # of the processors training has one part in so many, at least one thread
STORAGE_FULL = "storage_full"
NO_ROOM = "the server's disk is full: the job has no room for its files"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is to do. `directory`: with the files of examples, for the checkpoint and the state. `model`: its
    path, or None for the bundled one; `fingerprint`: that it must have. `template`: of chats, or None for the model's.
    `config`: the fields of a TuneConfig.
    """

    directory: str
    model: str | None
    fingerprint: str
    template: str | None
    device: str
    num_threads: int
    config: dict[str, Any]


def tuning_threads(num_threads: int | None) -> int:
    """A share of `num_threads`; None: of the processors that this process may use. Threads of torch that wait for a
    processor which another program keeps busy hold up all others.
    """
    return max(1, (num_threads or usable_threads(os.cpu_count() or 1)) // THREAD_SHARE)


def is_full(error: OSError) -> bool:
    """Whether there was no room on a disk, or none of a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    os.nice(LOWEST_PRIORITY)
    order = Order(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_server, daemon=True).start()
    try:
        _run(order)
    except InvalidRequest as error:
        param = error.param if error.param == "validation_file" else "training_file"
        _say(kind="failed", code=f"invalid_{param}", message=str(error), param=param)
    except NsmError as error:
        _say(kind="failed", code="training_failed", message=str(error), param=None)
    except OSError as error:
        if not is_full(error):
            raise
        _say(kind="failed", code=STORAGE_FULL, message=NO_ROOM, param=None)


def _end_with_server() -> None:
    sys.stdin.read()
    os._exit(1)


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _run(order: Order) -> None:
    import torch

    torch.set_num_threads(order.num_threads)
    from nsm_core.architectures import load_model
    from nsm_core.chat_template import get_template
    from nsm_core.tuning.config import TuneConfig
    from nsm_core.tuning.examples import ExampleLimits
    from nsm_core.tuning.run import TuneData, read_data, run_id_of, tune

    directory, config = Path(order.directory), TuneConfig(**order.config)
    loaded = load_model(None if order.model is None else Path(order.model), order.device)
    if loaded.fingerprint != order.fingerprint:
        raise StateMismatch("the model's files are others than those that the server runs")
    held_out = directory / VALIDATION_FILE
    data = TuneData(
        examples=(directory / TRAINING_FILE).read_bytes(),
        held_out=held_out.read_bytes() if held_out.exists() else None,
        template=get_template(order.template or loaded.chat_template),
        limits=ExampleLimits(max_tokens=MAX_EXAMPLE_TOKENS, max_examples=MAX_EXAMPLES),
    )
    train, rest = read_data(data, loaded, config.seed)
    num_tokens = config.num_epochs * sum(len(example.ids) for example in train)
    if num_tokens > MAX_TRAINED_TOKENS:
        raise InvalidRequest(f"all epochs must read at most {MAX_TRAINED_TOKENS} tokens, they would read {num_tokens}")
    _say(kind="started", num_train=len(train), num_held_out=len(rest), num_steps=config.num_steps(len(train)))
    made = tune(
        loaded,
        config,
        train,
        rest,
        on_report=lambda report: _say(kind="report", **dataclasses.asdict(report)),
        checkpoint=directory / CHECKPOINT_FILE,
        run_id=run_id_of(loaded.fingerprint, config, data),
    )
    partial = directory / f"{STATE_FILE}.partial"
    partial.write_bytes(made.state)
    os.replace(partial, directory / STATE_FILE)
    _say(kind="done")


if __name__ == "__main__":
    main()
