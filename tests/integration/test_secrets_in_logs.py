"""A whole server process that logs all it can: its log holds no key, no password and nothing that clients wrote."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.native_services import GatewayProcess, Redis, process, redis_service
from tests.support.redis_servers import free_port
from tests.support.server_processes import SERVE
from tests.support.tenants import make_key, write_keys

pytestmark = pytest.mark.redis
JSON = {"content-type": "application/json"}
PROMPT = "the canary sings at midnight"
WRONG_KEY = "nsm_0123456789ab_" + "Z" * 43
IN_A_QUERY = "querysecret"
RECEIVER = "receiversecret"
WRONG_PASSWORD = "wrongsecret"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Redis]:
    with redis_service(tmp_path / "redis") as started:
        yield started


def variables(tmp_path: Path, model: Path, store: str) -> dict[str, str]:
    own = {
        "PORT": free_port(),
        "STORE": store,
        "MODEL": model,
        "NUM_THREADS": 1,
        "DATA_DIR": tmp_path,
        "GRACE_S": 1,
        "LOG_LEVEL": "debug",
    }
    receiver = f"http://user:{RECEIVER}@127.0.0.1:{free_port()}"  # nobody listens there
    return {f"NSM_{name}": str(value) for name, value in own.items()} | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver}


def ask_in_every_way(url: str, key: str) -> list[int]:
    """The status of each answer."""
    mine = {"authorization": f"Bearer {key}"}
    turn = {"input": PROMPT, "max_tokens": 4}
    with httpx.Client(base_url=url, timeout=60.0) as client:
        answers = [
            client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, headers=mine),
            client.post("/v1/completions", json={"prompt": PROMPT, PROMPT: 1}, headers={"x-api-key": key}),
            client.post("/v1/completions", content=f'{{"prompt": "{PROMPT}"', headers={**mine, **JSON}),
            client.post("/v1/sessions", json={"id": "s"}, headers=mine),
            client.post("/v1/sessions/s/generate", json=turn, headers={**mine, "Idempotency-Key": IN_A_QUERY}),
            client.get("/v1/models", params={"api_key": IN_A_QUERY}, headers=mine),
            client.get("/v1/models", headers={"authorization": f"Bearer {WRONG_KEY}"}),
            client.get("/v1/models", headers={"x-api-key": WRONG_KEY}),
        ]
    return [answer.status_code for answer in answers]


def test_no_line_of_a_process_holds_a_secret(tmp_path: Path, tiny_model_dir: Path, store: Redis) -> None:
    key = make_key("a")
    fields = variables(tmp_path, tiny_model_dir, store.url)
    fields["NSM_API_KEYS_FILE"] = str(write_keys(tmp_path / "keys.toml", key, a=""))
    log = tmp_path / "log"
    with process([sys.executable, "-c", SERVE], log, **fields) as started:
        gateway = GatewayProcess(started, f"127.0.0.1:{fields['NSM_PORT']}", log)
        gateway.wait_ready()
        url = f"http://{gateway.address}"
        assert ask_in_every_way(url, key.text) == [200, 400, 400, 200, 200, 400, 401, 401]
        store.process.kill()
        store.process.wait()
        assert 503 in ask_in_every_way(url, key.text)
        started.send_signal(signal.SIGTERM)
        started.wait(60)
    text = log.read_text()
    assert "stopped" in text
    secrets = (key.secret, WRONG_KEY[17:], store.password, RECEIVER, IN_A_QUERY, "canary", "midnight")
    assert [secret for secret in secrets if secret in text] == []


def test_a_start_that_fails_tells_no_password(tmp_path: Path, tiny_model_dir: Path, store: Redis) -> None:
    log = tmp_path / "log"
    fields = variables(tmp_path, tiny_model_dir, store.url.replace(store.password, WRONG_PASSWORD))
    with process([sys.executable, "-c", SERVE], log, **fields) as started:
        assert started.wait(90) != 0
    text = log.read_text()
    assert f"127.0.0.1:{store.port}" in text
    assert [secret for secret in (WRONG_PASSWORD, store.password, RECEIVER) if secret in text] == []
