"""Loads an RWKV-7 model for an engine: config, tokenizer and names now, tensors when an executor asks for them."""

from __future__ import annotations

from pathlib import Path

import torch

from nsm_core.loaded_model import LoadedModel, numerics_class
from nsm_core.rwkv7.claims import ARCHITECTURE
from nsm_core.rwkv7.files import Rwkv7Files
from nsm_core.rwkv7.model import Rwkv7Model
from nsm_core.rwkv7.opening import open_files
from nsm_core.rwkv7.tensors import num_parameters


def load_rwkv7(path: Path, device: str = "cpu") -> LoadedModel[Rwkv7Model]:
    """Opens a file or directory of any known layout. Raises CheckpointError that names file and tensor."""
    return loaded_from(open_files(path), torch.device(device))


def loaded_from(files: Rwkv7Files, device: torch.device) -> LoadedModel[Rwkv7Model]:
    """The model of opened files, for states on `device`."""
    num_ids = files.tokenizer.vocab_size
    return LoadedModel(
        architecture=ARCHITECTURE,
        model=Rwkv7Model(files.config, files.tensors, device, num_ids=num_ids),
        device=device,
        tokenizer=files.tokenizer,
        chat_template=files.chat_template,
        fingerprint=files.fingerprint,
        numerics=numerics_class(device),
        name=files.name,
        created=files.created,
        num_parameters=num_parameters(files.config),
        weight_format=files.weight_format,
    )
