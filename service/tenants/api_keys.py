"""API keys: what one looks like, the file that lists their hashes, and reading it again when it has changed."""

from __future__ import annotations

import dataclasses
import hmac
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from nsm_core.errors import ConfigError, reason_of
from nsm_core.hashing import identity
from service.messages import validation_message

logger = logging.getLogger("nsm.keys")

# The id is no secret: it finds the line of the file and may be logged. The rest holds 256 random bits.
KEY = re.compile(r"nsm_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
CHECK_INTERVAL_S = 1.0
NO_DIGEST = "0" * 64

TenantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]


class TenantLimits(BaseModel):
    """What one tenant may take; None: as much as the server gives.

    `requests_per_s` and `burst`: HTTP requests. `max_concurrent`: requests to the engine that run or wait, those of
    turns whose client has left included. These count in each server process, the other two in the store.
    `prefix_cache`: whether stateless requests keep states and start from them (docs/prefixes.md).
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    requests_per_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    burst: int | None = Field(default=None, ge=1)  # None: what a second gives, at least 1
    max_concurrent: int | None = Field(default=None, ge=1)
    max_sessions: int | None = Field(default=None, ge=0)
    max_stored_bytes: int | None = Field(default=None, ge=0)
    prefix_cache: bool = True

    @model_validator(mode="after")
    def _burst_has_a_rate(self) -> TenantLimits:
        if self.burst is not None and self.requests_per_s is None:
            raise ValueError("burst needs requests_per_s")
        return self


class ApiKey(BaseModel):
    """One key's line. `metrics`: whether it may read /metrics, which shows figures of all tenants."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    tenant: TenantName
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    metrics: bool = False


class KeyList(BaseModel):
    """The file as a whole. A list without keys is refused: it is most likely a file that is being written."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tenants: dict[TenantName, TenantLimits] = {}  # none: refused with the first key, which says what to add
    keys: list[ApiKey] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> KeyList:
        seen: set[str] = set()
        for key in self.keys:
            if key.tenant not in self.tenants:  # a misspelt name would be a tenant of its own, without limits
                raise ValueError(f"key {key.id}: its tenant is not declared; add [tenants.{key.tenant}]")
            if key.id in seen:
                raise ValueError(f"key {key.id} is listed twice")
            seen.add(key.id)
        return self


class _BegunList(KeyList):
    """A file in which the tenants stand and no key yet."""

    keys: list[ApiKey] = []


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of the file; `signature` tells whether the file is still that one."""

    signature: tuple[int, ...]
    keys: Mapping[str, ApiKey]
    tenants: Mapping[str, TenantLimits]


class KeyFile:
    """The keys of a file, always as the file is now: looked at again at most once a second, when somebody asks.

    A new file that cannot be used is logged, once, and the keys stay as they were.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError."""
        self._path = path
        self._clock = clock
        self._checked_at = clock()
        self._refused: tuple[int, ...] | None = None  # signature of the newest file that could not be used
        self._current = _read(path)

    def find(self, key: str) -> ApiKey | None:
        """The line of a key. Unknown, misspelt and withdrawn keys take the same time."""
        self._refresh()
        match = KEY.fullmatch(key)
        entry = self._current.keys.get(match[1]) if match else None
        is_right = hmac.compare_digest(digest_of(key), entry.sha256 if entry else NO_DIGEST)
        return entry if is_right else None

    def limits(self, tenant: str) -> TenantLimits | None:
        """None for a tenant that the file does not know (any more)."""
        self._refresh()
        return self._current.tenants.get(tenant)

    def tenants(self) -> tuple[str, ...]:
        """All that have a key, sorted."""
        self._refresh()
        return tuple(sorted({entry.tenant for entry in self._current.keys.values()}))

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        signature = _signature(self._path)
        if signature in (self._current.signature, self._refused):
            return
        try:
            self._current = _read(self._path)
        except ConfigError as error:
            self._refused = signature
            logger.error("%s; the keys stay as they were", error)
        else:
            self._refused = None
            logger.info("%s was read again: %d keys", self._path, len(self._current.keys))


def new_key() -> tuple[str, str]:
    """(key, its id)."""
    key_id = secrets.token_hex(6)
    return f"nsm_{key_id}_{secrets.token_urlsafe(32)}", key_id


def digest_of(key: str) -> str:
    """What the file has of a key.

    One SHA-256, without salt and not made slow on purpose: that protects secrets that can be guessed. These hold 256
    random bits, so nobody finds one from its hash, and every request would pay for a slow one.
    """
    return identity(key.encode("utf-8", "surrogatepass"))


def _read(path: Path) -> _Reading:
    signature = _signature(path)  # first: a write during the read then counts as a change the next time
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {reason_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the API keys in {path} are not valid TOML: {_location(error)}") from error
    listed = parse_keys(text, path)
    return _Reading(signature, {key.id: key for key in listed.keys}, listed.tenants)


def parse_keys(text: str, path: Path, *, allow_none: bool = False) -> KeyList:
    """What a file of keys says. `allow_none`: it may list no key yet. Raises ConfigError, which names `path`."""
    try:
        found = tomllib.loads(text)
        return (_BegunList if allow_none and "keys" not in found else KeyList).model_validate(found)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the API keys in {path} are not valid TOML: {_location(error)}") from error
    except ValidationError as error:
        # without the values: somebody may have put a key where its hash belongs
        finding = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in finding["loc"])
        colon = ":" if finding["type"] == "value_error" else ""
        name = f"{where}{colon} " if where else ""
        raise ConfigError(f"the API keys in {path} cannot be used: {name}{validation_message(finding)}") from None


def _location(error: ValueError) -> str:
    """Where, not what: a parser's own words may repeat the text."""
    found = re.search(r"at line \d+, column \d+|at end of document", str(error))
    return found[0] if found else "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "syntax error"


def _signature(path: Path) -> tuple[int, ...]:
    """Empty when there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)
