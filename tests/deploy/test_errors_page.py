"""docs/errors.md matches the server's table of errors."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from deploy.docs import errors
from deploy.docs.errors import IN_RESULTS, PAGE, ROOT, named_codes, texts_of, types
from service.web.errors import HTTP_CODES, RULES

COMMANDS_ONLY = {"invalid_backup"}  # no endpoint reads a backup
NAMED_BY_FIELD = {"invalid_training_file", "invalid_validation_file"}  # made of the field's name


page = functools.cache(errors.page)  # it reads all sources


def test_errors_page_matches_the_table() -> None:
    """Otherwise: python -m deploy.docs.errors"""
    assert PAGE.read_text("utf-8") == page()


def test_every_code_has_a_row() -> None:
    codes = {rule.code for rule in RULES.values() if rule.code} | set(HTTP_CODES.values())
    text = page()
    assert [code for code in codes if f"| `{code}` |" not in text] == []


def test_type_of_every_error_follows_its_status_as_the_page_says() -> None:
    named = dict(part.split(" ") for part in types().replace("`", "").split(", "))
    for rule in RULES.values():
        shown = "5xx" if rule.status >= 500 else str(rule.status)
        assert rule.type == named.get(shown, named["else"]), rule


def test_every_code_in_the_source_is_on_the_page() -> None:
    found, on_page = codes_in_source(), set(re.findall(r"`(\w+)`", page()))
    assert {"invalid_http", "invalid_line", "model_changed", "response_not_found"} <= found
    assert found - on_page == COMMANDS_ONLY


def test_every_code_of_a_result_is_in_the_source() -> None:
    assert {code for codes in IN_RESULTS.values() for code in codes} - codes_in_source() == NAMED_BY_FIELD


@functools.cache
def codes_in_source() -> frozenset[str]:
    """All texts that become a `code`: given to a parameter of that name, by position or name, or assigned to it."""
    files = sorted((*(ROOT / "service").rglob("*.py"), *(ROOT / "nsm_core").rglob("*.py")))
    trees = [ast.parse(file.read_text("utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    positions = {node.name: position for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                 for position in code_position(node)}  # fmt: skip
    constants = dict(named for tree in trees for named in constants_of(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            for value in code_arguments(node, positions):
                named = constants.get(value.id, []) if isinstance(value, ast.Name) else []
                found.update([*texts_of(value), *named])
        if isinstance(node, ast.FunctionDef):
            found.update(named_codes(node))
    return frozenset(found)


def code_position(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[int]:
    names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    return [names.index("code")] if "code" in names and node.name != "__init__" else []


def code_arguments(node: ast.Call, positions: dict[str, int]) -> Iterator[ast.expr]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    position = positions.get(name, len(node.args))
    yield from node.args[position : position + 1]
    yield from (keyword.value for keyword in node.keywords if keyword.arg == "code")


def constants_of(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, list(texts_of(node.value))
