"""RWKV-7 on a GPU, beside flash-linear-attention: `python -m benchmarks.rwkv7_gpu`. One line of JSON a result.

Random weights in the sizes of public models, the same for both. Of each: a greedy step at several numbers of rows, with
logits and choice, beside its floor (the matrices once, and each row's state read and written, over the rate of a large
copy on this device); and prompts. Of ours bf16 matrices and fp32 states, in graphs; of the other bf16 throughout but
its states, launched from Python, as its own classes do it.

`--ours` leaves the other library out, which must be installed (`flash-linear-attention`, `transformers`); `--fla`
measures it alone. Its kernels are tuned at the first call of a kind, which is a row of its own. A prompt's choose among
several hundred configurations, 135 of them of one kernel, and compile them one after the other: minutes.
`--compile-workers 16` compiles all of them before, in so many processes; the choice then finds them in Triton's cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.rwkv7_models import SIZES, VOCABULARY, config_of
from nsm_core.execution.cuda.options import CudaOptions
from nsm_core.execution.rwkv7.cuda.executor import Rwkv7CudaExecutor
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.layouts import HUGGING_FACE
from nsm_core.rwkv7.model import Rwkv7Model
from tests.support.rwkv7 import random_tensors

ROWS, PROMPTS = (1, 8, 64, 256), (1024, 32768, 131072)
STEPS, WARM_STEPS = 30, 5
COPIED_BYTES = 1 << 30

Row = dict[str, Any]


def seconds_of(work: Callable[[], object], repeats: int = 3) -> list[float]:
    """Of each call after one that is not counted, the device's work included."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times[1:]


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = torch.empty(2, COPIED_BYTES, dtype=torch.uint8, device="cuda")
    return 2 * COPIED_BYTES / statistics.median(seconds_of(lambda: target.copy_(source), 10))


def prompt_ids(length: int) -> list[int]:
    ids: list[int] = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return ids


class Ours:
    """The executor of this project, steps as an engine makes them."""

    def __init__(self, model: Rwkv7Model) -> None:
        self._executor = Rwkv7CudaExecutor(model, num_rows=max(ROWS), options=CudaOptions())
        self.matrix_bytes = self._executor.weights.num_bytes
        self.state_bytes = model.state_spec.num_bytes
        self._open = 0

    def open(self, num_rows: int) -> None:
        """So many rows at the start of a text."""
        pool = self._executor.pool
        for row in range(self._open):
            pool.free(row)
        for row in range(num_rows):
            pool.lease(row)
            pool.write(row, self._executor.initial)
        self._open = num_rows

    def step(self, ids: list[int]) -> list[int]:
        logits = self._executor.logits(self._executor.step(range(len(ids)), ids))
        return [int(token) for token in logits.argmax(dim=1).tolist()]

    def read(self, ids: list[int]) -> Tensor:
        """Logits [V] after the last."""
        (hidden,) = self._executor.read((0,), (ids,))
        return self._executor.logits(hidden[-1:])[0]


