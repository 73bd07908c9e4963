from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from nsm_core.config import EngineLimits
from nsm_core.errors import ConfigError
from service.settings import OTLP_ENDPOINTS, REDIS_SCHEMES, Settings, is_tracing_on, load_settings, shown
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


def test_a_token_budget_below_the_slots_is_refused_by_the_names_of_both() -> None:
    with pytest.raises(
        ConfigError, match=r"NSM_TOKEN_BUDGET \(--token-budget\): must be at least the 16 of NSM_MAX_SLOTS"
    ):
        load_settings(max_slots=16, token_budget=8)
    assert load_settings(token_budget=8).engine_limits() == EngineLimits(token_budget=8)


def test_a_flag_wins_over_its_variable_and_none_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSM_PORT", "9000")
    monkeypatch.setenv("NSM_QUEUE_LIMIT", "7")
    monkeypatch.setenv("NSM_LOG_LEVEL", "DEBUG")
    settings = load_settings(port=9001, queue_limit=None)
    assert (settings.port, settings.queue_limit, settings.log_level) == (9001, 7, "debug")
    assert settings.engine_limits() == EngineLimits(queue_limit=7)


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


ENGINE = [
    ("device", "cpu"),
    ("executor", "eager"),
    ("num_threads", 1),
    ("max_slots", 4),
    ("queue_limit", 1),
    ("energy", False),
]


def test_triton_servers_are_named_by_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSM_TRITON_URL", "one:8001, [::1]:8001,one:8001")
    assert load_settings().triton_urls() == ("one:8001", "[::1]:8001")
    assert Settings(triton_url=None).triton_urls() == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"triton_url": "host"}, "must be host:port"),
        ({"triton_url": "http://host:8001"}, "must be host:port"),
        ({"triton_url": "host:8001,"}, "must be host:port"),
        *(({"triton_url": "host:8001", name: value}, f"NSM_{name.upper()} .* has no effect") for name, value in ENGINE),
        ({"triton_url": "host:8001", "max_slots": 4}, "is a parameter of the server's config.pbtxt"),
        ({"triton_url": "host:8001", "workers": 2}, "NSM_WORKERS .* no effect .* start several gateways on one store"),
        ({"models": "pulse-books", "workers": 2}, r"NSM_MODELS \(--model\) has no effect with NSM_WORKERS"),
        ({"models": "pulse-books", "device": "cpu,cpu"}, r"NSM_MODELS \(--model\) has no effect with NSM_DEVICE"),
        ({"triton_tls_dir": "tls"}, "NSM_TRITON_TLS_DIR .* has no effect without NSM_TRITON_URL"),
    ],
    ids=str,
)
def test_setting_without_effect_for_the_backend_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_settings(**given)


@pytest.mark.parametrize("path", ["pulse-books-keyed", "models/some.gguf"])
def test_name_before_the_first_model_is_a_setting_of_its_own(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"NSM_MODEL .*write {path}, and NSM_SERVED_MODEL_NAME"):
        load_settings(model=f"a={path}")


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
        ("NSM_MAX_SLOTS", "0", ["NSM_MAX_SLOTS (--max-slots)", "1", "'0'"]),
        ("NSM_DEVICE", "tpu", ["NSM_DEVICE (--device)", "auto, cpu, cuda", "'tpu'"]),
        ("NSM_DEVICE", "cuda,cuda:0", ["NSM_DEVICE (--device)", "each GPU once", "'cuda,cuda:0'"]),
        ("NSM_DEVICE", "auto,cpu", ["NSM_DEVICE (--device)", "without auto", "'auto,cpu'"]),
        ("NSM_DEVICE", "cpu,", ["NSM_DEVICE (--device)", "auto, cpu, cuda", "'cpu,'"]),
        ("NSM_GRACE_S", "-1", ["NSM_GRACE_S", "--grace-s", "0", "'-1'"]),
        ("NSM_REQUEST_TIMEOUT_S", "inf", ["NSM_REQUEST_TIMEOUT_S", "86400", "'inf'"]),
        ("NSM_REQUEST_TIMEOUT_S", "nan", ["NSM_REQUEST_TIMEOUT_S", "must be a finite number, got 'nan'"]),
        ("NSM_COLD_AFTER_S", "inf", ["NSM_COLD_AFTER_S (--cold-after-s)", "must be at most 315360000", "'inf'"]),
        ("NSM_MODELS", '["a"]', ["NSM_MODELS (--model)", "no model", '["a"]']),
        ("NSM_MODELS", "a=pulse-books,a=pulse-books-keyed", ["NSM_MODELS (--model)", "'a' is there twice"]),
        ("NSM_MODELS", "/", ["NSM_MODELS (--model)", "'/' has no name"]),
        ("NSM_NUM_THREADS", "100000", ["NSM_NUM_THREADS", "--num-threads", "1024", "'100000'"]),
        ("NSM_NUM_THREADS", "0", ["NSM_NUM_THREADS", "1", "'0'"]),
        ("NSM_LOG_LEVEL", "loud", ["NSM_LOG_LEVEL", "'debug'", "'loud'"]),
        ("NSM_LOG_FORMAT", "xml", ["NSM_LOG_FORMAT", "'json'", "'xml'"]),
        ("NSM_GRACE_S", "-1", ["NSM_GRACE_S (--grace-s)", "0", "'-1'"]),
        ("NSM_PREFIX_CACHE_MB", "-1", ["NSM_PREFIX_CACHE_MB", "0", "'-1'"]),
        ("NSM_DETACHED_S", "30", ["NSM_DETACHED_S was removed: a turn has 300 seconds"]),
        ("NSM_OTLP_ENDPOINT", "http://collector:4318", ["unknown setting NSM_OTLP_ENDPOINT"]),
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


