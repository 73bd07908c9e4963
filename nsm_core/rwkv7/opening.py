"""Opens RWKV-7 models as people have them: files of any layout, with their tokenizer and chat template."""

from __future__ import annotations

import functools
from pathlib import Path

from nsm_core.errors import CheckpointError
from nsm_core.rwkv7.chat import Chosen, choose_template
from nsm_core.rwkv7.files import Rwkv7Files
from nsm_core.rwkv7.finding import find_files
from nsm_core.rwkv7.reading import ModelTensors
from nsm_core.rwkv7.vocabulary import find_tokenizer
from nsm_core.tokenizer import Tokenizer


class OpenModel:
    """A model of which only headers have been read; every tensor's name and shape is checked.

    Raises CheckpointError, one line that names file and tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = find_files(path)
        self.tensors = ModelTensors(path, self.files.stored, self.files.layout, self.files.hints)

    @property
    def name(self) -> str:
        """Of the directory, or of the file without its ending."""
        return self.path.resolve().name if self.path.is_dir() else self.path.stem

    @functools.cached_property
    def template(self) -> Chosen:
        """The chat template, and why it is not the files' own."""
        return choose_template(self.files)

    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError, which names missing parts and those that do not fit."""
        vocab_size = self.tensors.config.vocab_size
        tokenizer = find_tokenizer(self.files, vocab_size)
        if tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
                f"the tensor emb.weight only {vocab_size} rows"
            )
        return tokenizer


def open_files(path: Path) -> Rwkv7Files:
    """What an engine needs of the model. Reads no tensor but for the fingerprint. Raises as `OpenModel` does."""
    model = OpenModel(path)
    tokenizer = model.tokenizer()
    return Rwkv7Files(
        config=model.tensors.config,
        tensors=model.tensors,
        tokenizer=tokenizer,
        chat_template=model.template.text,
        weight_format=model.tensors.weight_format,
        fingerprint=model.tensors.fingerprint(tokenizer.fingerprint),
        name=model.name,
        created=model.files.modified,
    )
