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
PLAIN = {"type": ["string", "number", "boolean", "null"]}
LIST_BEGIN, LIST_END = "    # <settings>", "    # </settings>"
ORIGINS = r"^\s*((\*|https?://[^\s,/?#]+)\s*(,|$)\s*)*$"
DEVICE = r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"
DEVICES = r"^(auto|(cpu|cuda(:[0-9]{1,3})?)(,(cpu|cuda(:[0-9]{1,3})?))*)$"
# The least value of each parameter that is a whole number; a test holds these tables against the worker
WHOLE_NUMBERS = {
    "max_slots": 0,
    "token_budget": 0,
    "queue_limit": 0,
    "num_threads": 0,
    "max_prompt_tokens": 1,
    "max_tokens_limit": 1,
    "kept_states_mb": 0,
}
OTHER_PARAMETERS: dict[str, dict[str, Any]] = {
    "model": {"type": "string"},
    "default_timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
    "max_timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
    "drain_s": {"type": "number", "minimum": 0, "maximum": 3_600},
    "energy": {"enum": [True, False, "true", "false"]},
    "energy_core_watts": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000},
}
SHARED_KEYS = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength")


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
    schema["definitions"]["variables"] = variables()
    return json.dumps(schema, indent=2) + "\n"


def one_of_these(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings() -> dict[str, Any]:
    """By the names of their variables, with the bounds that the gateway itself has."""
    fields = Settings.model_json_schema()["properties"]
    found = {variable(name): {"description": fields[name]["description"], **bounds(fields[name])} for name in offered()}
    found["NSM_CORS_ORIGINS"]["anyOf"][0]["pattern"] = ORIGINS
    found["NSM_DEVICE"]["anyOf"][0]["pattern"] = DEVICES
    return found


def offered() -> list[str]:
    """The settings that `gateway.settings` takes; the chart makes the others from its values."""
    return [name for name in Settings.model_fields if name not in OF_CHART]


def variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def bounds(field: dict[str, Any]) -> dict[str, Any]:
    """One kind of value, or null for a setting that is not given."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    return or_null({name: value for name, value in kinds[0].items() if name in SHARED_KEYS})


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


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
    """Of the Triton model, by name, with the values that its worker takes. Those in capitals are Triton's own."""
    found = PARAMETER.findall((CHART / "files" / "config.pbtxt").read_text())
    return {name: or_null(parameter(name)) for name, _ in found if name.islower()}


def parameter(name: str) -> dict[str, Any]:
    """Raises KeyError for one whose values are not written down here."""
    if name == "device":
        return {"type": "string", "pattern": DEVICE}
    if name in ("executor", "speculation"):
        return {"enum": choices_of(name)}
    if name in WHOLE_NUMBERS:
        low = WHOLE_NUMBERS[name]
        text = {"type": "string", "pattern": "^[0-9]+$" if low == 0 else "^0*[1-9][0-9]*$"}
        return {"anyOf": [{"type": "integer", "minimum": low, "maximum": 2**53}, text]}
    return OTHER_PARAMETERS[name]


def choices_of(name: str) -> list[str]:
    """Of a setting that the gateway has too."""
    return list(Settings.model_json_schema()["properties"][name]["enum"])


def variables() -> dict[str, Any]:
    """Entries of a pod's `env`: a setting among them must be one that the gateway has and the chart leaves open."""
    names = {"anyOf": [{"not": {"pattern": "^(NSM_|REDIS_PASSWORD$)"}, "minLength": 1}, {"enum": list(settings())}]}
    return {"type": "array", "items": {"type": "object", "required": ["name"], "properties": {"name": names}}}


def objects(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


if __name__ == "__main__":
    main()
