"""Writes docs/settings.md from the settings and the options of `nsm serve`: python -m deploy.docs.settings"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from service.cli.serve import serve
from service.settings import ENV_PREFIX, Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
HEAD = """# Settings

Every setting of the server is a variable and an option of `nsm serve`: `NSM_MAX_SLOTS=32` is `--max-slots 32`, and the
option wins. They are read once, at the start. An unknown `NSM_` variable or a value that does not fit ends the start
with a line that names it; an empty variable counts as unset. Switches are `true` or `false`; as options they are
`--energy` and `--no-energy`. The other commands (`nsm chat`, `nsm sessions`, …) read the same variables. Names that end
in `_S` are in seconds, in `_MB` in MiB.

`python -m deploy.docs.settings` writes this page from the code (`service/settings.py`, `service/cli/serve.py`), and a
test compares them.
"""
# the first setting of each section, in the order of `Settings`
SECTIONS = {
    "host": "Where it listens, what it serves",
    "max_slots": "The engine",
    "max_body_bytes": "Requests",
    "detached_s": "Sessions and turns",
    "prefix_cache": "Stored prefixes",
    "playground": "The page, energy, logs, traces",
}
# what one line cannot say
MORE = {
    "store": "[Redis](redis.md#choosing-it)",
    "backend": "[Triton](triton.md#the-gateway)",
    "triton_tls_ca": "[TLS](triton.md#tls)",
    "api_keys_file": "[tenants](tenants.md)",
    "executor": "[performance](performance.md)",
    "token_budget": "[capacity](operations.md#capacity)",
    "speculation": "[drafts](performance.md#drafts-of-tokens)",
    "receive_timeout_s": "[slow clients](api.md#slow-clients)",
    "detached_s": "[what is kept](sessions.md#what-is-kept-and-when)",
    "lease_s": "[leases](sessions.md#leases)",
    "turn_ttl_s": "[retries](sessions.md#retries)",
    "kept_snapshots": "[older snapshots](sessions.md#older-snapshots)",
    "state_dtype": "[rounded states](sessions.md#rounded-states)",
    "grace_s": "[when a server stops](sessions.md#when-a-server-stops)",
    "prefix_cache": "[prefixes](prefixes.md)",
    "playground": "[playground](playground.md)",
    "energy": "[energy](energy.md)",
    "log_format": "[logs](tracing.md#logs)",
    "otlp_endpoint": "[traces](tracing.md)",
}
KINDS = {bool: "switch", int: "whole number", float: "number", str: "text", Path: "path"}


def kind_of(annotation: Any) -> str:
    """What a value may look like, in words: `whole number`, or the choices."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return next(kind_of(part) for part in get_args(annotation) if part is not NoneType)
    return KINDS[annotation]


def row_of(name: str) -> str:
    """One setting as a row of a table."""
    shown = get_args(inspect.signature(serve, eval_str=True).parameters[name].annotation)[1]
    more = f" ({MORE[name]})" if name in MORE else ""
    kind = kind_of(Settings.model_fields[name].annotation)
    return f"| `{ENV_PREFIX}{name.upper()}` | {kind} | {shown.show_default} | {shown.help.rstrip('.')}{more} |"


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    for name in Settings.model_fields:
        if name in SECTIONS:
            lines += ["", f"## {SECTIONS[name]}", "", "| variable | value | default | |", "| --- | --- | --- | --- |"]
        lines.append(row_of(name))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
