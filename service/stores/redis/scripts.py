"""The Lua scripts of the stores: each is one transition, run by the server as a whole."""

from __future__ import annotations

import dataclasses
import hashlib
from importlib import resources


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """A script's source and the hash by which the server remembers it."""

    text: str
    sha: str


def load_script(name: str, *libraries: str, package: str = "service.stores.sessions") -> Script:
    """`redis_<name>.lua` of the package with its `libraries` before it, and the clock that all of these use; its first
    line, which has the flags, stays first.
    """
    clock = [_read("service.stores.sessions", "clock")] if libraries else []
    flags, _, body = _read(package, name).partition("\n")
    text = "\n".join((flags, *clock, *(_read(package, library) for library in libraries), body))
    # Redis itself names a script by its SHA-1
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(f"redis_{name}.lua").read_text(encoding="utf-8")


CREATE = load_script("create", "common")
ACQUIRE = load_script("acquire", "common", "turns")
RENEW = load_script("renew", "common")
RELEASE = load_script("release", "common")
LOAD = load_script("load", "common")
COMMIT = load_script("commit", "common", "snapshots", "advance", "turns")
PUT_SNAPSHOT = load_script("put_snapshot", "common", "snapshots")
SHED = load_script("shed", "common")
REWIND = load_script("rewind", "common", "advance", "turns")
UPDATE = load_script("update", "common")
DELETE = load_script("delete", "common")
TURN_BEGIN = load_script("turn_begin", "common", "turns")
TURN_APPEND = load_script("turn_append", "common", "turns")
TURN_END = load_script("turn_end", "common", "turns")
TURN_GET = load_script("turn_get", "common", "turns")
TURN_CANCEL = load_script("turn_cancel", "common", "turns")
INDEX_RESERVE = load_script("index_reserve", "index")
INDEX_PUT = load_script("index_put", "index")
INDEX_FORGET = load_script("index_forget", "index")
INDEX_USAGE = load_script("index_usage", "index")
INDEX_PAGE = load_script("index_page", "index")
