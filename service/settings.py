"""The server's settings. Each is defined here once; options, help, docs/settings.md and the chart are made from it."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from nsm_core.config import EngineLimits
from nsm_core.errors import CheckpointError, ConfigError, NsmError
from nsm_core.execution.names import AUTO_DEVICE, ExecutorName, device_names
from nsm_core.model.bundled import find_checkpoint
from service.addresses import is_address, is_host_name
from service.messages import validation_message

ENV_PREFIX = "NSM_"
OTLP_DEFAULT = "http://localhost:4318"  # of OpenTelemetry
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
STORES = ("sqlite", "sqlite:///PATH", "memory", *(f"{scheme}://…" for scheme in REDIS_SCHEMES))
DATABASE_FILE = "sessions.db"
OWN_PORTS = {"http": 80, "https": 443}  # of an origin's scheme
# What were settings once, whose defaults nobody had a reason to change
FIXED = {
    "detached_s": "a turn has 300 seconds to finish after its client left",
    "stream_interval_ms": "a busy server gathers tokens for at most 20 ms",
    "stream_ping_s": "a silent stream sends a comment every 15 seconds",
    "turn_ttl_s": "the result of a turn is stored for a day",
}


def items_of(value: str | None) -> tuple[str, ...]:
    """The parts of a list with commas, each once."""
    parts = [] if value is None else value.split(",")
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How help and docs show a setting, beside its type, default and description.

    `section`: the heading of the settings from this one on. `default`: words for a default that is not a plain value.
    `page`: Markdown link to details. `is_engine`: of an engine in this process; refused with Triton servers.
    """

    section: str | None = None
    default: str | None = None
    page: str | None = None
    is_engine: bool = False


