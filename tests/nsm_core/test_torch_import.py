"""A server imports torch without the kernels of the device `meta`, which come when somebody asks for them."""

from __future__ import annotations

import subprocess
import sys

LIGHT = """
import sys
from nsm_core.torch_import import META_KERNELS, complete_torch, import_torch

torch = import_torch()
assert torch is import_torch() is sys.modules["torch"]
has_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
assert (META_KERNELS in sys.modules) == has_gpu_build
assert hasattr(torch, "_meta_registrations") == has_gpu_build
x = torch.arange(12.0).reshape(3, 4)
assert torch.nn.functional.linear(x, x).sum().item() == float((x @ x.T).sum())
complete_torch()
assert META_KERNELS in sys.modules
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


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_torch_works_without_them_and_gets_them_later() -> None:
    run(LIGHT)


def test_torch_that_is_imported_already_stays_as_it_is() -> None:
    run(WHOLE)
