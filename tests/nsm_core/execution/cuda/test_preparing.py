"""An executor for GPUs is prepared, also where its kernels cannot be compiled ahead."""

from __future__ import annotations

import logging

import pytest

from nsm_core.execution.cuda import preparing

compiling = pytest.importorskip("nsm_core.execution.cuda.compiling", reason="the compiler is not installed")


def test_kernels_that_cannot_be_compiled_ahead_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(launch: object, *, subject: str) -> int:
        raise AttributeError("another version\nof the compiler")

    monkeypatch.setattr(compiling, "compile_ahead", fails)
    with caplog.at_level(logging.WARNING, logger="nsm.execution"):
        assert preparing._compile_ahead(lambda: None, "a device") == 0
    assert caplog.messages == ["kernels are compiled at their first launch: AttributeError: another version"]
