"""The interpreter of the kernels' compiler, with products as a GPU makes them."""

from __future__ import annotations

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
