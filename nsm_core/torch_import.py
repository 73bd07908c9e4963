"""Imports torch for a server: what only training, compilers and exporters use comes when somebody asks for it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterator, Sequence

# How operators compute shapes on the device `meta`: 0.2 s of CPU time and 18 MiB, which `import torch` always pays
META_KERNELS = "torch._meta_registrations"
# A quarter of the modules that `import torch` reads: each is read when something of it is used for the first time
DEFERRED = (
    "pynvml",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.mps",
    "torch.mtia",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.utils.data",
)
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # devices of other packages; looks through all that are installed


def import_torch() -> types.ModuleType:
    """torch; if it is imported here for the first time, without META_KERNELS and DEFERRED.

    A later import of META_KERNELS registers them, as `complete_torch` does. Whoever uses a module of DEFERRED gets it.
    """
    if "torch" in sys.modules:
        return sys.modules["torch"]
    placeholder = sys.modules.setdefault(META_KERNELS, types.ModuleType(META_KERNELS))
    try:
        with deferring(DEFERRED), modules_by_name(), _no_other_devices():
            torch = importlib.import_module("torch")
    finally:
        del sys.modules[META_KERNELS]
    package, _, name = META_KERNELS.rpartition(".")
    if vars(sys.modules[package]).get(name) is placeholder:
        delattr(sys.modules[package], name)
    return torch


def complete_torch() -> None:
    """Imports what `import_torch` left out, for those who compile or export."""
    importlib.import_module(META_KERNELS)
    for name in DEFERRED:
        dir(importlib.import_module(name))  # any use of a deferred module reads it


@contextlib.contextmanager
def deferring(names: Sequence[str]) -> Iterator[None]:
    """Modules of these names that are imported for the first time meanwhile are read at their first use."""
    finder = _DeferringFinder(frozenset(names))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _DeferringFinder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


@contextlib.contextmanager
def modules_by_name() -> Iterator[None]:
    """Meanwhile `inspect.getmodule` believes the module's name that an object has.

    Its own search resolves the path of every imported module, 20,000 calls of the system, whenever torch notes where an
    operator is defined. It would also read the modules that are deferred.
    """
    found_by_path = inspect.getmodule
    inspect.getmodule = _module_by_name
    try:
        yield
    finally:
        inspect.getmodule = found_by_path


def _module_by_name(object: object, _filename: str | None = None) -> types.ModuleType | None:
    if isinstance(object, types.FrameType):
        name = object.f_globals.get("__name__")
    else:
        name = getattr(object, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


@contextlib.contextmanager
def _no_other_devices() -> Iterator[None]:
    """Of the two that a model may be on, CPU and GPU, torch has both without other packages."""
    if AUTOLOAD in os.environ:
        yield
        return
    os.environ[AUTOLOAD] = "0"
    try:
        yield
    finally:
        del os.environ[AUTOLOAD]
