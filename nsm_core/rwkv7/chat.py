"""The chat template of an RWKV-7 model: from its files if it can be rendered turn by turn, or else RWKV's text form."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nsm_core.chat_template import RWKV, get_template
from nsm_core.errors import CheckpointError
from nsm_core.formats.random_access import RandomAccessFile
from nsm_core.rwkv7.claims import read_json
from nsm_core.rwkv7.finding import Found
from nsm_core.tokenizer import DESCRIPTION_FILE

TEMPLATE_FILE = "chat_template.jinja"
_NAMES_OF_OTHERS = {"rwkv-world": RWKV}  # what llama.cpp calls RWKV's text form


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """`text`: a template's name, or Jinja. `note`: why it is not the files' own; None if it is or they have none."""

    text: str
    note: str | None = None


def choose_template(found: Found) -> Chosen:
    """A template that cannot be used is replaced, not refused: the model can be served without it."""
    try:
        given = _given(found)
        if given is None:
            return Chosen(RWKV)
        text = _NAMES_OF_OTHERS.get(given, given)
        get_template(text)
        return Chosen(text)
    except CheckpointError as error:
        return Chosen(RWKV, str(error))


def _given(found: Found) -> str | None:
    if "architecture" in found.fields and "chat_template" in found.fields:
        return str(found.fields["chat_template"])
    if found.gguf is not None and (text := found.gguf.text("tokenizer.chat_template")) is not None:
        return text
    if (found.directory / TEMPLATE_FILE).is_file():
        return _read_text(found.directory / TEMPLATE_FILE)
    if (found.directory / DESCRIPTION_FILE).is_file():
        return _default_of(read_json(found.directory / DESCRIPTION_FILE).get("chat_template"))
    return None


def _default_of(value: Any) -> str | None:
    """The one template, or that of the name `default` among several."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    from nsm_core.jinja_template import MAX_TEMPLATE_CHARS  # models of this project need no Jinja

    file = RandomAccessFile(path)
    if file.size > 4 * MAX_TEMPLATE_CHARS:
        raise CheckpointError(f"{path} has {file.size} bytes: no template")
    return file.read(0, file.size).decode("utf-8", "replace")