@pytest.mark.parametrize("name", [name for name, field in Settings.model_fields.items() if "float" in str(field)])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "-1"])
def test_no_duration_is_without_end_or_negative(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^NSM_{name.upper()} \(--.*must be .*'{value}'"):
        load_settings(**{name: value})


@pytest.mark.parametrize(
    "value",
    [
        "nsm.example:8000",
        "https://nsm.example",
        "*.example",
        "a..b",
        "nsm.example/",
        "a b",
        "nsm.example.",
        "büro.example",
    ],
)
def test_a_host_that_no_request_can_name_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"NSM_ALLOWED_HOSTS \(--allowed-hosts\): must be host names"):
        load_settings(allowed_hosts=f"good.example,{value}")


@pytest.mark.parametrize("value", ["*", "NSM.example, nsm_gateway_1", "10.0.0.1"])
def test_hosts_that_requests_can_name_are_taken(value: str) -> None:
    assert load_settings(allowed_hosts=value).allowed_hosts == value


@pytest.mark.parametrize("name", ["model", "chat_template"])
def test_refused_value_is_named_once(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(**{name: "zz"})
    assert str(caught.value).count("'zz'") == 1


def test_traces_are_on_if_opentelemetry_names_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OTLP_ENDPOINTS, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert not is_tracing_on()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert is_tracing_on()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not is_tracing_on()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "user:secret@collector:4318")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT must be an http or https URL") as caught:
        is_tracing_on()
    assert "secret" not in str(caught.value)


def test_X9_user_without_a_home_directory_needs_a_data_directory_for_sqlite_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pathlib.Path.home", _no_home)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert load_settings(store="memory").data_dir is None
    assert load_settings(store="redis://host").database_path() is None
    assert load_settings(store="sqlite:////srv/x.db").database_path() == Path("/srv/x.db")
    with pytest.raises(ConfigError, match=r"NSM_DATA_DIR \(--data-dir\) is required"):
        load_settings().database_path()
    assert load_settings().store_name() == "sqlite"  # commands without sessions run all the same


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_every_setting_has_a_description_and_at_most_one_definition() -> None:
    for name, field in Settings.model_fields.items():
        assert (field.description or "").endswith("."), name
    assert shown(next(iter(Settings.model_fields))).section is not None


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
    assert readers == {"settings.py", "dev_server.py", "shared.py"}  # the latter two pass it on to programs


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


def test_kept_snapshots_is_bounded_by_the_stores() -> None:
    assert load_settings(retained_snapshots=MAX_RETAINED).retained_snapshots == MAX_RETAINED
    assert (load_settings().state_dtype, load_settings(state_dtype="int8").state_dtype) == ("fp32", "int8")
    with pytest.raises(ConfigError, match=r"NSM_STATE_DTYPE.*'bf16'"):
        load_settings(state_dtype="bf16")
    with pytest.raises(ConfigError, match="NSM_RETAINED_SNAPSHOTS"):
        load_settings(retained_snapshots=MAX_RETAINED + 1)
