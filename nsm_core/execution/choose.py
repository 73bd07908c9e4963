"""Chooses the executor of a model: by the requested name, the model, its file and the machine."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from nsm_core.errors import ConfigError
from nsm_core.execution.base import Executor
from nsm_core.execution.chosen import ChosenExecutor as ChosenExecutor
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights, cuda_unsupported_reason
from nsm_core.execution.cuda.options import numerics as cuda_numerics
from nsm_core.execution.cuda.preparing import prepared
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.executor import NativeExecutor
from nsm_core.execution.native.executor import numerics as native_numerics
from nsm_core.execution.native.library import PORTABLE, variants
from nsm_core.execution.native.precision import EXECUTORS, HALF_STATES, Precision, precision_of
from nsm_core.execution.native.unpacked import unpacked_model
from nsm_core.execution.native.weights import NativeWeights, native_unsupported_reason, packed_matrices
from nsm_core.loaded_model import LoadedModel, SequenceModel
from nsm_core.model import loader as nsm_loader
from nsm_core.model.nsm import NsmModel
from nsm_core.model.storage import WeightFormat, fill
from nsm_core.rwkv7 import claims as rwkv7_claims

logger = logging.getLogger("nsm.execution")

# What auto takes on a CPU for files of these formats: nothing is rounded
_AUTOMATIC: dict[str, ExecutorName] = {
    WeightFormat.INT8: EXECUTORS[Precision.INT8],
    WeightFormat.INT4: EXECUTORS[Precision.INT4],
}


def choose_executor(loaded: LoadedModel[SequenceModel], name: ExecutorName = "auto") -> ChosenExecutor:
    """The executor of `loaded`, with torch's current number of threads. Logs the choice and its reason.

    Raises ConfigError if `native` or `cuda` was requested and is not available.
    """
    return _COMPUTED[loaded.architecture].choose(loaded, name)


def gpu_kernels_missing_reason(loaded: LoadedModel[SequenceModel]) -> str | None:
    """Why the executor for GPUs cannot run the model, in words; None if it can."""
    return _COMPUTED[loaded.architecture].gpu_kernels_missing_reason(loaded.model)


def decide_executor(loaded: LoadedModel[SequenceModel], name: ExecutorName = "auto") -> tuple[str, str]:
    """Name and numerics class of the executor that `choose_executor` makes; reads no weight of an NsmModel.

    Raises ConfigError as it does.
    """
    if isinstance(loaded.model, NsmModel):
        decision = _decide_nsm(loaded, loaded.model, name)
        return decision.name, decision.numerics
    chosen = choose_executor(loaded, name)
    return chosen.name, chosen.numerics


@dataclasses.dataclass(frozen=True, slots=True)
class _Decision:
    """`reason`: why it is the eager executor. `missed`: how that one compares with the one that lacks something."""

    name: ExecutorName
    numerics: str
    reason: str | None = None
    missed: str | None = None


def _decide_nsm(loaded: LoadedModel[Any], model: NsmModel, name: ExecutorName) -> _Decision:
    if name == "native-fp32":
        raise ConfigError(
            f"{loaded.name} has no fp32 kernels: its executors are native (int8), native-int4, "
            "native-fp16-states, native-int4-fp16-states, eager and cuda"
        )
    if name.startswith("cuda") or (name == "auto" and loaded.device.type == "cuda"):
        reason = cuda_unsupported_reason(model)
        if reason is None:
            return _Decision("cuda", cuda_numerics(_cuda_weights(name), loaded.device))
        if name != "auto":
            raise ConfigError(f"{loaded.name} cannot run on the executor for GPUs: {reason}")
        return _Decision("eager", loaded.numerics, reason, "many times slower than the one for GPUs")
    is_named = name.startswith("native")
    reason = None if is_named else _eager_reason(loaded, name)
    if reason is not None:
        return _Decision("eager", loaded.numerics, reason)
    reason = native_unsupported_reason(model)
    if reason is None:
        own = name if is_named else _AUTOMATIC[loaded.weight_format]
        return _Decision(own, native_numerics(precision_of(own), half_states=own in HALF_STATES))
    if is_named:
        raise ConfigError(f"{loaded.name} cannot run on the native executor: {reason}")
    return _Decision("eager", loaded.numerics, reason, "several times slower than the native one")


def _choose_nsm(loaded: LoadedModel[NsmModel], name: ExecutorName) -> ChosenExecutor:
    decision = _decide_nsm(loaded, loaded.model, name)
    if decision.name == "cuda":
        return _cuda(loaded, _cuda_weights(name))
    if decision.name != "eager":
        return _native(loaded, decision)
    loaded = loaded.filled() if isinstance(loaded, nsm_loader.LoadedNsm) else loaded
    if decision.missed is None:
        logger.info("%s runs on the eager executor: %s", loaded.name, decision.reason)
    else:
        logger.warning("%s runs on the eager executor, %s: %s", loaded.name, decision.missed, decision.reason)
    return ChosenExecutor("eager", EagerExecutor, loaded.model, decision.numerics)


def _cuda_weights(name: ExecutorName) -> CudaWeights:
    return CudaWeights(name.removeprefix("cuda-")) if "-" in name else CudaWeights.BF16


def _eager_reason(loaded: LoadedModel[NsmModel], name: ExecutorName) -> str | None:
    """The reason to use the eager executor without trying the native one; None if there is none."""
    if name == "eager":
        return "as requested"
    if loaded.device.type != "cpu":
        return "the model is not on a CPU"
    if loaded.weight_format not in _AUTOMATIC:
        return f"its file holds {loaded.weight_format} weights, which the native one would round to int8"
    if variants()[:1] == (PORTABLE,):
        return "the native kernels for this processor are plain C++, slower than PyTorch where there are many tokens"
    return None


def _native(loaded: LoadedModel[NsmModel], decision: _Decision) -> ChosenExecutor:
    num_threads, half_states = torch.get_num_threads(), decision.name in HALF_STATES
    precision = precision_of(decision.name)
    is_rounded = loaded.weight_format != precision.value
    rounding = f", {loaded.weight_format} weights rounded to {precision}" if is_rounded else ""
    logger.info(
        "%s runs on the native executor, kernels %s, %d threads%s", loaded.name, variants()[0], num_threads, rounding
    )
    matrices = loaded.matrices if isinstance(loaded, nsm_loader.LoadedNsm) else {}
    packed = packed_matrices(loaded.model)
    fill(loaded.model, {name: rows for name, rows in matrices.items() if name not in packed})
    weights = NativeWeights(loaded.model, precision=precision, matrices=matrices)
    factory = functools.partial(NativeExecutor, num_threads=num_threads, weights=weights, half_states=half_states)
    return ChosenExecutor(decision.name, factory, unpacked_model(loaded.model, weights), decision.numerics)


def _cuda(loaded: LoadedModel[NsmModel], weights: CudaWeights) -> ChosenExecutor:
    logger.info("%s runs on the executor for GPUs, matrices in %s", loaded.name, weights)
    factory = functools.partial(_make_cuda, options=CudaOptions(weights=weights))
    return ChosenExecutor("cuda", factory, loaded.model, cuda_numerics(weights, loaded.device))


def _make_cuda(model: NsmModel, *, num_rows: int, poison: bool, options: CudaOptions) -> Executor:
    """Raises DeviceUnusable as `prepared`."""
    # Imported here: only this executor needs the kernels' compiler
    from nsm_core.execution.cuda.executor import CudaExecutor
    from nsm_core.execution.cuda.self_check import (
        check_rounds,
        computed,
        computed_in_rounds,
        failed_check,
        launch_reference,
    )

    vocab_size = model.config.vocab_size

    def launch(executor: CudaExecutor) -> None:
        executor.launch_all()
        launch_reference(model)

    def check(executor: CudaExecutor) -> str | None:
        reason = failed_check(executor, model, vocab_size)
        if reason is None:
            check_rounds(executor, vocab_size)
        return reason

    def all_computed(executor: CudaExecutor) -> str:
        in_rounds = computed_in_rounds(executor, vocab_size)
        return f"{computed(executor, vocab_size)} {in_rounds}" if in_rounds or executor.overlap is None else ""

    return prepared(
        model.embedding.weight.device,
        num_rows,
        subject=f"{model.config} {options}",
        make=lambda: CudaExecutor(model, num_rows=num_rows, poison=poison, options=options),
        launch=launch,
        failed_check=check,
        computed=all_computed,
    )


def _choose_rwkv7(loaded: LoadedModel[Any], name: ExecutorName) -> ChosenExecutor:
    """Its modules are imported for its own models alone."""
    from nsm_core.execution.rwkv7.choose import choose_rwkv7

    return choose_rwkv7(loaded, name)


def _rwkv7_kernels_missing_reason(model: Any) -> str | None:
    from nsm_core.execution.rwkv7.cuda.options import rwkv7_cuda_unsupported_reason

    return rwkv7_cuda_unsupported_reason(model)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """How the models of an architecture are computed."""

    choose: Callable[[LoadedModel[Any], ExecutorName], ChosenExecutor]
    gpu_kernels_missing_reason: Callable[[Any], str | None]


# The one place that knows which architecture is computed how
_COMPUTED = {
    nsm_loader.ARCHITECTURE: _Computed(choose=_choose_nsm, gpu_kernels_missing_reason=cuda_unsupported_reason),
    rwkv7_claims.ARCHITECTURE: _Computed(
        choose=_choose_rwkv7, gpu_kernels_missing_reason=_rwkv7_kernels_missing_reason
    ),
}
