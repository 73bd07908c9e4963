"""Every setting of the server: read once from NSM_* variables and flags, checked, frozen, then passed down."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from nsm_core.config import EngineConfig
from nsm_core.errors import ConfigError
from nsm_core.execution.names import Wish
from nsm_core.model.bundled import find_checkpoint
from service.messages import wish_of

ENV_PREFIX = "NSM_"
REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
STORES = ("sqlite", "sqlite:///PATH", "memory", *(f"{scheme}://…" for scheme in REDIS_SCHEMES))
DATABASE_FILE = "sessions.db"
TRITON_TLS_FILES = ("triton_tls_ca", "triton_tls_cert", "triton_tls_key")
# settings of an engine in this process
LOCAL_ENGINE = (
    *("executor", "num_threads", "max_slots", "token_budget", "queue_limit", "speculation"),
    *("energy", "energy_core_watts"),
)


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """The user data directory by the XDG rule: a relative or empty XDG_DATA_HOME does not count."""
    base = Path(environ.get("XDG_DATA_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "share") / "nsm"


class Settings(BaseSettings):
    """Build it with `load_settings`: only that refuses misspelt variables."""

    # An empty variable is one that is not set: compose and unit files write them so.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port
    data_dir: Path = Field(default_factory=lambda: default_data_dir(os.environ))
    store: str = Field(default="sqlite", repr=False)  # see STORES; a Redis URL may hold a password
    model: Path | None = None  # a directory or a bundled name; None: pulse-books, with Triton what it serves
    backend: Literal["local", "triton"] = "local"  # where the model runs: in this process, or in Triton servers
    triton_url: str | None = None  # host:port of their gRPC, with commas between several
    triton_wait_s: PositiveFloat = Field(default=60.0, le=3_600.0)  # for a first of them to be ready at the start
    triton_tls_ca: Path | None = None  # PEM file of who signs their certificates; None: connections in the clear
    triton_tls_cert: Path | None = None  # PEM file of this gateway's own certificate, where they ask for one
    triton_tls_key: Path | None = None  # and its key's
    triton_tls_name: str | None = Field(default=None, min_length=1)  # in their certificates; None: as in triton_url
    served_model_name: str | None = Field(default=None, min_length=1)  # None: the checkpoint's own name
    api_keys_file: Path | None = None  # None: one tenant, no keys
    allow_anonymous: bool = False  # without keys, serve other hosts too
    executor: Wish = "auto"  # how the model is computed: nsm_core/execution/choose.py
    num_threads: int | None = Field(default=None, ge=1, le=1024)  # CPU threads of the model; None: torch decides

    max_slots: PositiveInt = 16  # requests that run at once
    # most tokens in one step, at least max_slots. Whatever runs waits for the step: a prompt of 24K tokens read in one
    # froze another stream for 6.6 s, in steps of 256 for 0.14 s
    token_budget: PositiveInt = 256
    queue_limit: int = Field(default=256, ge=0)  # requests that may wait
    speculation: Literal["off", "lookup"] = "lookup"  # drafts of tokens: docs/performance.md

    max_body_bytes: PositiveInt = 8 * 1024 * 1024
    max_prompt_tokens: PositiveInt = 131_072
    max_tokens_limit: PositiveInt = 32_768  # most new tokens a request may ask for
    request_timeout_s: PositiveFloat = Field(default=600.0, le=86_400.0)  # deadline of a request that names none
    receive_timeout_s: PositiveFloat = Field(default=30.0, le=3_600.0)  # for a head; between pieces of a body
    detached_s: float = Field(default=300.0, ge=0, le=86_400.0)  # a session's turn may go on without its client
    lease_s: float = Field(default=10.0, ge=1.0, le=3_600.0)  # a session stays busy so long after its server is lost
    turn_ttl_s: float = Field(default=86_400.0, ge=1.0, le=31_536_000.0)  # a turn's result can be had again so long
    turn_records: int = Field(default=16, ge=1, le=1024)  # of each session: the newest turns, for retries and readers
    kept_snapshots: int = Field(default=2, ge=0, le=8)  # older ones of each session, for rewinds and forks
    state_dtype: Literal["fp32", "fp16", "int8"] = "fp32"  # of stored states; those that run are always fp32
    grace_s: float = Field(default=20.0, ge=0, le=3_600.0)  # running requests may finish when the server stops

    prefix_cache: bool = True  # stateless requests start from stored states of earlier ones
    prefix_cache_mb: int = Field(default=512, ge=1, le=2**20)  # MiB that these take in all
    prefix_cache_tenant_mb: int | None = Field(default=None, ge=1)  # MiB of each tenant; None: as much as of all
    prefix_cache_min_tokens: int = Field(default=128, ge=64, le=2**20)  # what is kept of a prompt must spare
    prefix_cache_ttl_s: float = Field(default=3_600.0, ge=1.0, le=2_592_000.0)  # since a state was last used

    playground: bool = True  # the page at /

    energy: bool = True  # count joules, and charge them to requests
    energy_core_watts: PositiveFloat = Field(default=10.0, le=1_000.0)  # of a busy core, where nothing measures it

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"  # a line for people, or an object a line
    log_prompts: bool = False  # prompt text in the log; off: never

    otlp_endpoint: str | None = Field(default=None, repr=False)  # base URL of an OTLP receiver for traces; None: none
    trace_sample: float = Field(default=1.0, ge=0.0, le=1.0)  # share of the traces that begin here
    trace_service_name: str = Field(default="nsm", min_length=1)

    @field_validator("model", mode="after")
    @classmethod
    def _bundled_by_name(cls, model: Path | None) -> Path | None:
        return model if model is None else find_checkpoint(model)

    @field_validator("data_dir", "model", "api_keys_file", *TRITON_TLS_FILES, mode="after")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path if path is None else path.expanduser().absolute()

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

    @field_validator("otlp_endpoint", mode="after")
    @classmethod
    def _receiver(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            raise ValueError("must be an http or https URL, such as http://127.0.0.1:4318")
        return value

    @field_validator("triton_url", mode="after")
    @classmethod
    def _addresses(cls, value: str | None) -> str | None:
        for address in () if value is None else value.split(","):
            host, colon, port = address.strip().rpartition(":")
            if not host or not colon or "/" in host or not port.isascii() or not port.isdigit():
                raise ValueError("must be host:port, or several with commas between them")
        return value

    @model_validator(mode="after")
    def _backend_has_what_it_needs(self) -> Settings:
        if self.backend == "local":
            for name in ("triton_url", *TRITON_TLS_FILES, "triton_tls_name"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{ENV_PREFIX}{name.upper()} has no effect unless NSM_BACKEND is triton")
            return self
        if self.triton_url is None:
            raise ValueError("NSM_BACKEND=triton needs NSM_TRITON_URL: host:port of the gRPC of a Triton server")
        for name in LOCAL_ENGINE:
            if name in self.model_fields_set:
                raise ValueError(
                    f"{ENV_PREFIX}{name.upper()} has no effect with NSM_BACKEND=triton: it is a parameter of the "
                    "server's config.pbtxt"
                )
        return self

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if (self.triton_tls_cert is None) != (self.triton_tls_key is None):
            raise ValueError("NSM_TRITON_TLS_CERT and NSM_TRITON_TLS_KEY are of use together only")
        if self.triton_tls_ca is None and not (self.triton_tls_cert is None and self.triton_tls_name is None):
            raise ValueError("NSM_TRITON_TLS_CERT and NSM_TRITON_TLS_NAME have no effect without NSM_TRITON_TLS_CA")
        return self

    @model_validator(mode="after")
    def _engine_limits_fit(self) -> Settings:
        if self.token_budget < self.max_slots:  # what EngineConfig refuses too, without our names for it
            raise ValueError(
                f"{_named('token_budget')}: must be at least the {self.max_slots} of {_named('max_slots')}, "
                f"every row decodes one token a step; got '{self.token_budget}'"
            )
        return self

    def engine_config(self) -> EngineConfig:
        """The engine's share of the settings."""
        return EngineConfig(
            max_slots=self.max_slots,
            token_budget=self.token_budget,
            queue_limit=self.queue_limit,
            speculation=self.speculation,
        )

    def triton_urls(self) -> tuple[str, ...]:
        """host:port of each Triton server, in the order given, each once."""
        addresses = [] if self.triton_url is None else self.triton_url.split(",")
        return tuple(dict.fromkeys(address.strip() for address in addresses))

    def database_path(self) -> Path | None:
        """The file of the SQLite store; None when sessions are kept elsewhere."""
        if self.store == "memory" or self.is_redis:
            return None
        if self.store == "sqlite":
            return self.data_dir / DATABASE_FILE
        return Path(self.store.removeprefix("sqlite:///")).expanduser().absolute()

    @property
    def is_redis(self) -> bool:
        """Whether `store` is the URL of a Redis."""
        return self.store.partition("://")[0] in REDIS_SCHEMES

    def store_name(self) -> str:
        """Where sessions are kept, for people and logs: without user, password and options."""
        if self.is_redis:
            parts = urlsplit(self.store)
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        return str(self.database_path() or self.store)


