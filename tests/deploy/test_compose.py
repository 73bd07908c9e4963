"""docker-compose.yml: against the Compose specification, and against rules of our own."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

import jsonschema
import pytest
import yaml

from service.settings import ENV_PREFIX, Settings
from tests.deploy.compose import ROOT, compose, env_example, filled, services, variables

SCHEMA = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
JOBS = {"loadtest"}
OWN = {"gateway", "triton", "loadtest"}


def own_services() -> list[Any]:
    return [pytest.param(service, id=name) for name, service in services().items()]


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Source and target of each volume."""
    parts = [filled(volume).split(":") for volume in service.get("volumes", ())]
    return [(part[0], part[1]) for part in parts]


def test_it_is_a_compose_file() -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(compose())] == []


def test_a_misspelt_key_would_be_noticed() -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    broken = {"services": {"redis": {"image": "redis:7", "helthcheck": {}}}}
    assert list(jsonschema.validators.validator_for(schema)(schema).iter_errors(broken))


def test_the_services_are_those_of_the_documentation() -> None:
    assert set(services()) == {"redis", "gateway", "triton", "proxy", "prometheus", "grafana", "loadtest"}
    assert services()["gateway"]["deploy"]["replicas"] == 2
    profiles = {name: service["profiles"] for name, service in services().items() if "profiles" in service}
    assert profiles == {"triton": ["triton"], "loadtest": ["loadtest"]}


@pytest.mark.parametrize("service", own_services())
def test_images_have_a_version(service: dict[str, Any]) -> None:
    _, _, tag = filled(service["image"]).partition(":")
    assert tag not in ("", "latest")


@pytest.mark.parametrize("service", own_services())
def test_nothing_is_writable_but_what_is_named_and_nobody_has_rights(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "ipc", "network_mode"} & set(service)
    assert all("docker.sock" not in source for source, _ in mounts(service))


@pytest.mark.parametrize("name", sorted(services()))
def test_services_are_asked_whether_they_are_well(name: str) -> None:
    check = services()[name]["healthcheck"]
    if name in JOBS:
        assert check == {"disable": True}
        return
    assert check["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(check)


def test_they_start_in_the_order_of_health() -> None:
    order = {name: set(service.get("depends_on", ())) for name, service in services().items()}
    assert order == {
        "redis": set(),
        "triton": set(),
        "gateway": {"redis", "triton"},
        "proxy": {"gateway"},
        "prometheus": {"gateway"},
        "grafana": {"prometheus"},
        "loadtest": {"proxy"},
    }
    waits = [wait for service in services().values() for wait in service.get("depends_on", {}).values()]
    assert {wait["condition"] for wait in waits} == {"service_healthy"}
    assert services()["gateway"]["depends_on"]["triton"]["required"] is False  # it is there in its profile only


@pytest.mark.parametrize("service", own_services())
def test_every_mounted_file_exists_and_is_read_only(service: dict[str, Any]) -> None:
    for volume in service.get("volumes", ()):
        source, _, *mode = volume.split(":")
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            assert mode == ["ro"], volume
        else:
            assert source in compose()["volumes"], volume


def test_mounts_are_where_the_files_say_that_they_belong() -> None:
    said = ROOT / "deploy" / "grafana" / "provisioning"
    assert ("./deploy/grafana/provisioning", "/etc/grafana/provisioning") in mounts(services()["grafana"])
    assert ("./deploy/grafana/dashboards", "/var/lib/grafana/dashboards") in mounts(services()["grafana"])
    source = yaml.safe_load((said / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert {name for job in jobs for group in job["dns_sd_configs"] for name in group["names"]} <= set(services())


def test_only_what_people_use_is_published_and_on_loopback_unless_told_otherwise() -> None:
    ports = {name: [filled(port) for port in service.get("ports", ())] for name, service in services().items()}
    assert {name: port for name, port in ports.items() if port} == {
        "proxy": ["127.0.0.1:8080:8080"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    outside = {name for name, service in services().items() if "outside" in service["networks"]}
    assert outside == {"proxy", "prometheus", "grafana"}
    assert compose()["networks"]["inside"]["internal"] is True


def test_every_setting_of_a_gateway_exists() -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    assert set(services()["gateway"]["environment"]) <= known


def test_defaults_make_a_gateway_that_refuses_strangers() -> None:
    """Values as Compose fills them in when .env has the two passwords only."""
    environment = {name: filled(str(value)) for name, value in services()["gateway"]["environment"].items()}
    values = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in environment.items() if value}
    settings = Settings(**values)
    assert settings.is_redis
    assert settings.triton_url is None
    assert not settings.allow_anonymous
    assert settings.api_keys_file is None


def test_the_example_names_exactly_the_variables_and_no_secret() -> None:
    assert set(env_example()) - {"COMPOSE_PROFILES"} == variables()
    assert {name for name in env_example() if env_example()[name] == "" and "PASSWORD" in name} == {
        "REDIS_PASSWORD",
        "GRAFANA_PASSWORD",
    }
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_built_images_are_targets_of_the_dockerfile() -> None:
    targets = {name: service["build"]["target"] for name, service in services().items() if "build" in service}
    assert targets == {name: name for name in OWN}
    arguments = {name for service in services().values() for name in service.get("build", {}).get("args", {})}
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert all(f"ARG {name}=" in dockerfile for name in arguments)


def test_containers_are_given_the_time_that_their_programs_take_to_stop() -> None:
    gateway = services()["gateway"]
    assert float(gateway["environment"]["NSM_GRACE_S"]) < float(gateway["stop_grace_period"].removesuffix("s"))
    assert services()["triton"]["stop_grace_period"] == "50s"  # deploy/triton/README.md: above 45 s