class TheirsByFla:
    """flash-linear-attention's model with the same weights."""

    def __init__(self, config: Rwkv7Config, tensors: dict[str, Tensor]) -> None:
        from fla.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM

        own = RWKV7Config(
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            head_dim=config.head_size,
            intermediate_size=config.hidden,
            decay_low_rank_dim=config.decay_rank,
            gate_low_rank_dim=config.gate_rank,
            a_low_rank_dim=config.rate_rank,
            v_low_rank_dim=config.value_rank,
            vocab_size=config.vocab_size,
        )
        with torch.device("cuda"):
            self._model = RWKV7ForCausalLM(own).bfloat16().eval()
        targets = self._model.state_dict()
        for name, value in tensors.items():
            turned = value.t() if HUGGING_FACE.is_turned(name) else value
            target = targets.pop(HUGGING_FACE.name_of(name))
            target.copy_(turned.reshape(target.shape))
        if targets:
            raise ValueError(f"weights without a counterpart: {sorted(targets)}")
        self._cache: Any = None

    def open(self, num_rows: int) -> None:
        self._cache = None

    def step(self, ids: list[int]) -> list[int]:
        out = self._model(torch.tensor(ids, device="cuda")[:, None], past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        return [int(token) for token in out.logits[:, -1].argmax(dim=1).tolist()]

    def read(self, ids: list[int]) -> Tensor:
        out = self._model(
            torch.tensor([ids], device="cuda"), past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = out.past_key_values
        logits: Tensor = out.logits[0, -1]
        return logits.float()


def measure(
    name: str, subject: Ours | TheirsByFla, rows: Sequence[int], prompts: Sequence[int], repeats: int
) -> Iterator[Row]:
    for num_rows in rows:
        subject.open(num_rows)
        ids, times = list(range(1, num_rows + 1)), []
        for _ in range(WARM_STEPS + STEPS):
            started = time.perf_counter()
            ids = subject.step(ids)  # the choice comes to the host: the device has ended
            times.append(time.perf_counter() - started)
        step_s = statistics.median(times[WARM_STEPS:])
        yield {"of": name, "rows": num_rows, "step_ms": step_s * 1e3, "tokens_per_s": num_rows / step_s}
    for length in prompts:
        ids = prompt_ids(length)

        def read(ids: list[int] = ids) -> None:
            subject.open(1)
            subject.read(ids)

        started = time.perf_counter()
        read()
        torch.cuda.synchronize()
        yield {"of": name, "prompt": length, "first_call_s": time.perf_counter() - started}
        times = seconds_of(read, repeats)
        yield {"of": name, "prompt": length, "seconds": min(times), "tokens_per_s": length / min(times)}


def compile_configurations(size: str, prompt: int, workers: int) -> Iterator[Row]:
    """Leaves all configurations of fla's kernels in Triton's cache: each process compiles a share of them."""
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(_compile_share, size, prompt, number, workers) for number in range(workers)]
    failed = [str(share.exception()) for share in shares if share.exception() is not None]
    yield {"of": "fla", "compiled_in_s": time.perf_counter() - started, "failed": failed}


@torch.inference_mode()
def _compile_share(size: str, prompt: int, number: int, count: int) -> None:
    """Reads a prompt and makes a step with a model of two layers, whose kernels choose among every `count`-th
    configuration."""
    from triton.runtime.autotuner import Autotuner

    begin = Autotuner.__init__

    def with_share(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        share = configs and (configs[number::count] or [configs[number % len(configs)]])
        begin(self, fn, arg_names, share, *args, **kwargs)

    Autotuner.__init__ = with_share  # before the library makes its kernels
    config = dataclasses.replace(config_of(size), num_layers=2)
    model = TheirsByFla(config, random_tensors(config))
    model.read(prompt_ids(prompt))
    model.open(1)
    model.step([1])


def floors(ours: Ours, rows: Sequence[int]) -> Iterator[Row]:
    rate = copy_rate()
    for num_rows in rows:
        moved = ours.matrix_bytes + 2 * num_rows * ours.state_bytes
        yield {"floor_of_rows": num_rows, "ms": moved / rate * 1e3, "copy_GB_per_s": rate / 1e9}


@torch.inference_mode()
def measure_size(
    size: str,
    rows: Sequence[int],
    prompts: Sequence[int],
    *,
    libraries: Sequence[str],
    repeats: int,
    compile_workers: int,
) -> Iterator[Row]:
    config = config_of(size)
    tensors = random_tensors(config)
    model = Rwkv7Model(config, {name: value.cuda() for name, value in tensors.items()}, "cuda")
    text = prompt_ids(300)
    hidden, _ = model.forward(torch.tensor([text], device="cuda"), model.initial_state(1))
    want = model.logits(hidden[0, -1])
    model.__dict__.pop("weights")  # its fp32 copy of all tensors
    subjects: dict[str, Ours | TheirsByFla] = {}
    if "ours" in libraries:
        ours = subjects["ours"] = Ours(model)
        yield from floors(ours, rows)
        yield from measure("ours", ours, rows, prompts, repeats)
    if "fla" in libraries:
        if compile_workers and prompts:
            yield from compile_configurations(size, min(prompts), compile_workers)
        subjects["fla"] = TheirsByFla(config, tensors)
        yield from measure("fla", subjects["fla"], rows, prompts, repeats)
    for name, subject in subjects.items():
        subject.open(1)
        got = subject.read(text)
        yield {"of": name, "error_of_logits": float((got - want).norm() / want.norm())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.1B", "0.4B"])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, help="of a step")
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS, help="lengths in tokens")
    parser.add_argument("--repeats", type=int, default=2, help="of a prompt, after two calls that are not counted")
    parser.add_argument("--compile-workers", type=int, default=0, help="processes that compile fla's kernels before")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--ours", action="store_true")
    only.add_argument("--fla", action="store_true")
    arguments = parser.parse_args()
    libraries = ["ours"] if arguments.ours else ["fla"] if arguments.fla else ["ours", "fla"]
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for size in arguments.sizes:
        for row in measure_size(
            size, arguments.rows, arguments.prompts, libraries=libraries, repeats=arguments.repeats,
            compile_workers=arguments.compile_workers,
        ):  # fmt: skip
            print(json.dumps({"size": size, **row}), flush=True)


if __name__ == "__main__":
    main()
