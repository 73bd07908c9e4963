"""A turn as bytes, for the store: the request, so that any replica can run it again; its tokens; the result.

JSON: a record may be read by another replica. Most are packed: each turn writes some, and they look alike. What has its
default is left out.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import nsm_core.errors
from nsm_core.engine.request import Finished, FinishReason, TokenEvent, TokenLogprob
from nsm_core.errors import NsmError
from nsm_core.grammars.grammar import Grammar
from nsm_core.hashing import identity_of
from nsm_core.sampling.params import SamplingParams
from nsm_core.stats import EnergyUse
from service.state.resume import TurnRequest
from service.stores.sessions.base import LogPoint
from service.stores.sessions.codec import decoding
from service.stores.sessions.key import SessionKey

_COUNTS = ("prompt_tokens", "cached_tokens", "replayed_tokens", "completion_tokens")
# Once: a turn's commit, which its client waits for, asks for them
_USUAL_SAMPLING = tuple((one.name, getattr(SamplingParams(), one.name)) for one in dataclasses.fields(SamplingParams))
_JSON = json.JSONEncoder(separators=(",", ":"))
MIN_PACKED_BYTES = 64  # smaller ones, a few tokens, would hardly get smaller
MAX_PACKED_BYTES = 64 * 1024  # larger ones stay as they are: packing them would hold up the event loop
# Level, method, window of 4 KiB, memory: with zlib's usual ones each record takes 268 KB of memory, and clears a part
PACKING = (6, zlib.DEFLATED, 12, 4)
PACKED_HEAD = b"x\xbb"  # of a stream with the usual window, which may use less of it, and a dictionary
PACKED = b"x"  # the first byte of what zlib makes; JSON never begins so
# What records have in common. Part of the format: records of before could not be read with another one.
_USUAL = (
    b'"logit_bias":{"presence_penalty":"frequency_penalty":"repetition_penalty":"min_p":"top_k":"top_p":"stop":["'
    b'"stop_token_ids":["grammar":{"logprobs":"choice_index":"min_tokens":"has_own_seed":true,"is_verbatim":true,'
    b'"error":{"kind":"NsmError","message":"energy":[{"rebuilt":"missing","other_numerics":"session_joules":'
    b'{"model_fingerprint":"0123456789abcdef","input_ids":[1,2,3],"is_verbatim":false,"sampling":{"max_tokens":64,'
    b'"temperature":0.8,"seed":1234567890,"ignore_eos":true},"has_own_seed":false,"deadline_at":null,"render_options":'
    b'{"created":1,"model":"pulse-books-keyed","system_fingerprint":"fp_0123456789ab_cpu/int8/native-1",'
    b'"has_logprobs":false,"has_usage_chunk":false,"has_energy":false,"has_routing":false}},"tokens":"2","reason":'
    b'"stop","length","prompt_tokens":10,"cached_tokens":10,"replayed_tokens":10,"completion_tokens":64,'
    b'"commit_point":{"version":1,"position":10,"num_log_tokens":10}}'
)
_KINDS = {2: "H", 4: "I"}  # of packed ids, by their bytes


@dataclasses.dataclass(frozen=True, slots=True)
class StoredToken:
    """One sampled token, with its log-probability when the client asked for them."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitPoint:
    """The head of a session right after a committed turn."""

    version: int
    position: int
    num_log_tokens: int

    def to_fields(self) -> dict[str, int]:
        """For `CommitPoint(**fields)`."""
        return {"version": self.version, "position": self.position, "num_log_tokens": self.num_log_tokens}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """The stored result of a turn. `commit_point` is None, and `error` is not, when it was not committed.

    `render_options`: see TurnRequest. Counts, reason and energy are those of `finished`;
    its text follows from the tokens. `session_joules`: see TurnOutcome.
    """

    sampling: SamplingParams
    render_options: Mapping[str, Any]
    tokens: Sequence[StoredToken]
    finished: Finished
    commit_point: CommitPoint | None = None
    rebuilt: str | None = None
    other_numerics: str | None = None
    session_joules: float = 0.0
    error: NsmError | None = None