def default_data_dir(environ: Mapping[str, str]) -> Path | None:
    """The user data directory by the XDG rule: a relative or empty XDG_DATA_HOME does not count.

    None for a user without a home directory, as in a container that runs with an arbitrary user id.
    """
    base = Path(environ.get("XDG_DATA_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".local" / "share"
        except RuntimeError:
            return None
    return base / "nsm"


class Settings(BaseModel):
    """Build it with `load_settings`: only that reads the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host: Annotated[str, Shown(section="Network, store and model")] = Field(
        default="127.0.0.1", description="Address to listen on."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes any free port.")
    workers: Annotated[int, Shown(page="[workers](operations.md#workers)", is_engine=True)] = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes that answer HTTP, beside one for the engine. 0: one process does both.",
    )
    data_dir: Annotated[Path | None, Shown(default="the user's data directory")] = Field(
        default_factory=lambda: default_data_dir(os.environ), description="Directory of the SQLite store."
    )
    store: Annotated[str, Shown(page="[Redis](redis.md#choosing-it)")] = Field(
        default="sqlite",
        repr=False,  # a Redis URL may hold a password
        description="Store of the sessions: sqlite, sqlite:///PATH (absolute with four /), memory or a Redis URL.",
    )
    model: Annotated[Path | None, Shown(default="the bundled model")] = Field(
        default=None,
        description="Model file or directory, or the name of a bundled model. With Triton servers: the model they must "
        "have.",
    )
    models: Annotated[str | None, Shown(default="none", page="[several models](models.md#several-models)")] = Field(
        default=None,
        description="Further models, with commas, each as PATH or NAME=PATH. As an option, repeat --model instead.",
    )
    models_memory_mb: Annotated[
        int | None, Shown(default="no limit", page="[several models](models.md#several-models)")
    ] = Field(
        default=None,
        ge=1,
        description="MiB that further models may take together, files and states.",
    )
    chat_template: Annotated[
        str | None, Shown(default="the model's own", page="[chat templates](models.md#chat-template)")
    ] = Field(default=None, description="How chats become text: a template's name, or a file of Jinja.")
    triton_url: Annotated[str | None, Shown(default="none", page="[Triton](triton.md#the-gateway)")] = Field(
        default=None,
        description="Triton servers that run the model: host:port of their gRPC, with commas. "
        "Without it the model runs in this process.",
    )
    triton_tls_dir: Annotated[Path | None, Shown(default="no TLS", page="[TLS](triton.md#tls)")] = Field(
        default=None,
        description="Directory with ca.crt of the Triton servers, and this side's tls.crt and tls.key.",
    )
    served_model_name: Annotated[str | None, Shown(default="the model's own")] = Field(
        default=None, min_length=1, description="Model name that clients use."
    )
    api_keys_file: Annotated[Path | None, Shown(default="no keys", page="[tenants](tenants.md)")] = Field(
        default=None, description="TOML file of API keys and tenants."
    )
    state_key_file: Annotated[
        Path | None, Shown(default="no signatures", page="[states](states.md#states-that-travel)")
    ] = Field(
        default=None,
        description="File with a secret of at least 32 bytes that signs returned states and exported files.",
    )
    allow_anonymous: bool = Field(default=False, description="Serve other hosts without API keys.")
    allowed_hosts: Annotated[str | None, Shown(default="none", page="[security](security.md#what-holds)")] = Field(
        default=None,
        description="Without API keys: the server's host names, with commas; * for any.",
    )
    cors_origins: Annotated[str | None, Shown(default="none", page="[security](security.md#what-holds)")] = Field(
        default=None, description="Origins, with commas, whose web pages may use the server; * for any."
    )

    device: Annotated[str, Shown(section="Engine", page="[devices](performance.md#the-device)", is_engine=True)] = (
        Field(
            default=AUTO_DEVICE,
            description="Where the model runs: cpu, cuda, or a GPU by its number as cuda:1. auto: a GPU whose kernels "
            "pass their check, else the CPU. Several with commas: an engine process for each.",
        )
    )
    executor: Annotated[ExecutorName, Shown(page="[performance](performance.md)", is_engine=True)] = Field(
        default="auto",
        description="How the model is computed. auto: by device and model file. native: weights in int8, native-int4: "
        "in int4, cuda: in bf16, eager: as in the file. With -fp16-states: running states in fp16.",
    )
    num_threads: Annotated[int | None, Shown(default="a core each, at most the group's quota", is_engine=True)] = Field(
        default=None, ge=1, le=1024, description="CPU threads of the model."
    )
    max_slots: Annotated[
        int | None,
        Shown(
            default="16; on a GPU up to 512, as half of its free memory holds",
            page="[capacity](operations.md#capacity)",
            is_engine=True,
        ),
    ] = Field(default=None, ge=1, description="Requests that run at once. Each has a slot with its state.")
    token_budget: Annotated[
        int | None,
        Shown(default="256; on a GPU 16384", page="[capacity](operations.md#capacity)", is_engine=True),
    ] = Field(
        default=None,
        ge=1,
        description="Most tokens in one step, at least max_slots. A long step delays every stream.",
    )
    queue_limit: Annotated[int, Shown(is_engine=True)] = Field(default=256, ge=0, description="Requests that may wait.")
    speculation: Annotated[
        Literal["off", "lookup"], Shown(page="[drafts](performance.md#drafts-of-tokens)", is_engine=True)
    ] = Field(default="lookup", description="Drafts of tokens at low load.")
    energy: Annotated[bool, Shown(page="[energy](energy.md)", is_engine=True)] = Field(
        default=True, description="Count joules and charge them to requests."
    )

    max_body_bytes: Annotated[PositiveInt, Shown(section="Requests")] = Field(
        default=8 * 1024 * 1024, description="Largest request body."
    )
    max_file_bytes: Annotated[int | None, Shown(default="as max_body_bytes", page="[batches](batches.md)")] = Field(
        default=None, ge=1, description="Largest upload to /v1/files, with its form."
    )
    max_prompt_tokens: PositiveInt = Field(default=131_072, description="Longest prompt.")
    max_tokens_limit: PositiveInt = Field(default=32_768, description="Largest max_tokens that a request may set.")
    request_timeout_s: PositiveFloat = Field(
        default=600.0, le=86_400.0, description="Deadline of a request that sets no timeout."
    )
    grace_s: Annotated[float, Shown(page="[when a server stops](sessions.md#when-a-server-stops)")] = Field(
        default=20.0, ge=0, le=3_600.0, description="Time for running requests to finish when the server stops."
    )

    lease_s: Annotated[float, Shown(section="Sessions and prefixes", page="[leases](sessions.md#leases)")] = Field(
        default=10.0, ge=1.0, le=3_600.0, description="Time until a lost server's sessions are free."
    )
    retained_snapshots: Annotated[int, Shown(page="[older snapshots](sessions.md#older-snapshots)")] = Field(
        default=2, ge=0, le=8, description="Older states of each session, for rewinds and forks."
    )
    snapshot_tokens: Annotated[
        int | None,
        Shown(
            default="as many as the server reads in 40 ms, at most 4,096",
            page="[snapshots](sessions.md#when-states-are-stored)",
        ),
    ] = Field(
        default=None,
        ge=0,
        le=2**31,
        description="Tokens that a session may have to read again. 0: each turn stores its state.",
    )
    state_cache_mb: Annotated[int, Shown(page="[snapshots](sessions.md#when-states-are-stored)")] = Field(
        default=256, ge=0, le=2**20, description="MiB of states in memory, for the next turn of their session."
    )
    cold_after_s: Annotated[float | None, Shown(default="never", page="[cold sessions](sessions.md#cold-sessions)")] = (
        Field(
            default=None,
            ge=60,
            le=315_360_000,  # ten years
            description="Seconds after its last turn until a session's state is deleted; its log stays.",
        )
    )
    state_dtype: Annotated[
        Literal["fp32", "fp16", "int8"], Shown(page="[rounded states](sessions.md#rounded-states)")
    ] = Field(default="fp32", description="Number format of stored states.")
    prefix_cache_mb: Annotated[int, Shown(page="[prefixes](prefixes.md)")] = Field(
        default=128,
        ge=0,
        le=2**20,
        description="MiB of the cache from which stateless requests start. 0: no cache.",
    )

    fine_tuning_jobs: Annotated[
        int, Shown(section="Fine-tuning", page="[tuned states](tuned-states.md#jobs)", is_engine=True)
    ] = Field(
        default=0,
        ge=0,
        le=64,
        description="Fine-tuning jobs that run at once on one store. 0: none are taken.",
    )

    playground: Annotated[bool, Shown(section="Playground and logs", page="[playground](playground.md)")] = Field(
        default=True, description="Serve the playground at /."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level logged.")
    log_format: Annotated[Literal["text", "json"], Shown(page="[logs](tracing.md#logs)")] = Field(
        default="text", description="text: a line for people. json: one object for each line."
    )
    log_prompts: bool = Field(default=False, description="Write prompts to the log.")

    @field_validator("model", mode="after")
    @classmethod
    def _first_model(cls, model: Path | None) -> Path | None:
        _, equals, path = str(model).partition("=")
        if model is not None and equals and not model.exists():
            raise ValueError(
                f"NAME= is for further models: write {path}, and {label('served_model_name')} for its name"
            )
        return model if model is None else _found(model)

    @field_validator("chat_template", mode="after")
    @classmethod
    def _usable_template(cls, given: str | None) -> str | None:
        """A file's text in place of its path: the template stays what it was when the server started."""
        if given is None:
            return None
        from nsm_core.chat_template import read_template  # Jinja is not imported by commands that only show help

        try:
            return read_template(given)
        except CheckpointError as error:
            raise ValueError(str(error)) from error

    @field_validator("device", mode="after")
    @classmethod
    def _known_devices(cls, device: str) -> str:
        return ",".join(device_names(device))

    @field_validator("data_dir", "model", "api_keys_file", "state_key_file", "triton_tls_dir", mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        try:
            return path if path is None else path.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError("has no home directory for ~: write the whole path") from error

    @field_validator("log_level", mode="before")
    @classmethod
    def _any_case(cls, level: object) -> object:
        return level.lower() if isinstance(level, str) else level

    @field_validator("store", mode="after")
    @classmethod
    def _known_store(cls, store: str) -> str:
        if store in ("sqlite", "memory") or store.removeprefix("sqlite:///") not in ("", store):
            return store
        if store.partition("://")[0] in REDIS_SCHEMES and "://" in store:
            return store  # the store itself reads the rest
        raise ValueError(f"must be one of {', '.join(STORES)}")

    @field_validator("triton_url", mode="after")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        for address in () if value is None else value.split(","):
            host, colon, port = address.strip().rpartition(":")
            if not host or not colon or "/" in host or not port.isascii() or not port.isdigit():
                raise ValueError("must be host:port, or several with commas between them")
        return value

    @field_validator("allowed_hosts", mode="after")
    @classmethod
    def _host_names(cls, value: str | None) -> str | None:
        for name in items_of(value):
            if name != "*" and not is_host_name(name.lower()):
                raise ValueError(
                    "must be host names such as nsm.example, without ports, with commas between them, or *"
                )
        return value

    @field_validator("cors_origins", mode="after")
    @classmethod
    def _origins(cls, value: str | None) -> str | None:
        for origin in items_of(value):
            if origin != "*" and not _is_origin(origin):
                raise ValueError(
                    "must be as browsers send them, such as https://app.example, with commas between several, or *"
                )
        return value

    @field_validator("models", mode="after")
    @classmethod
    def _readable_models(cls, value: str | None) -> str | None:
        _named_models(value)
        return value

    @model_validator(mode="after")
    def _triton_or_an_engine_here(self) -> Settings:
        if self.triton_url is None:
            if self.triton_tls_dir is not None:
                raise ValueError(f"{label('triton_tls_dir')} has no effect without NSM_TRITON_URL")
            return self
        for name in engine_settings():
            if name in self.model_fields_set:
                raise ValueError(f"{label(name)} has no effect with NSM_TRITON_URL: {self._instead_with_triton(name)}")
        return self

    @staticmethod
    def _instead_with_triton(name: str) -> str:
        if name == "workers":
            return "the engine runs in Triton servers; for more processes start several gateways on one store"
        return "it is a parameter of the server's config.pbtxt"

    @model_validator(mode="after")
    def _workers_share_a_store(self) -> Settings:
        if self.workers > 1 and self.store == "memory":
            raise ValueError(f"{label('workers')} above 1 needs a store that processes share, not memory")
        return self

    @model_validator(mode="after")
    def _engine_limits_fit(self) -> Settings:
        if self.token_budget is not None and self.token_budget < (self.max_slots or 0):
            # EngineLimits refuses it too, without the names of the settings
            raise ValueError(
                f"{label('token_budget')}: must be at least the {self.max_slots} of {label('max_slots')}, "
                f"every row decodes one token a step; got '{self.token_budget}'"
            )
        return self

    @model_validator(mode="after")
    def _further_models(self) -> Settings:
        if self.models_memory_mb is not None and not self.further_models():
            raise ValueError(f"{label('models_memory_mb')} has no effect without {label('models')}")
        if self.further_models() and self.triton_url is not None:
            raise ValueError(f"{label('models')} has no effect with NSM_TRITON_URL: a gateway serves one Triton model")
        if self.further_models() and self.num_workers:
            name = label("workers" if self.workers else "device")
            raise ValueError(f"{label('models')} has no effect with {name}: one process loads models")
        return self

    def further_models(self) -> dict[str, Path]:
        """The models beside the first, by the names that clients use, which are those of their files if not given.

        They were read before, so none of them is wrong.
        """
        return _named_models(self.models)

    def for_other_model(self, name: str) -> Settings:
        """The settings of a model beside the first: words for chats are its own."""
        return self.model_copy(update={"served_model_name": name, "chat_template": None})

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the model runs: an engine on each."""
        return device_names(self.device)

    @property
    def num_workers(self) -> int:
        """Processes that answer HTTP apart from engines; 0: one process does both."""
        return max(self.workers, int(len(self.devices) > 1))

    def engine_limits(self) -> EngineLimits:
        """The engine's share of the settings."""
        return EngineLimits(
            max_slots=self.max_slots,
            token_budget=self.token_budget,
            queue_limit=self.queue_limit,
            speculation=self.speculation,
        )

    def triton_urls(self) -> tuple[str, ...]:
        """host:port of each Triton server, in the order given, each once. Empty: the model runs in this process."""
        return items_of(self.triton_url)

    def database_path(self) -> Path | None:
        """The file of the SQLite store; None when sessions are kept elsewhere.

        Raises ConfigError for a user without a home directory, who must name a directory.
        """
        if self.store == "sqlite":
            if self.data_dir is None:
                raise ConfigError(
                    f"{label('data_dir')} is required: this user has no home directory for the SQLite store"
                )
            return self.data_dir / DATABASE_FILE
        path = self.store.removeprefix("sqlite:///")
        return None if path == self.store else Path(path).expanduser().absolute()

    @property
    def is_redis(self) -> bool:
        """Whether `store` is the URL of a Redis."""
        return self.store.partition("://")[0] in REDIS_SCHEMES

    @property
    def naming_store(self) -> contextlib.AbstractContextManager[None]:
        """`naming` with the setting that says where sessions are."""
        return naming("data_dir" if self.store == "sqlite" else "store")

    def store_name(self) -> str:
        """Where sessions are kept, for people and logs: without user, password and options."""
        if self.is_redis:
            parts = urlsplit(self.store)
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if self.store == "sqlite" and self.data_dir is None:
            return self.store
        return str(self.database_path() or self.store)


def load_settings(**flags: Any) -> Settings:
    """Settings from the environment; a flag that is not None wins over its variable.

    Raises ConfigError, in one line: an unknown NSM_* variable, or a value that does not fit.
    """
    refuse_unknown_variables(os.environ)
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**(_variables(os.environ) | given))
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(item) for item in error.errors())) from error


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings by their variables. An empty one is one that is not set: compose and unit files write them so."""
    found = {name.upper(): value for name, value in environ.items() if value}
    return {name: found[_variable(name)] for name in Settings.model_fields if _variable(name) in found}


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for an NSM_* variable that no setting reads: a typo must not run with the default."""
    known = [name.upper() for name in Settings.model_fields]
    for name in sorted(environ):
        rest = name.upper().removeprefix(ENV_PREFIX)
        if name.upper().startswith(ENV_PREFIX) and rest not in known:
            if rest.lower() in FIXED:
                raise ConfigError(f"{name} was removed: {FIXED[rest.lower()]}")
            # without the prefix, which makes any two short names look alike
            close = difflib.get_close_matches(rest, known, n=1)
            names = ", ".join(ENV_PREFIX + other for other in known)
            hint = f"did you mean {ENV_PREFIX}{close[0]}?" if close else f"known: {names}"
            raise ConfigError(f"unknown setting {name}; {hint}")


