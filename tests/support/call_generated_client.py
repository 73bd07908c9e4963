"""Calls operations by a client that was generated from the API's description. A program: the client is on its path.

Standard input: {"url": …, "calls": [{"operation": …, "fields": {…}, "body": …}, …]}. Standard output: for each call
the parsed answer as JSON, with the name of its class.
"""

from __future__ import annotations

import enum
import importlib
import json
import pkgutil
import sys
import typing
from types import ModuleType
from typing import Any


def modules(package: ModuleType) -> dict[str, ModuleType]:
    """The module of each operation, by the operation's id."""
    found = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not info.ispkg:
            module = importlib.import_module(info.name)
            found[info.name.rpartition(".")[2]] = module
    return found


def snake_case(operation: str) -> str:
    """The name of an operation's module."""
    return "_".join(filter(None, operation.split("_")))


def typed(value: Any, hint: Any) -> Any:
    """A value as the client's function wants it: an object of a model, or of an enumeration."""
    for kind in typing.get_args(hint) or (hint,):
        if isinstance(value, dict) and hasattr(kind, "from_dict"):
            return kind.from_dict(value)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return kind(value)
    return value


def call(module: Any, client: Any, fields: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(module.sync_detailed)
    answer = module.sync_detailed(client=client, **{name: typed(value, hints[name]) for name, value in fields.items()})
    kind = type(answer.parsed).__name__
    value = answer.parsed.to_dict() if hasattr(answer.parsed, "to_dict") else None
    return {"status": int(answer.status_code), "kind": kind, "value": value, "sent": json.loads(answer.content)}


def main() -> None:
    asked = json.load(sys.stdin)
    package: Any = importlib.import_module("nsm_client")
    found = modules(importlib.import_module("nsm_client.api"))
    client = package.Client(base_url=asked["url"], timeout=60.0)
    answers = [call(found[snake_case(one["operation"])], client, one["fields"]) for one in asked["calls"]]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
