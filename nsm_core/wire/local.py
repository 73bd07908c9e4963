"""Messages between an engine's process and the gateways of the same machine, over a Unix socket.

Each message is msgpack behind its length. A step of the engine is one message to each gateway: numbers of requests and
ids of tokens as arrays, and only what is no plain token as a value of its own. Text that follows from the ids alone is
made by the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import msgspec

from nsm_core.engine.request import Finished, GenerationRequest, NamedState, PromptScored, PromptState, TokenEvent
from nsm_core.errors import NsmError
from nsm_core.grammars.grammar import Grammar
from nsm_core.inspection.report import LayerReport
from nsm_core.model_info import ModelInfo
from nsm_core.state.report import Detail, StateReport
from nsm_core.stats import EngineStats
from nsm_core.wire.errors import Failure, decode_failure, encode_failure

LENGTH_BYTES = 4
PART_BYTES = 64 * 1024  # of a state, in one message


class Submit(msgspec.Struct, tag=True, array_like=True):
    """A request by the gateway's number for it. Its deadline is a reading of the clock that both processes share."""

    number: int
    request: GenerationRequest


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """The request shall end."""

    number: int


class AskState(msgspec.Struct, tag=True, array_like=True):
    """`InferenceBackend.inspect_state`."""

    number: int
    state: bytes | None
    detail: Detail
    layer: int | None


class AskText(msgspec.Struct, tag=True, array_like=True):
    """`InferenceBackend.inspect_text`."""

    number: int
    state: bytes | None
    ids: tuple[int, ...]
    has_tokens: bool


class AskGrammar(msgspec.Struct, tag=True, array_like=True):
    """`InferenceBackend.check_grammar`."""

    number: int
    grammar: Grammar


class FetchState(msgspec.Struct, tag=True, array_like=True):
    """`HoldsStates.fetch_state`."""

    number: int
    held: int


class FindState(msgspec.Struct, tag=True, array_like=True):
    """`HoldsStates.find_state`."""

    number: int
    name: str


class NameState(msgspec.Struct, tag=True, array_like=True):
    """`HoldsStates.name_state`."""

    name: str
    held: int
    about: bytes


class ForgetState(msgspec.Struct, tag=True, array_like=True):
    """`HoldsStates.forget_state`."""

    name: str


class DropState(msgspec.Struct, tag=True, array_like=True):
    """`HoldsStates.drop_state`."""

    held: int


class Hello(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine's process. `tokenizer`: as JSON."""

    model: ModelInfo
    tokenizer: str
    max_requests: int


class CannotStart(msgspec.Struct, tag=True, array_like=True):
    """The first message of an engine's process that ends now."""

    message: str


class Step(msgspec.Struct, tag=True, array_like=True):
    """What became visible for one gateway's requests.

    `numbers`, `ids`: little-endian unsigned integers of 32 bits, of the plain tokens in order, whose text the gateway
    makes; `shown_numbers`, `shown_ids`, `texts`: the same of requests whose text is made here. The events of a request
    are in this order: `scored`, `states`, tokens, `ends`. `num_others`: requests of other gateways.
    """

    numbers: bytes
    ids: bytes
    shown_numbers: bytes
    shown_ids: bytes
    texts: list[str]
    scored: list[tuple[int, PromptScored]]
    states: list[tuple[int, PromptState]]
    tokens: list[tuple[int, TokenEvent]]
    ends: list[tuple[int, Finished]]
    num_others: int


class Status(msgspec.Struct, tag=True, array_like=True):
    """Now and then. `num_others`: requests of other gateways."""

    stats: EngineStats
    num_others: int


class AnswerPart(msgspec.Struct, tag=True, array_like=True):
    """The next bytes of `raw` of the answer to the question of that number, which comes with the last of them."""

    number: int
    raw: bytes


class Answer(msgspec.Struct, tag=True, array_like=True):
    """To a question of that number."""

    number: int
    state: StateReport | None = None
    layers: tuple[LayerReport, ...] = ()
    raw: bytes | None = None
    named: NamedState | None = None
    error: NsmError | None = None


Question = AskState | AskText | AskGrammar | FetchState | FindState
ToEngine = Submit | Cancel | NameState | ForgetState | DropState | Question
ToGateway = Hello | CannotStart | Step | Status | AnswerPart | Answer


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
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_other)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway, dec_hook=_decode_other)


def encode(message: ToEngine | ToGateway) -> bytes:
    """The message with its length in front."""
    raw = _encoder.encode(message)
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def encode_in_parts(answer: Answer) -> Iterator[bytes]:
    """The answer as several messages, each short: those of steps need not wait for megabytes."""
    raw, start = answer.raw or b"", 0
    while len(raw) - start > PART_BYTES:
        yield encode(AnswerPart(answer.number, raw[start : start + PART_BYTES]))
        start += PART_BYTES
    yield encode(msgspec.structs.replace(answer, raw=raw[start:]) if start else answer)


async def read_to_engine(reader: asyncio.StreamReader) -> ToEngine:
    """The next message of a gateway. Raises IncompleteReadError at the end, msgspec.DecodeError for another message."""
    return _to_engine.decode(await _read(reader))


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little"))


class MessagesToGateway:
    """Cuts what a gateway reads from an engine's process into messages, wherever the pieces end."""

    def __init__(self) -> None:
        self._begun = bytearray()  # of a message whose rest has not come

    def feed(self, data: bytes) -> Iterator[ToGateway]:
        """The messages that are whole now. Raises msgspec.DecodeError for another message."""
        if self._begun:
            self._begun += data
            if len(self._begun) < _end_of_first(self._begun):
                return
            data, self._begun = bytes(self._begun), bytearray()
        start, whole = 0, memoryview(data)
        while len(whole) - start >= (end := _end_of_first(whole[start:])):
            yield _to_gateway.decode(whole[start + LENGTH_BYTES : start + end])
            start += end
        self._begun += whole[start:]


def _end_of_first(data: bytearray | memoryview) -> int:
    """How many bytes of `data` its first message has; more than there are if its length has not come."""
    return LENGTH_BYTES + (int.from_bytes(data[:LENGTH_BYTES], "little") if len(data) >= LENGTH_BYTES else 0)
