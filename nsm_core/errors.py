"""Every error the product raises on purpose.

NsmError
├── InvalidRequest       a field of a request is wrong (message: field, limit, given value)
├── BodyTooLarge         the request body is over the limit
├── BodyTooSlow          the request body did not come to its end in time
├── Unauthenticated      no valid API key
├── Forbidden            a valid API key, or a web page, that may not do this
├── MisdirectedRequest   the Host header names another server
├── RateLimited          the tenant has too many requests at this time
├── QuotaExceeded        the tenant has stored all it may
├── NotFound             no such model, session or route object
├── SessionBusy          another turn of this session is running
├── LeaseLost            a turn's right to write its session went to somebody else; nothing of it was kept
├── TurnCancelled        a session's turn was stopped on request; nothing of it was kept
├── VersionConflict      the session moved on since it was read
├── KeyReused            an idempotency key came again with another request
├── StateMismatch        a session was made by another model than the one that runs
├── SnapshotCorrupt      a session's stored bytes are damaged or another session's
│   └── LogCorrupt       that is its token log, and so nothing can be made from it
├── Overloaded           the queue is full
│   └── ServerStopping       the server stops: it takes no new work, or did not finish this
├── DeadlineExceeded     the request's own deadline passed
├── GrammarFailed        an answer cannot go on within the grammar that its request asked for
├── NumericalError       the model gave values that are not finite for this request
├── StepFailed           a step of the engine failed with this request in it; the engine goes on
├── EngineDead           the engine thread stopped; the process must be replaced
│   └── StartFailed          a process of a server with workers failed again and again and was never ready
├── StoreUnavailable     the session store cannot be reached
│   └── StoreDamaged     its file is no database, or lacks one of its tables
│       └── StoreReplaced    its files were removed, moved or replaced while it is open
├── StorageFull          the session store has no room
├── CheckpointError      model files are missing, damaged or do not fit together
└── ConfigError          a setting is unknown or has a bad value
    └── DeviceUnusable       a device is missing, or computes wrongly
"""

from __future__ import annotations


class NsmError(Exception):
    """Base of every deliberate error; `str(error)` is one line fit for a user.

    Its notes (`add_note`) are for operators: what a client must not see, such as paths.
    """

    def with_notes(self) -> str:
        """The line for a log, or a terminal of the machine's own user."""
        notes: list[str] = getattr(self, "__notes__", [])
        return f"{self} ({'; '.join(notes)})" if notes else str(self)


def reason_of(error: Exception) -> str:
    """Why a file cannot be used, for a message that names it: of a system's error only its words."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class InvalidRequest(NsmError):
    """A field of a request is wrong. `param` names the field as the client wrote it."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BodyTooLarge(NsmError):
    """The request body is larger than the server accepts."""


class BodyTooSlow(NsmError):
    """The client stopped sending its request body, or takes too long over it."""


class Unauthenticated(NsmError):
    """The request has no valid API key."""


class Forbidden(NsmError):
    """A valid API key, or a web page of another origin, may not do this."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class MisdirectedRequest(NsmError):
    """The Host header names a server that this one does not answer for."""


class RateLimited(NsmError):
    """A limit of the tenant on requests was reached; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float, code: str = "rate_limit_exceeded") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class QuotaExceeded(NsmError):
    """The tenant reached a storage limit; waiting does not help."""


class NotFound(NsmError):
    """Nothing with that id exists for this tenant. `param` names the field that held the id."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "not_found") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class SessionBusy(NsmError):
    """Another turn of the session is running; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LeaseLost(NsmError):
    """The turn's lease was taken over, or its session deleted, before it was committed; nothing was kept here."""


class TurnCancelled(NsmError):
    """Somebody stopped the turn, and its session stays at its last commit; or the session was deleted meanwhile."""


class VersionConflict(NsmError):
    """The session's version is not the one the writer (or the client) expected. `param` names the field, if one did."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class KeyReused(NsmError):
    """An idempotency key names one request, and this is another one."""

    def __init__(self, message: str, *, param: str = "Idempotency-Key") -> None:
        super().__init__(message)
        self.param = param


class StateMismatch(NsmError):
    """A session or state was made by another model than the one that runs. `param` names the field that had it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class SnapshotCorrupt(NsmError):
    """A session's stored bytes are damaged, or belong to another session, version or position."""


class LogCorrupt(SnapshotCorrupt):
    """A session's token log is not the one that was written: tokens are missing, too many or changed."""


class Overloaded(NsmError):
    """No room for another request now; try again after `retry_after_s`. `param` names the field that takes the room."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, param: str | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.param = param


class ServerStopping(Overloaded):
    """The server stops; another replica takes the request."""

    def __init__(self, message: str = "the server is stopping and takes no new work") -> None:
        super().__init__(message)


class ModelUnavailable(NsmError):
    """A model that the server knows cannot be loaded now; try again after `retry_after_s`. Other models are served."""

    def __init__(self, message: str, *, retry_after_s: float = 10.0) -> None:
        super().__init__(message)
        self.param = "model"
        self.retry_after_s = retry_after_s


class DeadlineExceeded(NsmError):
    """The request's own deadline passed before it finished."""


class GrammarFailed(NsmError):
    """An answer's grammar gave up, at a limit of work or by a fault. Nothing was sampled without it."""


class NumericalError(NsmError):
    """The model gave NaN or infinite logits for one request; other requests are not touched."""


class StepFailed(NsmError):
    """Something unexpected ended the requests of one step; the engine runs on, and other requests are not touched."""


class EngineDead(NsmError):
    """The engine thread stopped after an unexpected failure."""


class StartFailed(EngineDead):
    """A process of a server with workers failed several times in a row before it was ever ready."""


class StoreUnavailable(NsmError):
    """The session store cannot be reached or does not answer."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreDamaged(StoreUnavailable):
    """The store is damaged; an operator has to examine it."""

    def __init__(self, message: str, *, retry_after_s: float = 60.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class StoreReplaced(StoreDamaged):
    """The store's files are not those that were opened: a restart would lose all writes to them."""


class StorageFull(NsmError):
    """The session store has no room for another record; somebody has to make some first.

    `retry_after_s`: when it may be worth another try; None where waiting does not help.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = 60.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CheckpointError(NsmError):
    """Model files are missing, damaged or do not fit together."""


class ConfigError(NsmError):
    """A setting is unknown or has a value that cannot be used."""


class DeviceUnusable(ConfigError):
    """The device that was asked for is not there, cannot run the model, or computes wrongly."""
