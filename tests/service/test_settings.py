from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from nsm_core.config import EngineConfig
from nsm_core.errors import ConfigError
from service.settings import REDIS_SCHEMES, Settings, load_settings
from service.stores.redis import url as redis_url
from service.stores.sessions.factory import make_store
from service.stores.sessions.retention import MAX_RETAINED

SERVICE_DIR = Path(__file__).resolve().parents[2] / "service"


def test_defaults_serve_the_local_machine_from_the_user_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/srv/data")
    settings = load_settings()
    assert (settings.host, settings.port, settings.store) == ("127.0.0.1", 8000, "sqlite")
    assert settings.data_dir == Path("/srv/data/nsm")
    assert settings.database_path() == Path("/srv/data/nsm/sessions.db")


@pytest.mark.parametrize("xdg", ["", "relative/path"])
def test_an_xdg_path_that_is_not_absolute_does_not_count(monkeypatch: pytest.MonkeyPatch, xdg: str) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_settings().data_dir == Path("/home/someone/.local/share/nsm")


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty NSM_DATA_DIR must not put the sessions into whatever directory the server was started in."""
    monkeypatch.setenv("XDG_DATA_HOME", "/srv/data")
    for name in ("NSM_DATA_DIR", "NSM_STORE", "NSM_PORT", "NSM_MODEL"):
        monkeypatch.setenv(name, "")
    settings = load_settings()
    assert (settings.data_dir, settings.store, settings.port, settings.model) == (
        Path("/srv/data/nsm"), "sqlite", 8000, None,
    )  # fmt: skip


def test_paths_are_absolute_from_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSM_DATA_DIR", "here")
    assert load_settings().database_path() == tmp_path / "here" / "sessions.db"
    assert load_settings(store="sqlite:///there.db").database_path() == tmp_path / "there.db"


def test_a_flag_wins_over_its_variable_and_none_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSM_PORT", "9000")
    monkeypatch.setenv("NSM_QUEUE_LIMIT", "7")
    monkeypatch.setenv("NSM_LOG_LEVEL", "DEBUG")
    settings = load_settings(port=9001, queue_limit=None)
    assert (settings.port, settings.queue_limit, settings.log_level) == (9001, 7, "debug")
    assert settings.engine_config() == EngineConfig(queue_limit=7)


@pytest.mark.parametrize(
    ("store", "path"),
    [
        ("memory", None),
        ("sqlite", "data/sessions.db"),
        ("sqlite:///rel.db", "rel.db"),
        ("sqlite:////abs/x.db", "/abs/x.db"),
        ("redis://host", None),
        ("rediss+sentinel://u:p@a,b/main", None),
    ],
)
def test_store_choices(store: str, path: str | None) -> None:
    settings = load_settings(store=store, data_dir="data")
    assert settings.database_path() == (None if path is None else Path.cwd() / path)


TRITON = {"backend": "triton", "triton_url": "host:8001"}


def test_triton_servers_are_named_by_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSM_BACKEND", "triton")
    monkeypatch.setenv("NSM_TRITON_URL", "one:8001, [::1]:8001,one:8001")
    assert load_settings().triton_urls() == ("one:8001", "[::1]:8001")
    assert Settings().triton_urls() != Settings(backend="local", triton_url=None).triton_urls() == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "triton"}, "needs NSM_TRITON_URL"),
        ({"triton_url": "host:8001"}, "no effect unless NSM_BACKEND is triton"),
        ({"backend": "triton", "triton_url": "host"}, "must be host:port"),
        ({"backend": "triton", "triton_url": "http://host:8001"}, "must be host:port"),
        ({"backend": "triton", "triton_url": "host:8001,"}, "must be host:port"),
        ({"backend": "triton", "triton_url": "host:8001", "max_slots": 4}, "NSM_MAX_SLOTS has no effect"),
        ({"backend": "triton", "triton_url": "host:8001", "num_threads": 1}, "NSM_NUM_THREADS has no effect"),
        ({"backend": "cloud"}, "NSM_BACKEND"),
        ({"triton_tls_ca": "ca.pem"}, "NSM_TRITON_TLS_CA has no effect unless NSM_BACKEND is triton"),
        ({**TRITON, "triton_tls_cert": "a", "triton_tls_ca": "b"}, "are of use together only"),
        ({**TRITON, "triton_tls_key": "a", "triton_tls_ca": "b"}, "are of use together only"),
        ({**TRITON, "triton_tls_name": "triton"}, "have no effect without NSM_TRITON_TLS_CA"),
        ({**TRITON, "triton_tls_cert": "a", "triton_tls_key": "b"}, "have no effect without NSM_TRITON_TLS_CA"),
    ],
    ids=str,
)
def test_a_wish_that_the_backend_cannot_follow_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(**given)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NSM_PROT", "1", ["NSM_PROT", "did you mean NSM_PORT?"]),
        ("nsm_prot", "1", ["nsm_prot", "did you mean NSM_PORT?"]),
        ("NSM_XYZZY", "1", ["NSM_XYZZY", "known: NSM_HOST"]),
        ("NSM_X", "1", ["unknown setting NSM_X; known: NSM_HOST"]),
        ("NSM_PORT", "http", ["NSM_PORT", "--port", "integer", "'http'"]),
        ("NSM_PORT", "65536", ["NSM_PORT", "65535", "'65536'"]),
        (
            "NSM_STORE",
            "http://localhost",
            ["NSM_STORE", "sqlite, sqlite:///PATH, memory, redis://…", "http://localhost"],
        ),
        ("NSM_STORE", "sqlite:///", ["NSM_STORE", "sqlite:///PATH"]),
        ("NSM_TOKEN_BUDGET", "8", ["NSM_TOKEN_BUDGET (--token-budget)", "16 of NSM_MAX_SLOTS (--max-slots)", "'8'"]),
        ("NSM_GRACE_S", "-1", ["NSM_GRACE_S", "--grace-s", "0", "'-1'"]),
        ("NSM_REQUEST_TIMEOUT_S", "inf", ["NSM_REQUEST_TIMEOUT_S", "86400", "'inf'"]),
        ("NSM_REQUEST_TIMEOUT_S", "nan", ["NSM_REQUEST_TIMEOUT_S", "'nan'"]),
        ("NSM_NUM_THREADS", "100000", ["NSM_NUM_THREADS", "--num-threads", "1024", "'100000'"]),
        ("NSM_NUM_THREADS", "0", ["NSM_NUM_THREADS", "1", "'0'"]),
        ("NSM_LOG_LEVEL", "loud", ["NSM_LOG_LEVEL", "'debug'", "'loud'"]),
        ("NSM_LOG_FORMAT", "xml", ["NSM_LOG_FORMAT", "'json'", "'xml'"]),
        ("NSM_OTLP_ENDPOINT", "collector:4318", ["NSM_OTLP_ENDPOINT", "--otlp-endpoint", "http or https URL"]),
        ("NSM_TRACE_SAMPLE", "2", ["NSM_TRACE_SAMPLE", "1", "'2'"]),
        ("NSM_ENERGY_CORE_WATTS", "0", ["NSM_ENERGY_CORE_WATTS", "0", "'0'"]),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_settings_are_frozen() -> None:
    settings = load_settings()
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


def test_only_settings_reads_the_environment() -> None:
    readers = {
        path.name
        for path in SERVICE_DIR.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"settings.py", "dev_server.py", "builds.py"}  # two hand it on to the programs they start


def test_nothing_is_read_at_import() -> None:
    tree = ast.parse((SERVICE_DIR / "settings.py").read_text())
    top_level = [
        node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ImportFrom | ast.Import)
    ]
    assert not any(isinstance(node, ast.Call) for statement in top_level for node in ast.walk(statement))
    assert Settings.model_fields["data_dir"].default_factory is not None


def test_the_schemes_of_the_settings_are_those_of_the_redis_store() -> None:
    assert tuple(redis_url.SCHEMES) == REDIS_SCHEMES


def test_a_password_in_a_store_is_never_shown() -> None:
    settings = load_settings(store="redis://user:secret@host:1/2?sentinel_password=secret")
    assert settings.store_name() == "redis://host:1/2"
    assert "secret" not in repr(settings)
    for bad in ("redsi://user:secret@host", "redis:/:secret@host"):
        with pytest.raises(ConfigError, match=r"must be one of sqlite, .*redis\+cluster://…") as caught:
            load_settings(store=bad)
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="needs a password") as caught:
        make_store(load_settings(store="redis://secret@host"))
    assert "secret" not in str(caught.value)


def test_a_session_may_keep_as_many_snapshots_as_the_stores_have_room_for() -> None:
    assert load_settings(kept_snapshots=MAX_RETAINED).kept_snapshots == MAX_RETAINED
    assert (load_settings().state_dtype, load_settings(state_dtype="int8").state_dtype) == ("fp32", "int8")
    with pytest.raises(ConfigError, match=r"NSM_STATE_DTYPE.*'bf16'"):
        load_settings(state_dtype="bf16")
    with pytest.raises(ConfigError, match="NSM_KEPT_SNAPSHOTS"):
        load_settings(kept_snapshots=MAX_RETAINED + 1)
