"""The model of a command that runs no engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from service.settings import Settings

Made = TypeVar("Made")


def with_local_model(
    settings: Settings,
    load: Callable[[Path | None, str], LoadedModel[SequenceModel]],
    make: Callable[[LoadedModel[SequenceModel]], Made],
) -> Made:
    """The result of `make` for the model that `load` reads, on the device that a server would take.

    Raises CheckpointError, DeviceUnusable, and the errors of `make`. The server's module, with its web framework, is
    not imported.
    """
    from nsm_core.errors import DeviceUnusable
    from nsm_core.execution.devices import on_device
    from service.settings import naming

    def load_named(device: str) -> LoadedModel[SequenceModel]:
        with naming("model"):
            return load(settings.model, device)

    with naming("device", only=DeviceUnusable):
        return on_device(settings.devices[0], settings.executor, load_named, make)
