"""What deploy/helm/renders holds, as data."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.helm.write import examples, objects, render_path

EXAMPLES = examples()
CASES = [pytest.param(name, document, id=f"{name}-{document['kind']}-{document['metadata']['name']}")
         for name in EXAMPLES for document in objects(render_path(name).read_text())]  # fmt: skip


def of(example: str, kind: str, name: str = "") -> list[dict[str, Any]]:
    found = objects(render_path(example).read_text())
    return [item for item in found if item["kind"] == kind and item["metadata"]["name"].endswith(name)]


def one(example: str, kind: str, name: str = "") -> dict[str, Any]:
    (found,) = of(example, kind, name)
    return found


def pods() -> list[Any]:
    return [
        pytest.param(case.values[1]["spec"]["template"]["spec"], id=case.id)
        for case in CASES
        if case.values[1]["kind"] in ("Deployment", "StatefulSet")
    ]


def gateway(example: str) -> dict[str, Any]:
    return dict(one(example, "Deployment")["spec"]["template"]["spec"])


def environment(example: str) -> dict[str, str]:
    """Of the gateway; values that only a cluster knows as ones that stand for them."""
    return variables_of(gateway(example)["containers"][0])


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    known = {"NSM_STORE": "redis://secret/0", "NSM_NUM_THREADS": "2", "REDIS_PASSWORD": "secret", "HOST_IP": "10.0.0.1"}
    entries = container.get("env", [])
    return {entry["name"]: entry["value"] if "value" in entry else known[entry["name"]] for entry in entries}
