"""Commands of the lab: their extra, and models that only they load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nsm_core.errors import ConfigError
from nsm_core.model import registry
from nsm_core.tokenizer import Tokenizer
from nsm_lab.baselines.register import register_baselines
from service.cli.lab import lab_command
from tests.service.cli.conftest import Nsm, assert_one_line
from tests.support.models import save_small_model


def test_a_package_of_the_extra_that_is_missing_is_named_with_the_extra(
    nsm: Nsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "nsm_lab.inspection.plots", raising=False)
    result = nsm("inspect", "a text", "--png", tmp_path / "a.png")
    message = "this command needs matplotlib.figure: pip install 'nsm-serve[lab]', or in a checkout make setup"
    assert_one_line(result, message)


def test_help_of_an_evaluation_needs_no_package_of_the_extra() -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from service.cli.main import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", program, "eval", "--help"], capture_output=True, text=True, check=True
    )
    assert "--passkey-lengths" in shown.stdout


def test_a_module_of_our_own_that_is_missing_is_no_matter_of_the_extra() -> None:
    with pytest.raises(ModuleNotFoundError), lab_command():
        import nsm_lab.no_such_module  # noqa: F401
    with pytest.raises(ConfigError, match="needs no_such_package: pip install"), lab_command():
        import no_such_package  # noqa: F401


def test_a_model_with_a_baseline_layer_is_inspected_and_not_served(
    nsm: Nsm, tmp_path: Path, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_baselines()
    directory = save_small_model(tmp_path / "model", tiny_tokenizer, layer_pattern="Nr")
    monkeypatch.setattr(registry, "_registered", {})
    for command in (("serve", "--port", 0), ("info",), ("generate", "a")):
        result = nsm(*command, "--model", directory)
        assert_one_line(
            result,
            "layer_pattern 'Nr' has the layer 'r', which is not registered here: baselines are for training, "
            "evaluation, export and benchmarks (pip install 'nsm-serve[lab]'), not served "
            "(set by NSM_MODEL or --model)",
        )
    assert nsm("inspect", "a text", "--model", directory).exit_code == 0
