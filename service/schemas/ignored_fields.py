"""Fields of other servers' bodies that change nothing in an answer: checked for their types, then dropped."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nsm_core.errors import InvalidRequest
from service.messages import quoted
from service.web.errors import shown

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

KIND_NAMES: Mapping[type, str] = {
    str: "a string", int: "an integer", bool: "a boolean (true or false)", dict: "a JSON object", list: "a list"
}  # fmt: skip
NONE: Mapping[str, type] = MappingProxyType({})
# Of all generation bodies
COMMON: Mapping[str, type] = MappingProxyType(
    {"user": str, "service_tier": str, "safety_identifier": str, "prompt_cache_key": str,
     "prompt_cache_retention": str, "prompt_cache_options": dict, "parallel_tool_calls": bool, "reasoning": dict,
     "reasoning_effort": str}
)  # fmt: skip
# Hints for models that have such a dial
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
REASONING: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"effort": EFFORTS, "summary": ("auto", "concise", "detailed")}
)
# Parts of items that no answer of this server has
INCLUDED = (
    "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip


def check_ignored(name: str, value: Any, kind: type) -> None:
    """Raises InvalidRequest: what has the wrong type was meant as something else."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InvalidRequest(f"{name} must be {KIND_NAMES[kind]}, got {shown(value)}", param=name)
    if name == "metadata" and isinstance(value, dict):
        for key, text in value.items():
            if not isinstance(text, str):
                param = f"metadata.{key}"
                raise InvalidRequest(f"{param} must be a string, got {shown(text)}", param=param)
        check_metadata(value)
    elif name == "reasoning_effort":
        _check_one_of(EFFORTS, value, name)
    elif name == "reasoning" and isinstance(value, dict):
        _check_reasoning(value)
    elif name == "include" and isinstance(value, list):
        _check_included(value)


def _check_reasoning(reasoning: dict[str, Any]) -> None:
    for name, value in reasoning.items():
        param = f"reasoning.{name}"
        if name not in REASONING:
            raise InvalidRequest(f"unknown field {quoted(param)}", param=param, code="unknown_parameter")
        if value is not None:
            _check_one_of(REASONING[name], value, param)


def _check_included(names: list[Any]) -> None:
    for name in names:
        if name not in INCLUDED:
            message = f"include: {shown(name)} is not supported by this server"
            raise InvalidRequest(message, param="include", code="unsupported_parameter")


def _check_one_of(known: tuple[str, ...], value: Any, param: str) -> None:
    if value not in known:
        raise InvalidRequest(f"{param} must be one of {', '.join(known)}, got {shown(value)}", param=param)


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Raises InvalidRequest for too many pairs, and for keys and values that are too long."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise InvalidRequest(
            f"metadata must have at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}", param="metadata"
        )
    for key, value in metadata.items():
        _check_chars("keys", key, MAX_METADATA_KEY_CHARS)
        _check_chars("values", value, MAX_METADATA_VALUE_CHARS)
    return metadata


def _check_chars(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        message = f"metadata must have {what} of at most {limit} characters, got {len(text)}: {shown(text)}"
        raise InvalidRequest(message, param="metadata")
