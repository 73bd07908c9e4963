"""Imports FastAPI for a server: models of old kinds, and of descriptions that few read, come when they are needed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import cast

OLD_MODELS = "pydantic.v1"


@contextlib.contextmanager
def importing_fastapi() -> Iterator[None]:
    """Meanwhile what is imported gets it: OLD_MODELS are not there, and those of OpenAPI are prepared at first use."""
    with _without(OLD_MODELS):
        if "fastapi" not in sys.modules:
            with _preparing_later():
                importlib.import_module("fastapi")
        yield


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """FastAPI asks of each parameter whether it is a model of that module, which it imports to know. None here is."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = cast(ModuleType, None)  # so importing it fails
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def _preparing_later() -> Iterator[None]:
    """Pydantic builds the validators of models that are defined meanwhile when one of them is used."""
    from pydantic import BaseModel

    before = BaseModel.model_config
    BaseModel.model_config = {**before, "defer_build": True}
    try:
        yield
    finally:
        BaseModel.model_config = before
