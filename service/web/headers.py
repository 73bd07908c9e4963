"""Single headers of a request, out of the few that it has: `Headers` makes a text of each to compare it."""

from __future__ import annotations

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str:
    """The first one of this name, which is in lower case; empty without one."""
    for given, value in scope["headers"]:
        if given == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def has_header(scope: Scope, name: bytes) -> bool:
    """`name`: in lower case."""
    return any(given == name for given, _ in scope["headers"])
