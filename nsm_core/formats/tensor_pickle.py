"""Reads the pickle of a PyTorch file as data: tensors, containers, numbers and texts. Nothing in it can run.

A pickle is a program for a small machine. This one knows the instructions that PyTorch's own files use; a name of a
function or class becomes a text, and the only "calls" are the three that describe tensors and an empty dictionary.
"""

from __future__ import annotations

import dataclasses
import pickletools
import struct
from collections.abc import Iterator, Mapping
from typing import Any

MAX_PICKLE_BYTES = 8 << 20  # that of a model of 13B parameters has a quarter of a megabyte

DTYPES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
}
IGNORED_STORAGES = {f"torch {kind}Storage" for kind in ("Long", "Int", "Short", "Char", "Byte", "Bool")}
_EMPTY_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_KNOWN = {*DTYPES, *IGNORED_STORAGES, _EMPTY_DICT, _TENSOR, _PARAMETER}


_LINES = "lines"
# Names of instructions by code, and the forms of their arguments in `struct`; t and w: that many bytes of a text, or of
# a whole number, come after
_INSTRUCTIONS: Mapping[int, tuple[str, str]] = {
    0x80: ("PROTO", "<B"), 0x95: ("FRAME", "<Q"), ord("."): ("STOP", ""), ord("("): ("MARK", ""),
    ord("N"): ("NONE", ""), 0x88: ("NEWTRUE", ""), 0x89: ("NEWFALSE", ""),
    ord("}"): ("EMPTY_DICT", ""), ord("]"): ("EMPTY_LIST", ""), ord(")"): ("EMPTY_TUPLE", ""),
    ord("t"): ("TUPLE", ""), 0x85: ("TUPLE1", ""), 0x86: ("TUPLE2", ""), 0x87: ("TUPLE3", ""),
    ord("a"): ("APPEND", ""), ord("e"): ("APPENDS", ""), ord("s"): ("SETITEM", ""), ord("u"): ("SETITEMS", ""),
    0x94: ("MEMOIZE", ""), ord("q"): ("BINPUT", "<B"), ord("r"): ("LONG_BINPUT", "<I"),
    ord("h"): ("BINGET", "<B"), ord("j"): ("LONG_BINGET", "<I"),
    ord("c"): ("GLOBAL", _LINES), 0x93: ("STACK_GLOBAL", ""), ord("Q"): ("BINPERSID", ""),
    ord("R"): ("REDUCE", ""), ord("b"): ("BUILD", ""),
    ord("X"): ("BINUNICODE", "<It"), 0x8C: ("SHORT_BINUNICODE", "<Bt"),
    ord("J"): ("BININT", "<i"), ord("K"): ("BININT1", "<B"), ord("M"): ("BININT2", "<H"),
    0x8A: ("LONG1", "<Bw"), ord("G"): ("BINFLOAT", ">d"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """Module and name of something that a pickle refers to."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class PickledStorage:
    """Numbers of a kind under a key of the archive."""

    kind: str
    key: str
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class PickledTensor:
    """A view of a storage, unchecked. `offset` and `strides` in numbers."""

    storage: PickledStorage
    offset: Any
    shape: Any
    strides: Any


class _Mark:
    pass


_MARK = _Mark()


class UnreadablePickle(Exception):
    """The problem, to follow the file's name."""


def read_pickle(raw: bytes) -> Any:
    """The value that a pickle describes. Raises UnreadablePickle."""
    machine = _Machine()
    try:
        for name, argument in _instructions(raw):
            if name == "STOP":
                return machine.pop()
            machine.run(name, argument)
    except UnreadablePickle:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise UnreadablePickle(f"the pickle is damaged: {type(error).__name__}") from error
    raise UnreadablePickle("the pickle has no end")


def _instructions(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Names and arguments, in order."""
    at = 0
    while at < len(raw):
        code = raw[at]
        if code not in _INSTRUCTIONS:
            name = next((known.name for known in pickletools.opcodes if known.code == chr(code)), f"0x{code:02x}")
            raise UnreadablePickle(f"the pickle has the instruction {name}, which no file of tensors needs")
        name, form = _INSTRUCTIONS[code]
        argument, at = _argument(raw, at + 1, form)
        yield name, argument


def _argument(raw: bytes, at: int, form: str) -> tuple[Any, int]:
    """An instruction's argument, and where it ends."""
    if form == _LINES:  # module and name
        middle = raw.index(b"\n", at)
        end = raw.index(b"\n", middle + 1)
        return f"{raw[at:middle].decode()} {raw[middle + 1 : end].decode()}", end + 1
    if not form:
        return None, at
    fixed = form.rstrip("tw")
    (value,) = struct.unpack_from(fixed, raw, at)
    at += struct.calcsize(fixed)
    if fixed == form:
        return value, at
    counted = raw[at : at + value]
    if len(counted) != value:
        raise UnreadablePickle("the pickle has no end")
    decoded = (
        counted.decode("utf-8", "surrogatepass")
        if form.endswith("t")
        else int.from_bytes(counted, "little", signed=True)
    )
    return decoded, at + value


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def run(self, name: str, argument: Any) -> None:
        """One instruction."""
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self._stack.append(argument)
        elif name not in _SKIPPED:
            getattr(self, f"_{name.lower()}")(argument)

    def _since_mark(self) -> list[Any]:
        items = []
        while (item := self.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _tuple1(self, _: Any) -> None:
        self._last_as_tuple(1)

    def _tuple2(self, _: Any) -> None:
        self._last_as_tuple(2)

    def _tuple3(self, _: Any) -> None:
        self._last_as_tuple(3)

    def _last_as_tuple(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self._stack.append(items)

    def _append(self, _: Any) -> None:
        item = self.pop()
        _require(self._stack[-1], list).append(item)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        _require(self._stack[-1], list).extend(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self._store([key, value])

    def _setitems(self, _: Any) -> None:
        self._store(self._since_mark())

    def _store(self, items: list[Any]) -> None:
        target = _require(self._stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_require(key, str | int)] = value

    def _build(self, _: Any) -> None:
        self.pop()  # attributes of a dictionary: nothing that a tensor needs

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _binput(self, argument: Any) -> None:
        self._memo[argument] = self._stack[-1]

    _long_binput = _binput

    def _binget(self, argument: Any) -> None:
        self._stack.append(self._memo[argument])

    _long_binget = _binget

    def _global(self, argument: Any) -> None:
        self._stack.append(_name(argument))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._stack.append(_name(f"{_require(module, str)} {_require(name, str)}"))

    def _binpersid(self, _: Any) -> None:
        tag, kind, key, _device, count = _require(self.pop(), tuple)
        if tag != "storage" or not isinstance(kind, Name) or type(count) is not int:
            raise UnreadablePickle("the pickle refers to something that is no storage of tensors")
        self._stack.append(PickledStorage(kind.text, _require(key, str), count))

    def _reduce(self, _: Any) -> None:
        arguments, function = _require(self.pop(), tuple), _require(self.pop(), Name)
        if function.text == _EMPTY_DICT and not arguments:
            self._stack.append({})
        elif function.text == _TENSOR and len(arguments) >= 4:
            storage, offset, shape, strides = arguments[:4]
            self._stack.append(PickledTensor(_require(storage, PickledStorage), offset, shape, strides))
        elif function.text == _PARAMETER and arguments:
            self._stack.append(_require(arguments[0], PickledTensor))
        else:
            raise UnreadablePickle(f"the pickle calls {function.text[:80]!r}: only tensors are read, and no code runs")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_SKIPPED = {"PROTO", "FRAME"}


def _require(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise UnreadablePickle("the pickle is damaged: a value is of another kind than its use needs")
    return value


def _name(text: str) -> Name:
    if text not in _KNOWN:
        raise UnreadablePickle(f"the pickle names {text[:80].replace(' ', '.')!r}: only tensors are read, no code runs")
    return Name(text)


def named_tensors(value: Any) -> dict[str, PickledTensor]:
    """The tensors of a state dictionary by name; other values are no part of a model. Raises UnreadablePickle."""
    if not isinstance(value, dict):
        raise UnreadablePickle("the pickle holds no dictionary of tensors")
    found = {name: item for name, item in value.items() if isinstance(name, str) and isinstance(item, PickledTensor)}
    nested = [name for name, item in value.items() if isinstance(item, dict)]
    if nested and not found:
        raise UnreadablePickle(f"the tensors are in a dictionary of their own, {str(nested[0])[:40]!r}: save it alone")
    return found
