"""Chooses the executor of an RWKV-7 model."""

from __future__ import annotations

import functools
import logging

import torch

from nsm_core.errors import ConfigError
from nsm_core.execution.base import Executor
from nsm_core.execution.chosen import ChosenExecutor
from nsm_core.execution.cuda.options import CudaOptions, CudaWeights
from nsm_core.execution.cuda.preparing import prepared
from nsm_core.execution.eager import EagerExecutor
from nsm_core.execution.names import ExecutorName
from nsm_core.execution.native.library import PORTABLE, variants
from nsm_core.execution.native.precision import EXECUTORS, HALF_STATES, PRECISIONS, Precision
from nsm_core.execution.rwkv7.cuda.options import rwkv7_cuda_unsupported_reason, rwkv7_numerics
from nsm_core.execution.rwkv7.executor import Rwkv7Executor, numerics
from nsm_core.execution.rwkv7.weights import pack_rwkv7, rwkv7_unsupported_reason
from nsm_core.loaded_model import LoadedModel
from nsm_core.rwkv7.config import Rwkv7Config
from nsm_core.rwkv7.model import Rwkv7Model

logger = logging.getLogger("nsm.execution")


def choose_rwkv7(loaded: LoadedModel[Rwkv7Model], name: ExecutorName) -> ChosenExecutor:
    """`auto` rounds nothing: int8 or int4 kernels for such a file, else fp32 ones.

    Raises ConfigError as `choose_executor`.
    """
    if name.startswith("cuda") or (name == "auto" and loaded.device.type == "cuda"):
        return _on_gpu(loaded, name)
    if name in HALF_STATES:
        raise ConfigError(f"{loaded.name} is an RWKV-7 model, whose kernels hold states in fp32 alone")
    reason = _eager_reason(loaded.model.config, loaded.device, name)
    if reason is None:
        return _native(loaded, PRECISIONS.get(name, _precision_of(loaded.weight_format)))
    if name in PRECISIONS:
        raise ConfigError(f"{loaded.name} cannot run on the native executor: {reason}")
    return _eager(loaded, reason, None if name == "eager" else "several times slower than a native one")


def _on_gpu(loaded: LoadedModel[Rwkv7Model], name: ExecutorName) -> ChosenExecutor:
    reason = rwkv7_cuda_unsupported_reason(loaded.model)
    if reason is not None and name == "auto":
        return _eager(loaded, reason, "many times slower than the one for GPUs")
    if reason is not None:
        raise ConfigError(f"{loaded.name} cannot run on the executor for GPUs: {reason}")
    weights = CudaWeights(name.removeprefix("cuda-")) if "-" in name else CudaWeights.BF16
    if weights is CudaWeights.FP16:
        raise ConfigError(
            f"{loaded.name} is an RWKV-7 model, whose channel mix squares numbers beyond the range of fp16: "
            "set the executor to cuda (bf16) or cuda-fp32"
        )
    logger.info("%s runs on the executor for GPUs, matrices in %s", loaded.name, weights)
    factory = functools.partial(_make_cuda, options=CudaOptions(weights=weights))
    return ChosenExecutor("cuda", factory, loaded.model, rwkv7_numerics(weights, loaded.device))


def _make_cuda(model: Rwkv7Model, *, num_rows: int, poison: bool, options: CudaOptions) -> Executor:
    """Raises DeviceUnusable as `prepared`."""
    # Imported here: only this executor needs the kernels' compiler
    from nsm_core.execution.cuda.self_check import computed
    from nsm_core.execution.rwkv7.cuda.executor import Rwkv7CudaExecutor
    from nsm_core.execution.rwkv7.cuda.self_check import failed_check

    return prepared(
        model.device,
        num_rows,
        subject=f"{model.config} {options}",
        make=lambda: Rwkv7CudaExecutor(model, num_rows=num_rows, poison=poison, options=options),
        launch=Rwkv7CudaExecutor.launch_all,
        failed_check=lambda executor: failed_check(executor, model),
        computed=lambda executor: computed(executor, model.num_ids),
    )


def _eager(loaded: LoadedModel[Rwkv7Model], reason: str, missed: str | None) -> ChosenExecutor:
    """`missed`: how it compares with the executor that cannot run the model; None: it was asked for."""
    logger.log(
        logging.INFO if missed is None else logging.WARNING,
        "%s runs on the eager executor%s: %s",
        *(loaded.name, "" if missed is None else f", {missed}", reason),
    )
    loaded.model.weights  # noqa: B018 - read now: a bad tensor is an error before the server listens
    return ChosenExecutor("eager", EagerExecutor, loaded.model, loaded.numerics)


def planned_executor(config: Rwkv7Config, weight_format: str) -> str:
    """The name of the executor that `auto` chooses on this machine's CPU, without a model."""
    if _eager_reason(config, torch.device("cpu"), "auto") is not None:
        return "eager"
    return EXECUTORS[_precision_of(weight_format)]


def _eager_reason(config: Rwkv7Config, device: torch.device, name: ExecutorName) -> str | None:
    if name == "eager":
        return "as requested"
    if device.type != "cpu":
        return "the native kernels run on a CPU"
    if name == "auto" and variants()[:1] == (PORTABLE,):
        return "the native kernels for this processor are plain C++, slower than PyTorch where there are many tokens"
    return rwkv7_unsupported_reason(config)


def _precision_of(weight_format: str) -> Precision:
    return Precision(weight_format) if weight_format in (Precision.INT8, Precision.INT4) else Precision.FP32


def _native(loaded: LoadedModel[Rwkv7Model], precision: Precision) -> ChosenExecutor:
    num_threads = torch.get_num_threads()
    is_rounded = precision is not Precision.FP32 and loaded.weight_format != precision
    rounding = f", {loaded.weight_format} weights rounded to {precision}" if is_rounded else ""
    logger.info(
        "%s runs on the native executor in %s, kernels %s, %d threads%s",
        *(loaded.name, precision, variants()[0], num_threads, rounding),
    )
    weights = pack_rwkv7(loaded.model, precision, loaded.weight_format, num_threads=num_threads)
    factory = functools.partial(Rwkv7Executor, num_threads=num_threads, weights=weights)
    return ChosenExecutor(EXECUTORS[precision], factory, loaded.model, numerics(precision))
