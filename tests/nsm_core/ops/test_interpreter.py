"""The quicker interpreter of the kernels' tests beside the compiler's own."""

from __future__ import annotations

import pytest
import torch

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the compiler is not installed")
from nsm_core.ops.keyed_scan.operator import keyed_scan_kernel  # noqa: E402
from tests.nsm_core.ops.test_keyed_scan import make_inputs, results  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines whose kernels run in the interpreter")
def test_language_patched_once_per_launch_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(1, 2, heads=1)
    tangents = torch.randn_like(inputs["v"]), torch.randn_like(inputs["state"])
    quick = results(keyed_scan_kernel, inputs, tangents)
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.__wrapped__)
    plain = results(keyed_scan_kernel, inputs, tangents)
    assert all(quick[name].equal(plain[name]) for name in plain)
