"""The small bundled model, exported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core.model.loader import load_checkpoint
from nsm_lab.export.write import export_model


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "pulse"
    export_model(load_checkpoint(Path("pulse-books-small")), folder, "onnx")
    return folder
