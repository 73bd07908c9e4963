"""Redis's errors as ours, and which of them pass by themselves."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator

from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from nsm_core.errors import NsmError, SnapshotCorrupt, StorageFull, StoreUnavailable

RETRY_AFTER_S = 1.0
RETRY_AFTER_REFUSED_S = 60.0  # somebody has to change a user or a server

# First words of answers that a server gives while it starts, fails over or is behind.
_PASSING_CODES = ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "TRYAGAIN", "UNKILLABLE")
_REFUSALS = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.NoPermissionError,
)
_NO_SUCH_DATABASE = "DB"  # "DB index is out of range"
_REFUSAL_CODES = ("NOAUTH", "WRONGPASS", "NOPERM", _NO_SUCH_DATABASE)
_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.RedisClusterException,  # no node of the cluster answers, or nobody has the slot
    OSError,
    asyncio.IncompleteReadError,
)
# Words for clients and logs. Of nested errors the innermost that is here tells most
_REASONS: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((exceptions.ReadOnlyError,), "takes no writes: the server is a read-only replica"),
    ((ConnectionRefusedError,), "cannot be reached: connection refused"),
    ((socket.gaierror,), "cannot be reached: no address is known for its host name"),
    ((ssl.SSLError,), "cannot be reached: TLS failed"),
    ((exceptions.TimeoutError, TimeoutError), "cannot be reached: no answer in time"),
    ((exceptions.ClusterDownError,), "cannot be reached: the cluster is down"),
    ((MasterNotFoundError,), "cannot be reached: no Sentinel names a master"),
    ((ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError), "cannot be reached: the connection broke"),
)
_REASONS_BY_CODE = {
    "BUSY": "does not answer: a script holds the server",
    "CLUSTERDOWN": "cannot be reached: the cluster is down",
    "LOADING": "is not ready: the server still loads its data",
    "MASTERDOWN": "is not ready: the replica has lost its master",
    "NOREPLICAS": "takes no writes: too few replicas are connected",
    "READONLY": "takes no writes: the server is a read-only replica",
}
# Another kind of server than NSM_STORE says: the kinds of the error, a part of its text, words
_OTHER_SERVERS: tuple[tuple[type[BaseException], str, str], ...] = (
    (exceptions.InvalidResponse, "", "is no Redis: another kind of server answers at the address of NSM_STORE"),
    (ssl.SSLError, "WRONG_VERSION_NUMBER", "does not speak TLS: NSM_STORE needs redis in place of rediss"),
    (
        exceptions.ResponseError,
        "unknown command 'SENTINEL'",
        "is no Sentinel: NSM_STORE needs redis:// for one server, redis+cluster:// for a cluster",
    ),
    (
        exceptions.ResponseError,
        "unknown command 'CLUSTER'",
        "is no cluster: NSM_STORE needs redis:// for one server, redis+sentinel:// for Sentinels",
    ),
    (
        exceptions.ResponseError,
        "cluster support disabled",
        "is no cluster: NSM_STORE needs redis:// in place of redis+cluster://",
    ),
    (
        exceptions.ResponseError,
        "unknown command",
        "lacks a command that sessions need: Redis must be 7.0 or later, and a Sentinel needs redis+sentinel://",
    ),
)
_NO_TLS_HINT = "; if the server has no TLS, NSM_STORE needs redis in place of rediss"
ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError, asyncio.IncompleteReadError)


def is_refusal(error: BaseException) -> bool:
    """The server does not let us in, or not do this. A cluster's client says so in the error's cause."""
    causes = (error, error.__cause__)
    return any(isinstance(cause, _REFUSALS) or _code(cause) in _REFUSAL_CODES for cause in causes)


def is_passing(error: BaseException) -> bool:
    """The same command may succeed in a moment."""
    return not is_refusal(error) and (isinstance(error, _PASSING) or _code(error) in _PASSING_CODES)


def translate(error: BaseException, *, is_tls: bool = False) -> NsmError:
    """Clients read these: no address in them, and nothing that Redis said, which may quote arguments.

    `is_tls`: whether NSM_STORE asks for TLS.
    """
    if isinstance(error, exceptions.OutOfMemoryError) or _code(error) == "OOM":
        return StorageFull("the session store is full: Redis reached its maxmemory")
    if _code(error) == _NO_SUCH_DATABASE:
        message = "the session store has no database of the number that NSM_STORE ends with"
        return StoreUnavailable(message, retry_after_s=RETRY_AFTER_REFUSED_S)
    if is_refusal(error):
        return StoreUnavailable(f"the session store {_refusal(error)}", retry_after_s=RETRY_AFTER_REFUSED_S)
    if _code(error) == "WRONGTYPE":
        return SnapshotCorrupt("a key of the session store holds a value of another type; it is not used")
    if _code(error) == "MISCONF":
        message = "the session store cannot write to its disk"
        return StoreUnavailable(message, retry_after_s=RETRY_AFTER_REFUSED_S)
    other = _other_server(error)
    if other is not None:
        return StoreUnavailable(f"the session store {other}", retry_after_s=RETRY_AFTER_REFUSED_S)
    if is_tls and _may_lack_tls(error):
        return StoreUnavailable(f"the session store {_reason(error)}{_NO_TLS_HINT}", retry_after_s=RETRY_AFTER_S)
    if is_passing(error):
        return StoreUnavailable(f"the session store {_reason(error)}", retry_after_s=RETRY_AFTER_S)
    kind = _code(error) or type(error).__name__
    return StoreUnavailable(f"the session store failed ({kind})")


def _refusal(error: BaseException) -> str:
    causes = [cause for cause in (error, error.__cause__) if cause is not None]
    if any(isinstance(cause, exceptions.NoPermissionError) or _code(cause) == "NOPERM" for cause in causes):
        return "refuses the user a command or a key (NOPERM)"
    if any("Authentication required" in str(cause) for cause in causes):
        return "asks for a password, and NSM_STORE has none"
    return "refuses the user or the password"


def _other_server(error: BaseException) -> str | None:
    """What is there in place of what NSM_STORE names, by the innermost cause that tells."""
    found: str | None = None
    for cause in _causes(error):
        words = (words for kind, part, words in _OTHER_SERVERS if isinstance(cause, kind) and part in str(cause))
        found = next(words, found)
    return found


def _may_lack_tls(error: BaseException) -> bool:
    """A server without TLS waits for the end of a line, and never answers."""
    return any(
        isinstance(cause, MasterNotFoundError)
        or (isinstance(cause, exceptions.TimeoutError) and "connecting" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what led to it, the innermost last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _reason(error: BaseException) -> str:
    """What passes by itself, by the innermost cause that has words here."""
    found: str | None = None
    for cause in _causes(error):
        found = next((words for kinds, words in _REASONS if isinstance(cause, kinds)), found)
        found = _REASONS_BY_CODE.get(_code(cause), found)
    return found or f"cannot be reached ({type(error).__name__})"


def _code(error: BaseException | None) -> str:
    word = str(error).split(" ", 1)[0]
    return word if word.isupper() else ""
