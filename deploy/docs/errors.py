"""Writes docs/errors.md from the tree of errors and its statuses: python -m deploy.docs.errors"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from nsm_core.errors import NsmError
from service.web.errors import INTERNAL, INVALID, RULES, Rule
from service.web.examples import ANSWERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
RETRIED = {408, 409, 429}  # by stock clients, beside 5xx, unless the answer says otherwise
HEAD = """# Errors

Every refusal has this shape:

```console
$ curl -s localhost:8000/v1/completions -H 'content-type: application/json' -d '{{"prompt": "Hi", "temperature": 3}}'
{refusal}
```

`message` names the field, its limit and the given value. `param` is the field at fault, or null. `code` is stable.

{types}

Every answer has `x-request-id`; a client may send its own. `python -m deploy.docs.errors` writes this page.
"""
RETRIED_TABLE = """
## Retried by stock clients

| status | `code` | meaning |
| --- | --- | --- |
"""
OTHER_TABLE = """
## Not retried

If clients would retry the status, the answer has `x-should-retry: false`.

| status | `code` | meaning |
| --- | --- | --- |
"""
REFUSAL = json.dumps(ANSWERS["ErrorBody"], separators=(",", ":"))
CODES = """
## More codes

Closer names:
"""
RESULTS = """
## Codes in results

Streams of sessions and responses that end with `server_stopping` go on [elsewhere](sessions.md#when-a-server-stops).
"""
# Refusals of the connection and of the routing, which have no class of their own.
OTHERS = (
    (400, "invalid_http", "The bytes are no HTTP request. The connection closes."),
    (405, "method_not_allowed", "The path has other methods, which `Allow` names."),
    (415, "unsupported_media_type", "The body is not JSON, not UTF-8 or encoded; the message names the header."),
    (426, "upgrade_required", "The path is a WebSocket's; the request asks for no upgrade."),
    (431, "head_too_large", "Request line and headers are above 64 KiB; the connection closes."),
)
# Codes in results, which no status goes with: where -> codes
IN_RESULTS: Mapping[str, tuple[str, ...]] = {
    "a batch's `errors`": ("empty_file", "invalid_line", "too_many_requests", "model_changed"),
    "a batch's error file": ("batch_expired", "model_changed"),
    "a fine-tuning job's `error`": (
        "invalid_training_file", "invalid_validation_file", "invalid_request", "process_ended", "state_refused",
        "training_failed",
    ),
    "a failed response's `error`": ("server_error", "rate_limit_exceeded"),
}  # fmt: skip


def page() -> str:
    """The whole page."""
    rows: dict[bool, list[str]] = {True: [], False: []}
    for kind, rule in RULES.items():
        rows[is_retried(rule)].append(kind_row(kind, rule))
    rows[False] += [row(status, code, meaning) for status, code, meaning in OTHERS]
    rows[True].append(row(INTERNAL.status, INTERNAL.code, "A fault of the server; its log has details."))
    head = HEAD.format(refusal=REFUSAL, types=textwrap.fill(f"`type` follows the status: {types()}.", 120))
    tables = [RETRIED_TABLE.rstrip(), *sorted(rows[True]), OTHER_TABLE.rstrip(), *sorted(rows[False])]
    codes = [CODES.rstrip(), "", *code_lines(), RESULTS.rstrip(), "", *result_lines()]
    return "\n".join([head.rstrip(), *tables, *codes]) + "\n"


def types() -> str:
    """Which `type` answers of a status have; 400's is that of all others below 500."""
    own = {rule.status: rule.type for rule in RULES.values() if rule.type != INVALID and rule.status < 500}
    named = [f"{status} `{error_type}`" for status, error_type in sorted(own.items())]
    return ", ".join([*named, f"5xx `{INTERNAL.type}`", f"else `{INVALID}`"])


def is_retried(rule: Rule) -> bool:
    """By stock clients."""
    return rule.retry if rule.retry is not None else rule.status in RETRIED or rule.status >= 500


def kind_row(kind: type[NsmError], rule: Rule) -> str:
    meaning = (
        (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("`retry_after_s`", "`Retry-After`")
    )
    return row(rule.status, rule.code, meaning)


def row(status: int, code: str | None, meaning: str) -> str:
    shown = "null, or one of [more codes](#more-codes)" if code is None else f"`{code}`"
    return f"| {status} | {shown} | {meaning} |"


def code_lines() -> list[str]:
    """One for each status and code that closer ones replace, filled to the width of a line."""
    replaced: dict[str, list[str]] = {}
    for code, words in sorted(closer_codes().items()):
        replaced.setdefault(words, []).append(f"`{code}`")
    texts = [f"- instead of {words}: {', '.join(codes)}" for words, codes in sorted(replaced.items())]
    return [line for text in texts for line in textwrap.wrap(text, 120, subsequent_indent="  ")]


def result_lines() -> list[str]:
    texts = [f"- {where}: {', '.join(f'`{code}`' for code in codes)}" for where, codes in IN_RESULTS.items()]
    return [line for text in texts for line in textwrap.wrap(text, 120, subsequent_indent="  ")]


def closer_codes() -> dict[str, str]:
    """The codes that are given where an error is raised: code -> status and code of its kind."""
    kinds = {kind.__name__: kind for kind in RULES}
    found: dict[str, str] = {}
    for file in sorted((*(ROOT / "service").rglob("*.py"), *(ROOT / "nsm_core").rglob("*.py"))):
        for name, code in raised_codes(ast.parse(file.read_text("utf-8"))):
            if name in kinds:
                rule = RULES[kinds[name]]
                found[code] = f"{rule.status}" if rule.code is None else f"{rule.status} `{rule.code}`"
    return found


def raised_codes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(class, code) of each call like `NotFound(..., code="model_not_found")`, and of functions that return an error
    and have one as a parameter's default or give one a name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name):
            yield from ((node.returns.id, code) for code in (*default_codes(node), *named_codes(node)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for keyword in node.keywords:
                if keyword.arg == "code":
                    yield from ((node.func.id, code) for code in texts_of(keyword.value))


def default_codes(node: ast.FunctionDef) -> Iterator[str]:
    names = [argument.arg for argument in node.args.args][len(node.args.args) - len(node.args.defaults) :]
    for name, default in zip(names, node.args.defaults, strict=True):
        if name == "code":
            yield from texts_of(default)


def named_codes(node: ast.FunctionDef) -> Iterator[str]:
    """Of assignments to `code` in the node's own body."""
    for statement in node.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "code" for target in statement.targets
        ):
            yield from texts_of(statement.value)


def texts_of(value: ast.expr) -> Iterator[str]:
    """The texts that an expression may have, of those that are written in it."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from (*texts_of(value.body), *texts_of(value.orelse))
    elif isinstance(value, ast.BoolOp):
        for part in value.values:
            yield from texts_of(part)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