def is_tracing_on() -> bool:
    """Whether OpenTelemetry's variables name a receiver of traces; it reads them itself. Raises ConfigError."""
    receivers = [(name, os.environ[name]) for name in OTLP_ENDPOINTS if os.environ.get(name)]
    for name, url in receivers:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"{name} must be an http or https URL, such as http://127.0.0.1:4318, got {_shown(url)}")
    return bool(receivers) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


def trace_receiver() -> str:
    """Where spans are sent: the variable for traces wins over the one for all signals."""
    return next((os.environ[name] for name in reversed(OTLP_ENDPOINTS) if os.environ.get(name)), OTLP_DEFAULT)


@contextlib.contextmanager
def naming(*names: str, only: type[NsmError] = NsmError) -> Iterator[None]:
    """A start that fails inside, with an error of the class `only`, names these settings in a note of its error."""
    try:
        yield
    except only as error:
        note = "set by " + ", ".join(f"{_variable(name)} or {_option(name)}" for name in names)
        if note not in getattr(error, "__notes__", []):
            error.add_note(note)
        raise


def shown(name: str) -> Shown:
    """How a setting is shown."""
    return next((item for item in Settings.model_fields[name].metadata if isinstance(item, Shown)), Shown())


def shown_default(name: str) -> str:
    """A setting's default, in words where it is not a plain value."""
    default = Settings.model_fields[name].default
    if isinstance(default, bool):
        return "yes" if default else "no"
    return shown(name).default or (f"{default:.16g}" if isinstance(default, float) else str(default))


