"""The images, built and started for real: `make image-test`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.compose import ROOT
from tests.deploy.images import Builder, Container, Image
from tests.support.redis_servers import free_port

pytestmark = pytest.mark.image
START_S = 120.0
WRITABLE = "find / -xdev -writable -not -type l -print; for d in /data /tmp /dev/shm; do test ! -w $d || echo $d; done"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("builder"))


@pytest.fixture(scope="module")
def gateway(builder: Builder) -> Image:
    return builder.target("gateway")


def wait_healthy(container: Container, image: Image) -> None:
    deadline = time.monotonic() + START_S
    while not container.is_healthy(image.config["Healthcheck"]["Test"]):
        assert time.monotonic() < deadline, container.log.read_text(errors="replace")
        time.sleep(0.2)  # another program's start: there is nothing to await


def locked() -> dict[str, str]:
    lock = (ROOT / "deploy" / "image" / "requirements.lock").read_text()
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", lock, re.MULTILINE))


def test_a_gateway_serves_read_only_and_keeps_its_sessions(gateway: Image, tmp_path: Path) -> None:
    port = free_port()
    own = {"NSM_HOST": "127.0.0.1", "NSM_PORT": port, "NSM_NUM_THREADS": 1}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        with gateway.started(tmp_path, **own) as container:
            wait_healthy(container, gateway)
            assert container.execute("id", "-u").stdout.strip() == "10001"
            writable = set(container.execute("bash", "-c", WRITABLE).stdout.split())
            assert writable == {"/data", "/tmp", "/dev/shm"}
            assert client.post("/v1/sessions", json={"id": "kept"}).status_code == 200
            body = {"input": "It was", "max_tokens": 4}
            assert client.post("/v1/sessions/kept/generate", json=body).status_code == 200
            assert container.stop() == 0
            assert "native executor" in container.log.read_text()  # its kernels were compiled in the build
        with gateway.started(tmp_path, **own) as container:
            wait_healthy(container, gateway)
            assert client.get("/v1/sessions/kept").json()["version"] == 1


def test_a_gateway_lets_no_stranger_in_unless_told_so(gateway: Image, tmp_path: Path) -> None:
    with gateway.started(tmp_path, NSM_PORT=free_port()) as container:
        assert container.process.wait(60.0) != 0
        assert "NSM_API_KEYS_FILE" in container.log.read_text()


def test_a_gateway_is_its_locked_packages_without_compiler_and_pip(gateway: Image) -> None:
    with gateway.unpacked_model() as root:
        programs = {path.name for folder in ("usr/bin", "opt/venv/bin") for path in (root / folder).iterdir()}
        assert not programs & {"cc", "gcc", "g++", "c++", "pip", "pip3", "curl", "wget"}
        listed = json.loads((root / "opt/venv/share/sbom.cdx.json").read_text())
        versions = {one["name"].lower().replace("_", "-"): one["version"] for one in listed["components"]}
        assert {name: version for name, version in locked().items() if versions.get(name) != version} == {}
        assert {"torch", "nsm-serve"} <= set(versions)
        assert not (root / "opt" / "build").exists()
        assert not (root / "src").exists()
    labels = gateway.config["Labels"]
    assert labels["org.opencontainers.image.title"] == "nsm-serve gateway"
    assert re.fullmatch(r"[0-9a-f]{40}", labels["org.opencontainers.image.revision"])


def test_a_triton_server_is_launched_and_probed(builder: Builder, tmp_path: Path) -> None:
    """On a stand-in for the vendor's image: the same server of another version, Debian's Python."""
    image = builder.target("triton", f"--build-arg=TRITON_IMAGE={builder.triton_stand_in()}")
    ports = {f"TRITON_{kind}_PORT": free_port() for kind in ("GRPC", "HTTP", "METRICS")}
    with image.started(tmp_path, NUMPY1=1, **ports) as container:
        wait_healthy(container, image)
        assert container.execute("/opt/nsm/probe", "liveness").returncode == 0
        kernels = container.execute("bash", "-c", "grep -l libnsm- /proc/[0-9]*/maps")
        assert kernels.stdout  # the worker has them loaded
        assert container.stop() == 0


def test_a_load_test_is_in_its_image(builder: Builder, tmp_path: Path) -> None:
    image = builder.target("loadtest")
    with image.started(tmp_path, "--help") as container:
        assert container.process.wait(60.0) == 0
        assert "--profile" in container.log.read_text()
