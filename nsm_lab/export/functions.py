"""The model as functions of tensors alone, which graphs can hold: ids and a state in, logits and a state out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from nsm_core.errors import ConfigError
from nsm_core.layer_pattern import parse_layer_pattern
from nsm_core.model.nsm import NsmModel
from nsm_core.state.spec import StateSpec

MAX_BATCH = 65536  # rows of a call
IDS, LOGITS, NEW = "ids", "logits", "new."  # names of inputs and outputs; a state's tensor comes back as new.<name>


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """One graph. `num_tokens`: None for a step, one token a row, ids [B]; else ids [B, num_tokens]."""

    name: str
    num_tokens: int | None = None

    @property
    def ids_shape(self) -> tuple[int, ...]:
        """Without the batch."""
        return () if self.num_tokens is None else (self.num_tokens,)


STEP = Function("step")


def reading(num_tokens: int) -> Function:
    """Reads exactly this number of tokens of every row at once; logits are those after the last token."""
    return Function("read", num_tokens)


class StateFunction(nn.Module):
    """`forward(ids, *state)` with the state's tensors in the order of its spec -> (logits [B,V], *new state)."""

    def __init__(self, model: NsmModel, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function
        self.names = [tensor.name for tensor in model.state_spec.tensors]

    def forward(self, ids: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, state, strict=True))
        with _Exportable():
            if self.function.num_tokens is None:
                hidden, new = self.model.step(ids, given)
            else:
                hidden, new = self.model.read(ids, given)
                hidden = hidden[:, -1]
            return (self.model.logits(hidden), *(new[name] for name in self.names))


def trace(model: NsmModel, function: Function) -> ExportedProgram:
    """The function as a graph for any number of rows. Raises ConfigError if a layer has none, with the layer's name."""
    spec = model.state_spec
    example = (torch.zeros(3, *function.ids_shape, dtype=torch.int64), *model.initial_state(3).values())
    batch = Dim("batch", min=1, max=MAX_BATCH)
    rows = {0: batch}
    with torch.no_grad():
        return torch.export.export(
            StateFunction(model.eval(), function),
            example,
            dynamic_shapes=(rows, tuple(rows for _ in spec.tensors)),
            strict=False,
        )


def input_names(spec: StateSpec) -> list[str]:
    return [IDS, *(tensor.name for tensor in spec.tensors)]


def output_names(spec: StateSpec) -> list[str]:
    return [LOGITS, *(NEW + tensor.name for tensor in spec.tensors)]


def refuse_kinds(layer_pattern: str, num_layers: int, refused: dict[str, str], form: str) -> None:
    """Raises ConfigError that names the first layer of a kind in `refused`, kind -> why not."""
    plans = parse_layer_pattern(layer_pattern)
    for layer in range(num_layers):
        for kind in plans[layer % len(plans)].kinds:
            if kind in refused:
                raise ConfigError(f"layer {layer} ({kind}) cannot be written as {form}: {refused[kind]}")


class _Exportable(TorchFunctionMode):
    """Some functions by others that mean the same: `take_along_dim` would write the example's number of rows into the
    graph, and ONNX has neither cumulative products nor triangular systems.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _take_along_dim(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """As torch's; either has sizes of 1 where the other's count."""
    at = dim % x.dim()
    return x.expand(*_sizes(x, indices, at)).gather(at, indices.expand(*_sizes(indices, x, at)))


def _sizes(own: Tensor, other: Tensor, dim: int) -> Iterator[int]:
    for axis, (size, with_size) in enumerate(zip(own.shape, other.shape, strict=True)):
        # an open size is no int: to ask whether it is 1 would settle it
        yield with_size if axis != dim and type(size) is int and size == 1 else size


def _cumprod(x: Tensor, dim: int) -> Tensor:
    """By doubling: after each pass an entry covers twice as many as before."""
    product, distance = x.movedim(dim, -1), 1
    while distance < product.shape[-1]:
        joined = product[..., distance:] * product[..., :-distance]
        product = torch.cat((product[..., :distance], joined), dim=-1)
        distance *= 2
    return product.movedim(-1, dim)


def _solve_unit_lower(matrix: Tensor, given: Tensor, *, upper: bool, unitriangular: bool) -> Tensor:
    """I - N with N strictly lower: its inverse is (I + N) (I + N^2) (I + N^4) ..., of which the last are I."""
    if upper or not unitriangular:
        raise NotImplementedError("only lower triangular systems with ones on the diagonal")
    size = matrix.shape[-1]
    power, solved, reach = torch.eye(size, dtype=matrix.dtype) - matrix, given, 1
    while reach < size:
        solved = solved + power @ solved
        power, reach = power @ power, 2 * reach
    return solved


_REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    Tensor.cumprod: _cumprod,
    torch.linalg.solve_triangular: _solve_unit_lower,
}
