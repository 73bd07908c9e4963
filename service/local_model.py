"""The model of this process, for a server's engine and for commands. No web framework."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from nsm_core.control_group import usable_threads
from nsm_core.engine.stream_pace import MAX_INTERVAL_S
from nsm_core.errors import ConfigError, DeviceUnusable
from nsm_core.execution.cuda import early_start
from nsm_core.execution.names import AUTO_DEVICE
from nsm_core.heap import limit_arenas
from nsm_core.tokenizer import encode_on_one_thread
from nsm_core.torch_import import import_torch, modules_by_name
from service.settings import Settings, label, naming

if TYPE_CHECKING:
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from service.backends.local import LocalBackend

Made = TypeVar("Made")

NUM_ARENAS = 2  # one for each thread kept 130 MB that turns had freed


def limit_threads_and_memory() -> None:
    """Of this process, once; its children inherit what concerns threads."""
    encode_on_one_thread()
    limit_arenas(NUM_ARENAS)


def begin_on_device(settings: Settings) -> None:
    """Before torch is imported: what a GPU needs time for happens meanwhile."""
    device = settings.devices[0]
    if device != "cpu" and not settings.executor.startswith("native"):
        early_start.begin(device)


def make_local_backend(settings: Settings, *, num_engines: int = 1, named_by: str = "model") -> LocalBackend:
    """The model in this process. `num_engines`: of the server, each in a process of its own. `named_by`: the setting
    that names the model's files, for errors.

    Raises CheckpointError or ConfigError.
    """
    if "torch" not in sys.modules:
        begin_on_device(settings)
    with modules_by_name():
        import_torch()
        from nsm_core.engine.step_stats import meter_of
        from nsm_core.execution.devices import engine_config
        from service.backends.local import LocalBackend

    def make(loaded: LoadedModel[SequenceModel]) -> LocalBackend:
        held_bytes = settings.state_cache_mb * 2**20 * max(1, settings.workers)
        config = dataclasses.replace(engine_config(settings.engine_limits(), loaded), held_state_bytes=held_bytes)
        meter = meter_of(loaded.device, num_engines=num_engines) if settings.energy else None
        with naming("executor", only=ConfigError):
            return LocalBackend(
                loaded,
                config,
                executor=settings.executor,
                meter=meter,
                max_interval_s=MAX_INTERVAL_S,
            )

    try:
        return with_model(settings, make, is_whole=False, named_by=named_by)
    except MemoryError as error:
        raise ConfigError(f"{label('max_slots')} is too large: {error}") from error


@functools.cache
def _threads_at_start() -> int:
    """Torch's number when this process loads its first model; a capture of routing sets another for a moment."""
    return int(import_torch().get_num_threads())


def with_model(
    settings: Settings,
    make: Callable[[LoadedModel[SequenceModel]], Made],
    *,
    is_whole: bool = True,
    named_by: str = "model",
) -> Made:
    """What `make` makes of the model, on the device and with the threads of the settings.

    `is_whole`: `make` needs all weights in fp32, and not only `choose_executor`. `named_by`: as above.

    Raises CheckpointError, DeviceUnusable, and what `make` raises.
    """
    torch = import_torch()  # a gateway whose models run elsewhere needs none
    from nsm_core.architectures import load_model, open_model
    from nsm_core.execution.devices import on_device

    torch.get_num_threads()  # a thread's first question takes the number that any thread set last
    torch.set_num_threads(settings.num_threads or usable_threads(_threads_at_start()))

    def load(device: str) -> LoadedModel[SequenceModel]:
        with naming(named_by):
            return (load_model if is_whole else open_model)(settings.model, device)

    # for auto alone, only an executor that was asked for can be without its device
    with naming("executor" if settings.device == AUTO_DEVICE else "device", only=DeviceUnusable):
        return on_device(settings.devices[0], settings.executor, load, make)
