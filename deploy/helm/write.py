"""What the chart's values may be, and what it renders: `python -m deploy.helm.write` after every change of either.

`values.schema.json` is written by hand but for the gateway's settings and the parameters of the Triton model, which
come from where they are defined. `renders/` has what the values of each file in `examples/` make; a test compares.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from service.settings import ENV_PREFIX, Settings

FOLDER = Path(__file__).parent
CHART = FOLDER / "nsm-serve"
SCHEMA = CHART / "values.schema.json"
HELM = Path(sys.executable).with_name("helm")
RELEASE, NAMESPACE = "nsm", "serving"
# The chart's own to say: from other values, or because its containers are made so
OF_CHART = {
    "host", "port", "data_dir", "store", "backend", "triton_url", "api_keys_file", "allow_anonymous", "grace_s",
}  # fmt: skip
PARAMETER = re.compile(r'^parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)"', re.MULTILINE)
KEPT = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength")


def main() -> None:
    SCHEMA.write_text(schema_text())
    for example in examples():
        render_path(example).write_text(render(FOLDER / "examples" / f"{example}.yaml"))


def examples() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "examples").glob("*.yaml"))


def render_path(example: str) -> Path:
    return FOLDER / "renders" / f"{example}.yaml"


def render(values: Path) -> str:
    """All objects, as `helm install` would send them. Raises CalledProcessError, with the reason in `stderr`."""
    return helm("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", values)


def helm(*args: object) -> str:
    done = subprocess.run([HELM, *map(str, args)], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def schema_text() -> str:
    """The schema as it should be: what is in the file, with settings and parameters as they are now."""
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"]["settings"] = one_of_these(settings())
    schema["definitions"]["parameters"] = one_of_these(parameters())
    return json.dumps(schema, indent=2) + "\n"


def one_of_these(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings() -> dict[str, Any]:
    """By the names of their variables, with the bounds that the gateway itself has."""
    fields = Settings.model_json_schema()["properties"]
    return {ENV_PREFIX + name.upper(): bounds(field) for name, field in fields.items() if name not in OF_CHART}


def bounds(field: dict[str, Any]) -> dict[str, Any]:
    """A setting that may be left out has one kind of value besides None."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return {name: value for name, value in kinds[0].items() if name in KEPT}


def parameters() -> dict[str, Any]:
    """Of the Triton model, by name: texts and numbers, as its worker reads them."""
    found = PARAMETER.findall((CHART / "files" / "config.pbtxt").read_text())
    # those in capitals are Triton's own
    return {name: {"type": ["string", "number", "boolean"]} for name, _ in found if name.islower()}


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


if __name__ == "__main__":
    main()
