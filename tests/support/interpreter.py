"""The interpreter of the kernels' compiler, with products as a GPU makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def sum_products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a product then has the same bits wherever it lies in a tile. The host's library, which the interpreter
    uses, sums some rows of a tile in another order than others.
    """
    from triton.runtime import interpreter

    def create_dot(_: object, a: Any, b: Any, d: Any, *__: object) -> Any:
        products = np.einsum("ik,kj->ij", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(products + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def patch_language_once_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter puts its own operations into the language for each function that a kernel calls, all of them
    again, and looks up the array type of each value in a table that it makes for it. That is a third of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    any_array_type = interpreter._get_np_dtype
    scalar_array_type = functools.cache(any_array_type)  # types of pointers and blocks have no hash

    def array_type(dtype: Any) -> Any:
        return scalar_array_type(dtype) if type(dtype) is language.dtype else any_array_type(dtype)

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = set[str]()  # whose language is patched in the launch that runs

    @functools.wraps(patch)
    def patch_once(fn: Callable[..., Any]) -> Any:
        if fn.__module__ in modules:
            return interpreter._LangPatchScope()
        modules.add(fn.__module__)
        return patch(fn)

    def launch_with_own_patches(executor: Any, *args: Any, **kwargs: Any) -> None:
        modules.clear()
        launch(executor, *args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_with_own_patches)
    monkeypatch.setattr(interpreter, "_get_np_dtype", array_type)
