"""A server imports torch without what only training and compilers use, which comes when somebody asks for it."""

from __future__ import annotations

import subprocess
import sys

LIGHT = """
import sys
from nsm_core.torch_import import DEFERRED, META_KERNELS, complete_torch, import_torch

torch = import_torch()
assert torch is import_torch() is sys.modules["torch"]
assert META_KERNELS not in sys.modules
assert not hasattr(torch, "_meta_registrations")
kinds = {name: type(sys.modules[name]).__name__ for name in DEFERRED}
assert set(kinds.values()) == {"_LazyModule"}, kinds
from torch.distributions import Normal
assert Normal(0.0, 1.0).mean.item() == 0.0
assert type(sys.modules["torch.distributions"]).__name__ == "module"
x = torch.arange(12.0).reshape(3, 4)
assert torch.nn.functional.linear(x, x).sum().item() == float((x @ x.T).sum())
complete_torch()
assert META_KERNELS in sys.modules
assert {type(sys.modules[name]).__name__ for name in DEFERRED} == {"module"}
left, right = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
assert torch.linalg.cross(torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")).shape == (2, 3)
assert (left @ right).shape == (3, 5)
"""
WHOLE = """
import torch
from nsm_core.torch_import import META_KERNELS, import_torch
import sys

assert import_torch() is torch
assert META_KERNELS in sys.modules
"""
SERVED = """
import inspect, sys
from nsm_core.torch_import import AUTOLOAD, DEFERRED, import_torch, modules_by_name

own = inspect.getmodule
with modules_by_name():
    torch = import_torch()
    from service.backends.local import LocalBackend
assert inspect.getmodule is own
import os
assert AUTOLOAD not in os.environ
if torch.version.cuda is None and torch.version.hip is None:
    from nsm_core.execution.choose import choose_executor
    from nsm_core.architectures import open_model
    choose_executor(open_model())
    read = [name for name in DEFERRED if type(sys.modules[name]).__name__ == "module"]
    assert not read, f"a server needs them, so they are not worth deferring: {read}"
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_torch_works_without_them_and_gets_them_later() -> None:
    run(LIGHT)


def test_a_served_model_needs_none_of_it() -> None:
    run(SERVED)


def test_torch_that_is_imported_already_stays_as_it_is() -> None:
    run(WHOLE)
