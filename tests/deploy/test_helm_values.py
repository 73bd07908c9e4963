"""What the values of the chart of deploy/helm may be, and what is refused, by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.helm.write import (
    OF_CHART,
    SCHEMA,
    SETTINGS_TEMPLATE,
    VALUES,
    objects,
    render,
    schema_text,
    settings_template,
    values_text,
)
from service.settings import ENV_PREFIX, Settings, engine_settings


def refused(tmp_path: Path, values: dict[str, Any]) -> str:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        render(tmp_path / "values.yaml")
    return str(refusal.value.stderr)


def test_generated_parts_of_the_chart_match_the_settings() -> None:
    """Otherwise write them again: `python -m deploy.helm.write`."""
    assert SCHEMA.read_text() == schema_text()
    assert VALUES.read_text() == values_text()
    assert SETTINGS_TEMPLATE.read_text() == settings_template()


def test_what_an_engine_of_the_gateway_reads_is_refused_with_triton(tmp_path: Path) -> None:
    kinds = json.loads(SCHEMA.read_text())["definitions"]["settings"]["properties"]
    for name in engine_settings():
        variable = ENV_PREFIX + name.upper()
        kind = kinds[variable]["anyOf"][0]
        value = kind["enum"][0] if "enum" in kind else {"boolean": True}.get(kind["type"], 4)
        message = refused(tmp_path, {"triton": {"enabled": True}, "gateway": {"settings": {variable: value}}})
        assert f"gateway.settings.{variable}" in message


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 3}}, "replica"),
        ({"gateway": {"replicas": 0}}, "gateway.replicas"),
        ({"gateway": {"settings": {"NSM_MAX_SLOT": 3}}}, "NSM_MAX_SLOT"),
        ({"gateway": {"settings": {"NSM_MAX_SLOTS": 0}}}, "gateway.settings.NSM_MAX_SLOTS"),
        ({"gateway": {"settings": {"NSM_STATE_DTYPE": "bf16"}}}, "gateway.settings.NSM_STATE_DTYPE"),
        ({"gateway": {"image": {"tag": "latest"}}}, "gateway.image.tag"),
        ({"redis": {"maxmemoryMiB": "2gb"}}, "redis.maxmemoryMiB"),
        ({"redis": {"enabled": False}}, "redis.external.secretName"),
        ({"redis": {"external": {"secretName": "mine"}}}, "redis.external.secretName"),
        ({"apiKeys": {"secretName": ""}}, "apiKeys.secretName"),
        ({"allowAnonymous": True}, "apiKeys.secretName"),
        ({"triton": {"parameters": {"max_slot": 3}}}, "max_slot"),
        ({"triton": {"enabled": True, "parameters": {"drain_s": 40}}}, "triton.parameters.drain_s"),
        ({"triton": {"enabled": True}, "autoscaling": {"kind": "keda"}}, "autoscaling.kind"),
        ({"autoscaling": {"kind": "vpa"}}, "autoscaling.kind"),
        ({"autoscaling": {"kind": "keda"}}, "autoscaling.prometheusUrl"),
        ({"autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas"),
        ({"autoscaling": {"slotUsePercent": 10}}, "autoscaling.slotUsePercent"),
        ({"autoscaling": {"slotUsePercent": {"gpu": 0}}}, "autoscaling.slotUsePercent.gpu"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.keySecret.name"),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, "podDisruptionBudget.maxUnavailable"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], field: str, tmp_path: Path) -> None:
    assert field in refused(tmp_path, values)


def test_the_settings_of_the_chart_itself_are_not_to_be_given_twice() -> None:
    offered = json.loads(SCHEMA.read_text())["definitions"]["settings"]["properties"]
    assert {ENV_PREFIX + name.upper() for name in Settings.model_fields if name not in OF_CHART} == set(offered)


def test_every_object_of_the_schema_is_closed() -> None:
    """A misspelt value must not be none; `global` belongs to Helm."""
    schema = json.loads(SCHEMA.read_text())

    def open_ones(node: Any, path: str) -> list[str]:
        if not isinstance(node, dict):
            return []
        found = [path] if "properties" in node and node.get("additionalProperties") is not False else []
        return found + [name for key, value in node.items() for name in open_ones(value, f"{path}/{key}")]

    of_kubernetes = {"/definitions/named/items", "/definitions/variables/items"}
    assert set(open_ones(schema, "")) == of_kubernetes


def test_an_annotation_of_ones_own_wins_over_the_charts(tmp_path: Path) -> None:
    name = "nginx.ingress.kubernetes.io/proxy-body-size"
    values = {"ingress": {"enabled": True, "host": "nsm.example.com", "annotations": {name: "1m"}}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    ingresses = [item for item in objects(render(tmp_path / "values.yaml")) if item["kind"] == "Ingress"]
    assert len(ingresses) == 2
    for ingress in ingresses:
        assert ingress["metadata"]["annotations"][name] == "1m"
        assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