# Of an id: one object for all turns
plain_token = functools.lru_cache(maxsize=2**16)(StoredToken)


def stored_token(event: TokenEvent) -> StoredToken:
    return plain_token(event.token_id) if event.logprob is None else StoredToken(event.token_id, event.logprob)


def digest_of(fields: Mapping[str, Any]) -> str:
    """Of all that determines a turn's result, whatever the order of the fields."""
    return identity_of(json.dumps(fields, sort_keys=True, separators=(",", ":")))


def encode_request(request: TurnRequest, *, model_fingerprint: str) -> bytes:
    """The input of `decode_request`, which makes the same request again on any replica with that model."""
    left_s = None if request.deadline is None else request.deadline - time.monotonic()
    fields = {
        "model_fingerprint": model_fingerprint,
        "input_ids": request.input_ids,
        "is_verbatim": request.is_verbatim,
        "sampling": _sampling_fields(request.sampling),
        "has_own_seed": request.has_own_seed,
        "deadline_at": None if left_s is None else time.time() + left_s,
        "render_options": dict(request.render_options),
    }
    if request.after is not None:
        fields["after"] = [request.after.version, request.after.num_log_tokens]
    if request.num_opening is not None:
        fields["num_opening"] = request.num_opening
    if request.outlasts_engine:
        fields["outlasts_engine"] = True
    return _dump(fields)


def decode_request(raw: bytes, key: SessionKey, *, turn_id: str) -> tuple[TurnRequest, str]:
    """The request as it arrives now, and the fingerprint of the model that ran it. Raises SnapshotCorrupt."""
    with decoding("the stored request of a turn"):
        fields = _load(raw)
        now, deadline_at, after = time.monotonic(), fields["deadline_at"], fields.get("after")
        request = TurnRequest(
            request_id=turn_id,
            key=key,
            input_ids=tuple(fields["input_ids"]),
            is_verbatim=fields["is_verbatim"],
            sampling=_sampling_of(fields["sampling"]),
            has_own_seed=fields["has_own_seed"],
            arrival=now,
            deadline=None if deadline_at is None else now + (deadline_at - time.time()),
            render_options=fields["render_options"],
            is_resumable=True,  # somebody has come back to it
            outlasts_engine=fields.get("outlasts_engine", False),
            after=None if after is None else LogPoint(*after),
            num_opening=fields.get("num_opening"),
        )
        return request, fields["model_fingerprint"]


def encode_tokens(tokens: Iterable[StoredToken]) -> bytes:
    return _dump(_tokens_field(tokens))


def decode_tokens(raw: bytes) -> list[StoredToken]:
    with decoding("the record of a running turn"):
        return _tokens_of(_load(raw))


def encode_result(result: TurnResult) -> bytes:
    finished, error = result.finished, result.error
    counts = {name: getattr(finished, name) for name in _COUNTS}
    optional = {
        "commit_point": None if result.commit_point is None else result.commit_point.to_fields(),
        "rebuilt": result.rebuilt,
        "other_numerics": result.other_numerics,
        "energy": [dataclasses.asdict(use) for use in finished.energy],
        "session_joules": result.session_joules,
        "error": None if error is None else {"kind": type(error).__name__, "message": str(error)},
    }
    fields = {
        "sampling": _sampling_fields(result.sampling),
        "render_options": dict(result.render_options),
        "tokens": _tokens_field(result.tokens),
        "reason": finished.reason.value,
        **{name: value for name, value in {**counts, **optional}.items() if value},
    }
    return _dump(fields)


