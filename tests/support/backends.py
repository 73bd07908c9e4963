"""What a gateway's model runs on, as a parameter of the tests that prove its promises: an engine here with a model of
either architecture, or Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nsm_core.tokenizer import Tokenizer
from service.backends.base import InferenceBackend
from service.backends.triton.backend import TritonBackend
from tests.support.models import local_backend
from tests.support.rwkv7 import rwkv7_backend, save_rwkv7
from tests.support.triton_servers import RunningTriton

BACKENDS = ["local", "rwkv7", pytest.param("triton", marks=pytest.mark.triton)]
PROCESSES: dict[str, dict[str, object]] = {  # settings of a server whose engine, or two, has a process of its own
    "workers": {"DEVICE": "cpu", "WORKERS": 2},
    "devices": {"DEVICE": "cpu,cpu", "WORKERS": 2},
}
MakeBackend = Callable[[], InferenceBackend]


def triton_backend(server: RunningTriton) -> TritonBackend:
    return TritonBackend([server.grpc_url], wait_s=120)


@pytest.fixture(params=BACKENDS)
def make_backend(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> MakeBackend:
    """Each call: another backend, not started, of one and the same model over the tiny tokenizer."""
    if request.param == "local":
        return lambda: local_backend(tiny_tokenizer)
    if request.param == "rwkv7":
        return lambda: rwkv7_backend(tiny_tokenizer)
    server: RunningTriton = request.getfixturevalue("triton")
    return lambda: triton_backend(server)


@pytest.fixture(params=BACKENDS)
def backend_settings(request: pytest.FixtureRequest) -> dict[str, object]:
    """Of a server process: the model in it, or in a Triton server that lives on when it is killed."""
    return settings_of(request)


@pytest.fixture(params=[*BACKENDS, *PROCESSES])
def server_settings(request: pytest.FixtureRequest) -> dict[str, object]:
    """The same, and with the engine in one or two processes of their own."""
    return settings_of(request)


@pytest.fixture(params=[*BACKENDS, "workers"])
def worker_settings(request: pytest.FixtureRequest) -> dict[str, object]:
    """As `server_settings`, for tests to which a second engine makes no difference."""
    return settings_of(request)


def settings_of(request: pytest.FixtureRequest) -> dict[str, object]:
    """For a fixture whose parameter is one of BACKENDS or PROCESSES."""
    if request.param == "local" or request.param in PROCESSES:
        more = PROCESSES.get(request.param, {})
        return {"MODEL": request.getfixturevalue("tiny_model_dir"), "NUM_THREADS": 1, **more}
    if request.param == "rwkv7":
        return {"MODEL": request.getfixturevalue("rwkv7_dir"), "NUM_THREADS": 1}
    return {"TRITON_URL": request.getfixturevalue("triton").grpc_url}


@pytest.fixture(scope="session")
def rwkv7_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    """Of a size at which a step takes some milliseconds: turns must last long enough to be stopped in their middle."""
    sizes = {"width": 256, "head_size": 64, "hidden": 1024, "num_layers": 12}
    return save_rwkv7(tmp_path_factory.mktemp("rwkv7") / "model", tiny_tokenizer, **sizes)