def engine_settings() -> tuple[str, ...]:
    """The settings of an engine in this process; Triton servers have their own."""
    return tuple(name for name in Settings.model_fields if shown(name).is_engine)


def _named_models(models: str | None) -> dict[str, Path]:
    """Raises ValueError for a name that is there twice, and for a bundled name that is not known."""
    found: dict[str, Path] = {}
    for item in items_of(models):
        given, equals, rest = item.partition("=")
        path = _found(Path(rest if equals else item))
        name = given if equals else path.resolve().name
        if not name:
            raise ValueError(f"must be PATH or NAME=PATH, with commas between several, and {item!r} has no name")
        if name in found:
            raise ValueError(f"names must differ, and {name!r} is there twice; write NAME=PATH")
        found[name] = path.expanduser().absolute()
    return found


def _is_origin(text: str) -> bool:
    """As browsers send it: in lower case, and without the scheme's own port."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    if parts.scheme not in OWN_PORTS or not (is_host_name(host) or is_address(host)):
        return False
    authority = f"[{host}]" if ":" in host else host
    return text == f"{parts.scheme}://{authority}" + ("" if port in (None, OWN_PORTS[parts.scheme]) else f":{port}")


def _found(model: Path) -> Path:
    """A bundled model by its name. Raises ValueError."""
    try:
        return find_checkpoint(model)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def label(name: str) -> str:
    """A setting as its variable and as its option."""
    return f"{_variable(name)} ({_option(name)})"


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _option(name: str) -> str:
    return "--model" if name == "models" else f"--{name.replace('_', '-')}"  # repeated for further models


def _describe(item: ErrorDetails) -> str:
    if not item["loc"]:
        return validation_message(item)
    name = str(item["loc"][0])
    message, given = f"{label(name)}: {validation_message(item)}", str(item["input"])
    return message if repr(given[:80]) in message else f"{message}, got {_shown(given)}"


def _shown(given: str) -> str:
    """The value given, unless it may hold a password."""
    return "a value with '@' or '?', not shown here" if "@" in given or "?" in given else repr(given)
