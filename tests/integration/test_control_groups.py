"""A server whose control group has little memory: it refuses in words before the kernel would end it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsm_core.control_group import SAMPLE_S, used_bytes
from tests.support.control_groups import inside, memory_group
from tests.support.gateway import error_of
from tests.support.server_processes import running

pytestmark = pytest.mark.control_group
MB = 2**20
# Takes as much memory as each line of its input says, in MiB, and answers; it ends with its input
HOG = "import sys\ntaken = [(bytearray(b'x') * (int(line) << 20), print(line, flush=True)) for line in sys.stdin]"
NSM = "from service.cli.main import main; main()"
COMPLETION = {"prompt": "x", "max_tokens": 2}


class Hog:
    """Another process of the group."""

    def __init__(self, group: Path) -> None:
        command = inside(group, sys.executable, "-c", HOG)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self, num_mb: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_mb}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline()

    def end(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def hog_in(group: Path) -> Iterator[Hog]:
    hog = Hog(group)
    try:
        yield hog
    finally:
        hog.end()


def test_group_without_room_for_the_prefix_cache_refuses_the_start_by_name(tmp_path: Path) -> None:
    with memory_group(200 * MB) as group:
        command = inside(group, sys.executable, "-c", NSM, "serve", "--port", "0")
        environment = {"NSM_DATA_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "NSM_LOG_LEVEL": "warning"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("nsm: NSM_PREFIX_CACHE_MB (--prefix-cache-mb) is 128 of the 200 MB")
    assert done.stderr.count("\n") == 1


async def test_group_with_little_memory_left_refuses_new_work_until_there_is_more(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = {"MODEL": tiny_model_dir, "NUM_THREADS": 1, "DEVICE": "cpu"}
    with memory_group(800 * MB) as group:
        async with running(settings, tmp_path, group=group) as server:
            assert (await server.client.post("/v1/completions", json=COMPLETION)).status_code == 200
            await server.create("s")
            with hog_in(group) as hog:
                hog.take(int(0.97 * 800) - used_bytes(group) // MB)
                await asyncio.sleep(2 * SAMPLE_S)
                answer = await server.client.post("/v1/completions", json=COMPLETION)
                assert (answer.status_code, error_of(answer)["code"]) == (503, "overloaded")
                assert "memory" in error_of(answer)["message"]
                assert int(answer.headers["retry-after"]) > 0
                turn = await server.client.post("/v1/sessions/s/generate", json={"input": "x"})
                assert turn.status_code == 503
                assert (await server.client.get("/health/live")).status_code == 200
                assert (await server.client.get("/v1/sessions/s")).status_code == 200
            await asyncio.sleep(2 * SAMPLE_S)
            assert (await server.client.post("/v1/completions", json=COMPLETION)).status_code == 200
