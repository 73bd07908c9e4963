"""A real Prometheus with the configuration of deploy/prometheus, but fixed targets and a second between scrapes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.redis_servers import die_with_the_tests, free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
START_S = 60.0


class Prometheus:
    """A client of one. Times are Unix seconds."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=30.0)

    def get(self, path: str, **params: Any) -> Any:
        """`data` of an answer of its HTTP API; a query it cannot execute is an error with its own words."""
        answer = self._client.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer["error"]
        return answer["data"]

    def query(self, expr: str, *, at: float) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant vector, or of a scalar."""
        data = self.get("query", query=expr, time=at)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(series["metric"], float(series["value"][1])) for series in data["result"]]

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._client.get("/-/ready").status_code == 200
        return False

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def prometheus(directory: Path, targets: Mapping[str, Sequence[str]], key: str) -> Iterator[Prometheus]:
    """`targets`: host:port of each job; `key`: the API key that reads them."""
    port = free_port()
    (directory / "prometheus.yml").write_text(yaml.safe_dump(_config(targets, key)))
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=log, stderr=log, preexec_fn=die_with_the_tests,
        )  # fmt: skip
    client = Prometheus(port)
    try:
        deadline = time.monotonic() + START_S
        while not client.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"prometheus did not start:\n{(directory / 'log').read_text()}")
            time.sleep(0.05)  # another program's start: there is nothing to await
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def _config(targets: Mapping[str, Sequence[str]], key: str) -> dict[str, Any]:
    """What is shipped, with other targets and shorter intervals."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
        job["authorization"] = {"credentials": key}
    return dict(config)
