"""Writes the generated parts of the chart: run `python -m deploy.helm.write` after a change of settings or templates.

From service/settings.py come the gateway's settings in `values.schema.json`, their list in `values.yaml` and the names
in `_settings.tpl`. From `config.pbtxt` come the Triton parameters of the schema. `renders/` has the objects for the
values of each file in `examples/`. A test compares all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import yaml

from service.settings import ENV_PREFIX, Settings, engine_settings, shown_default

FOLDER = Path(__file__).parent
CHART = FOLDER / "nsm-serve"
SCHEMA = CHART / "values.schema.json"
VALUES = CHART / "values.yaml"
SETTINGS_TEMPLATE = CHART / "templates" / "_settings.tpl"
HELM = Path(sys.executable).with_name("helm")
RELEASE, NAMESPACE = "nsm", "serving"
# The chart's own to say: from other values, or because its containers are made so
OF_CHART = {
    "host", "port", "data_dir", "store", "triton_url", "api_keys_file", "allow_anonymous", "grace_s",
}  # fmt: skip
PARAMETER = re.compile(r'^parameters \{ key: "(\w+)" value \{ string_value: "([^"]*)"', re.MULTILINE)
PLAIN = {"type": ["string", "number", "boolean"]}
LIST_BEGIN, LIST_END = "    # <settings>", "    # </settings>"
KEPT = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength")


def main() -> None:
    SCHEMA.write_text(schema_text())
    VALUES.write_text(values_text())
    SETTINGS_TEMPLATE.write_text(settings_template())
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
    schema["definitions"]["settings"] = {**one_of_these(settings()), "patternProperties": {"^OTEL_": PLAIN}}
    schema["definitions"]["parameters"] = one_of_these(parameters())
    return json.dumps(schema, indent=2) + "\n"


def one_of_these(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings() -> dict[str, Any]:
    """By the names of their variables, with the bounds that the gateway itself has."""
    fields = Settings.model_json_schema()["properties"]
    return {variable(name): {"description": fields[name]["description"], **bounds(fields[name])} for name in offered()}


def offered() -> list[str]:
    """The settings that `gateway.settings` takes; the chart makes the others from its values."""
    return [name for name in Settings.model_fields if name not in OF_CHART]


def variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def bounds(field: dict[str, Any]) -> dict[str, Any]:
    """A setting that may be left out has one kind of value besides None."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return {name: value for name, value in kinds[0].items() if name in KEPT}


def values_text() -> str:
    """values.yaml with the list of settings, their defaults and descriptions as they are now."""
    before, rest = VALUES.read_text().split(LIST_BEGIN + "\n")
    after = rest.partition(LIST_END + "\n")[2]
    lines = "".join(f"    # {line}\n" for name in offered() for line in setting_lines(name))
    return f"{before}{LIST_BEGIN}\n{lines}{LIST_END}\n{after}"


def setting_lines(name: str) -> list[str]:
    head = f"{variable(name)} ({shown_default(name)}): {Settings.model_fields[name].description}"
    return textwrap.wrap(head, 112, subsequent_indent="  ")


def settings_template() -> str:
    """The names of the settings that Triton servers have as parameters of their own."""
    names = " ".join(variable(name) for name in engine_settings())
    return (
        "{{/* Written by deploy.helm.write: settings of an engine in the gateway */}}\n"
        f'{{{{- define "nsm.engineSettings" -}}}}{names}{{{{- end }}}}\n'
    )


def parameters() -> dict[str, Any]:
    """Of the Triton model, by name: texts and numbers, as its worker reads them."""
    found = PARAMETER.findall((CHART / "files" / "config.pbtxt").read_text())
    # those in capitals are Triton's own
    return {name: PLAIN for name, _ in found if name.islower()}


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


if __name__ == "__main__":
    main()