def load_settings(**flags: Any) -> Settings:
    """Settings from the environment; a flag that is not None wins over its variable.

    Raises ConfigError, in one line: an unknown NSM_* variable, or a value that does not fit.
    """
    refuse_unknown_variables(os.environ)
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(item) for item in error.errors())) from error


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for an NSM_* variable that no setting reads: a typo must not run with the default."""
    known = [name.upper() for name in Settings.model_fields]
    for name in sorted(environ):
        rest = name.upper().removeprefix(ENV_PREFIX)
        if name.upper().startswith(ENV_PREFIX) and rest not in known:
            # without the prefix, which makes any two short names look alike
            close = difflib.get_close_matches(rest, known, n=1)
            names = ", ".join(ENV_PREFIX + other for other in known)
            hint = f"did you mean {ENV_PREFIX}{close[0]}?" if close else f"known: {names}"
            raise ConfigError(f"unknown setting {name}; {hint}")


def _describe(item: ErrorDetails) -> str:
    if not item["loc"]:
        return wish_of(item)
    name = str(item["loc"][0])
    return f"{_named(name)}: {wish_of(item)}, got {_shown(str(item['input']))}"


def _named(name: str) -> str:
    """A setting as its variable and as its option."""
    return f"{ENV_PREFIX}{name.upper()} (--{name.replace('_', '-')})"


def _shown(given: str) -> str:
    """What was given, unless it may hold a password."""
    return "a value with '@' or '?', not shown here" if "@" in given or "?" in given else repr(given)