def decode_result(raw: bytes) -> TurnResult:
    with decoding("the stored result of a turn"):
        fields = _load(raw)
        counts = {name: fields.get(name, 0) for name in _COUNTS}
        energy = tuple(EnergyUse(**use) for use in fields.get("energy", ()))
        point, error = fields.get("commit_point"), fields.get("error")
        return TurnResult(
            sampling=_sampling_of(fields["sampling"]),
            render_options=fields["render_options"],
            tokens=_tokens_of(fields["tokens"]),
            finished=Finished(reason=FinishReason(fields["reason"]), energy=energy, **counts),
            commit_point=None if point is None else CommitPoint(**point),
            rebuilt=fields.get("rebuilt"),
            other_numerics=fields.get("other_numerics"),
            session_joules=fields.get("session_joules", 0.0),
            error=None if error is None else _error_of(**error),
        )


def _dump(value: object) -> bytes:
    raw = _JSON.encode(value).encode()
    if not MIN_PACKED_BYTES <= len(raw) <= MAX_PACKED_BYTES:
        return raw
    packer = zlib.compressobj(*PACKING, zdict=_USUAL)
    packed = packer.compress(raw) + packer.flush()
    return PACKED_HEAD + packed[len(PACKED_HEAD) :]


def _load(raw: bytes) -> Any:
    """Raises ValueError, or zlib.error."""
    if raw[:1] != PACKED:
        return json.loads(raw)
    unpacker = zlib.decompressobj(zdict=_USUAL)
    found = unpacker.decompress(raw, MAX_PACKED_BYTES)
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut, or goes on after its end")
    return json.loads(found)


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Those that are not as in `SamplingParams()`."""
    changed = {name: value for name, usual in _USUAL_SAMPLING if (value := getattr(sampling, name)) != usual}
    if sampling.logit_bias:
        changed["logit_bias"] = {str(key): value for key, value in sampling.logit_bias.items()}
    if sampling.grammar is not None:
        changed["grammar"] = sampling.grammar.to_fields()
    return changed


def _sampling_of(fields: Mapping[str, Any]) -> SamplingParams:
    grammar = fields.get("grammar")
    changes = {
        "logit_bias": {int(key): value for key, value in fields.get("logit_bias", {}).items()},
        "stop": tuple(fields.get("stop", ())),
        "stop_token_ids": tuple(fields.get("stop_token_ids", ())),
        "grammar": None if grammar is None else Grammar.from_fields(grammar),
    }
    return SamplingParams(**{**fields, **changes})


def _tokens_field(tokens: Iterable[StoredToken]) -> str | list[list[Any]]:
    """A list; where no token has log-probabilities, its ids in base64: little endian, after the bytes of one."""
    stored = list(tokens)
    if any(token.logprob is not None for token in stored):
        return [_token_fields(token) for token in stored]
    ids = [token.token_id for token in stored]
    width = 2 if max(ids, default=0) < 2**16 else 4
    return f"{width}{base64.b64encode(struct.pack(f'<{len(ids)}{_KINDS[width]}', *ids)).decode()}"


def _tokens_of(field: str | Sequence[Sequence[Any]]) -> list[StoredToken]:
    if not isinstance(field, str):
        return [_token_of(token) for token in field]
    width, raw = int(field[0]), base64.b64decode(field[1:], validate=True)
    return [plain_token(token_id) for (token_id,) in struct.iter_unpack(f"<{_KINDS[width]}", raw)]


def _token_fields(token: StoredToken) -> list[Any]:
    scored = token.logprob
    return [token.token_id] if scored is None else [token.token_id, scored.logprob, scored.top]


def _token_of(fields: Sequence[Any]) -> StoredToken:
    if len(fields) == 1:
        return StoredToken(fields[0])
    token_id, logprob, top = fields
    return StoredToken(
        token_id, TokenLogprob(token_id=token_id, logprob=logprob, top=tuple((entry[0], entry[1]) for entry in top))
    )


def _error_of(kind: str, message: str) -> NsmError:
    """The error as it was, but for what only its first receiver needed (a field's name, when to try again)."""
    found = getattr(nsm_core.errors, kind, NsmError)
    try:
        error = found(message)
    except TypeError:  # a required field is missing
        error = NsmError(message)
    return error if isinstance(error, NsmError) else NsmError(message)
