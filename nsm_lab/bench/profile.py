"""A trace of torch's operators with the names of the model's parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nsm_lab.bench.parts import observed_parts


@contextlib.contextmanager
def profiled(file: Path) -> Iterator[None]:
    """While open, all threads of this process are traced, GPUs too where there are any; then the trace is in `file`.

    JSON for chrome://tracing or Perfetto, a part of the model as `nsm.<part>` around its operators.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # the engine has a thread of its own
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    trace = profile(activities=activities, experimental_config=everywhere)
    with trace, observed_parts(lambda part: record_function(f"nsm.{part}")):
        yield
    trace.export_chrome_trace(str(file))
