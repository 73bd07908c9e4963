"""`nsm info`: the model, its numerics class, the store."""

from __future__ import annotations

import dataclasses
import platform
from typing import TYPE_CHECKING, Any

from nsm_core.distribution import DISTRIBUTION, version_of
from service.cli import options
from service.cli.output import print_fields, print_json

if TYPE_CHECKING:
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from service.settings import Settings

PACKAGES = (DISTRIBUTION, "torch", "tokenizers", "numpy", "fastapi")


def info(
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the model, its state, versions, and where sessions are."""
    from service.settings import load_settings

    settings = load_settings(model=model, device=device, data_dir=data_dir, store=store)
    from nsm_core.torch_import import import_torch

    import_torch()  # before what imports all of it
    from nsm_core.architectures import outline_model
    from service.cli.local_model import with_local_model

    facts = with_local_model(settings, outline_model, lambda loaded: _facts(loaded, settings))
    if as_json:
        print_json(facts)
    else:
        # What a model or a server does not have is no line; in JSON it is null
        print_fields({name.replace("_", " "): _shown(value) for name, value in facts.items() if value is not None})


def _facts(loaded: LoadedModel[SequenceModel], settings: Settings) -> dict[str, Any]:
    from nsm_core.execution.choose import decide_executor
    from nsm_core.model.loader import has_slots
    from nsm_core.model.nsm import NsmModel

    spec, (executor, numerics) = loaded.model.state_spec, decide_executor(loaded, settings.executor)
    config = loaded.model.config if isinstance(loaded.model, NsmModel) else None
    return {
        "model": settings.served_model_name or loaded.name,
        "architecture": loaded.architecture,
        "fingerprint": loaded.fingerprint,
        "device": str(loaded.device),
        "executor": executor,
        "numerics": numerics,
        "parameters": loaded.num_parameters,
        "weights": loaded.weight_format,
        "vocabulary": loaded.tokenizer.vocab_size,
        "chat_template": loaded.chat_template,
        "state_bytes": spec.num_bytes,
        "num_states": config.num_memory_slots if config is not None and has_slots(config) else None,
        "state_layout": [dataclasses.asdict(tensor) for tensor in spec.layout()],
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
        "data_dir": None if settings.data_dir is None else str(settings.data_dir),
        "store": settings.store_name(),
        "state_dtype": settings.state_dtype,
    }


def _shown(value: Any) -> str:
    """A fact for a person."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items()) or "none"
    if isinstance(value, list):
        return "\n".join(_tensor_line(tensor) for tensor in value)
    return str(value)


def _tensor_line(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {tensor['dtype']} {list(tensor['shape'])}"
