"""A traced function as an ONNX file, its large matrices in fp32 or in int8."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch.export import ExportedProgram

from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import is_rounded, quantize_rows
from nsm_lab.export.functions import input_names, output_names

OPSET = 20
# Layers whose states are complex numbers, which ONNX has no arithmetic for
REFUSED = {
    "d": "S4D computes with complex numbers, which ONNX operators do not take",
    "s": "S5 computes with complex numbers, which ONNX operators do not take",
}


def write_onnx(program: ExportedProgram, model: NsmModel, path: Path, *, is_int8: bool) -> None:
    """Writes `path` with the weights inside.

    `is_int8`: the matrices that int8 model files hold as int8 are stored so, and multiplied as fp32.
    """
    spec = model.state_spec
    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=input_names(spec),
            output_names=output_names(spec),
            verbose=False,
        )
    if made is None:
        raise RuntimeError("the exporter returned no program")
    proto = made.model_proto
    _name_batch(proto.graph)
    if is_int8:
        _round_matrices(proto.graph, model)
    onnx.checker.check_model(proto)
    onnx.save_model(proto, str(path))


def _name_batch(graph: onnx.GraphProto) -> None:
    """The one open size gets a name for readers; sizes inside, under the exporter's own name, are inferred anew."""
    for value in (*graph.input, *graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = "batch"
    del graph.value_info[:]


def _round_matrices(graph: onnx.GraphProto, model: NsmModel) -> None:
    """Initialisers become int8 with one scale for each of the weight's rows, behind a DequantizeLinear of that name.

    The exporter stores some matrices transposed, under names of its own: those are known by their values.
    """
    weights = list(_rounded_weights(model))
    initializers, nodes = [], []
    for tensor in graph.initializer:
        values = numpy_helper.to_array(tensor)
        axis, weight = _find(values, weights)
        if weight is None:
            initializers.append(tensor)
            continue
        quantized, scale = quantize_rows(torch.from_numpy(weight.copy()))
        whole = quantized.numpy() if axis == 0 else quantized.numpy().T
        zeros = np.zeros(len(scale), dtype=np.int8)
        parts = {".int8": np.ascontiguousarray(whole), ".scale": scale.numpy(), ".zero": zeros}
        initializers += [numpy_helper.from_array(value, tensor.name + suffix) for suffix, value in parts.items()]
        nodes.append(helper.make_node("DequantizeLinear", [tensor.name + s for s in parts], [tensor.name], axis=axis))
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])


def _rounded_weights(model: NsmModel) -> Iterator[NDArray[np.float32]]:
    for name, value in model.state_dict().items():
        if value.ndim == 2 and is_rounded(name, value):
            yield value.detach().cpu().float().numpy()


def _find(values: NDArray[np.float32], weights: list[NDArray[np.float32]]) -> tuple[int, NDArray[np.float32] | None]:
    """The weight that `values` are, and the axis of `values` that is its rows."""
    for weight in weights:
        for axis, turned in enumerate((weight, weight.T)):
            if values.shape == turned.shape and values.dtype == turned.dtype and np.array_equal(values, turned):
                return axis, weight
    return 0, None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's warnings about operators of packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
