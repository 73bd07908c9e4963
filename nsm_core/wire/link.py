"""Messages of a link: the one long call of a gateway to a Triton worker, which carries the events of all its requests.

What the gateway says comes as calls of their own, each with the link's name and a number, as Triton may hand them to
the worker in another order. What the worker says are answers to the link: one for each step, with arrays. Each is
msgpack in the tensor `messages`. Reached by gateways only; other clients have the calls of `calls.py`.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from nsm_core.errors import NsmError
from nsm_core.wire.calls import GenerateCall
from nsm_core.wire.errors import Failure, decode_failure, encode_failure, reading_answer
from nsm_core.wire.local import Step
from nsm_core.wire.tensors import MESSAGES, refuse

# Answers that a worker sends ahead of those that the gateway has said it took. Beyond them steps are gathered.
WINDOW = 256
TAKEN_EVERY = 64  # answers, between two accounts of a gateway


class Start(msgspec.Struct, tag=True, array_like=True):
    """A request, by the gateway's number for it. `call`: with token ids; streamed, as all of a link are."""

    number: int
    call: GenerateCall


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """The request shall end."""

    number: int


class Taken(msgspec.Struct, tag=True, array_like=True):
    """So many answers of the link were taken since it began."""

    num_answers: int


class Opened(msgspec.Struct, tag=True, array_like=True):
    """The first answer of a link."""


class LinkStep(msgspec.Struct, tag=True, array_like=True):
    """What became visible. `retained`: the ids of end states that the worker has kept. `missing`: requests that ended
    because the worker lacks the state that their calls name: see StateMissing.
    """

    step: Step
    retained: list[tuple[int, str]]
    missing: list[int]


ToWorker = Start | Cancel | Taken
ToGateway = Opened | LinkStep


def _encode_other(value: object) -> object:
    if isinstance(value, NsmError):
        return encode_failure(Failure(error=value))
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _decode_other(kind: type, value: Any) -> object:
    if issubclass(kind, NsmError):
        return decode_failure(value).error
    raise TypeError(f"a {kind.__name__} cannot be read")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_to_worker: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker], dec_hook=_decode_other)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway, dec_hook=_decode_other)


def encode_to_worker(messages: list[ToWorker]) -> bytes:
    return _encoder.encode(messages)


def decode_to_worker(raw: bytes) -> list[ToWorker]:
    """Raises InvalidRequest."""
    try:
        return _to_worker.decode(raw)
    except msgspec.MsgspecError as error:
        refuse(MESSAGES, f"messages of a link ({error})", raw)


def encode_to_gateway(message: ToGateway) -> bytes:
    return _encoder.encode(message)


def decode_to_gateway(raw: bytes | None) -> ToGateway:
    """Raises EngineDead for an answer that no worker of this contract sends."""
    with reading_answer():
        if raw is None:
            refuse(MESSAGES, "in every answer of a link", None)
        return _to_gateway.decode(raw)
