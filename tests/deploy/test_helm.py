"""What the chart of deploy/helm renders: against Kubernetes' schemas, the server itself and rules of our own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.helm.write import CHART, FOLDER, NAMESPACE, PARAMETER, RELEASE, SCHEMA, helm, render, render_path
from service.app import create_app
from service.settings import ENV_PREFIX, Settings, refuse_unknown_variables
from service.stores.sessions.sqlite import SqliteSessionStore
from tests.deploy.compose import ROOT, services
from tests.deploy.helm_renders import CASES, EXAMPLES, environment, gateway, of, one, pods
from tests.support.fakes import FakeBackend

KUBERNETES = ("1.27", "1.30", "1.34")
OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}


def test_lint_finds_nothing() -> None:
    helm("lint", "--strict", CHART)


@pytest.mark.parametrize("example", EXAMPLES)
def test_renders_are_those_of_the_repository(example: str) -> None:
    """Otherwise look at what changed, and write them anew: `python -m deploy.helm.write`."""
    assert render(FOLDER / "examples" / f"{example}.yaml") == render_path(example).read_text()


def test_a_packaged_chart_has_the_files_that_it_links_to(tmp_path: Path) -> None:
    helm("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    values = FOLDER / "examples" / "everything.yaml"
    rendered = helm("template", RELEASE, package, "--namespace", NAMESPACE, "--values", values)
    assert rendered == render_path("everything").read_text()


def test_there_is_an_example_of_every_kind_of_installation_and_none_is_left_over() -> None:
    assert set(EXAMPLES) == {"default", "minimal", "external-redis", "gpu", "triton-gpu", "everything"}
    assert {path.stem for path in (FOLDER / "renders").iterdir()} == set(EXAMPLES)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_of_kubernetes(version: str) -> None:
    for case in CASES:
        if case.values[1]["kind"] not in OPERATORS:
            kubernetes_validate.validate(case.values[1], version, strict=True)


def test_a_misspelt_field_would_be_noticed() -> None:
    broken = one("minimal", "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize(("example", "document"), CASES)
def test_names_are_names_and_labels_say_whose_an_object_is(example: str, document: dict[str, Any]) -> None:
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", document["metadata"]["name"])
    assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == "nsm"


@pytest.mark.parametrize("pod", pods())
def test_pods_have_no_rights_no_token_and_nothing_writable_but_what_is_named(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all("hostPath" not in volume for volume in pod["volumes"])
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("pod", pods())
def test_services_make_no_variables(pod: dict[str, Any]) -> None:
    """NSM_GATEWAY_SERVICE_HOST would be an unknown setting, and a gateway refuses those."""
    assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("pod", pods())
def test_every_mount_has_its_volume(pod: dict[str, Any]) -> None:
    claims = {"data"}  # of the StatefulSet
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted - claims == {volume["name"] for volume in pod["volumes"]} - claims


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_gateway_of_an_example_would_start(example: str) -> None:
    own = {name: value for name, value in environment(example).items() if name.startswith(ENV_PREFIX)}
    refuse_unknown_variables(own)
    given = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in own.items()}
    given.pop("model", None)  # of a volume that is not here
    settings = Settings(**given)
    assert settings.is_redis
    assert (settings.api_keys_file is None) == settings.allow_anonymous
    assert (settings.triton_url is None) == (example != "triton-gpu")


def test_an_engine_has_a_thread_for_each_core_of_its_pod() -> None:
    entries = {entry["name"]: entry for entry in gateway("default")["containers"][0]["env"]}
    assert entries["NSM_NUM_THREADS"]["valueFrom"] == {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}
    assert "NSM_NUM_THREADS" not in environment("triton-gpu")


def test_large_numbers_arrive_as_they_were_written() -> None:
    assert environment("everything")["NSM_MAX_BODY_BYTES"] == "16777216"
    assert environment("everything")["NSM_PLAYGROUND"] == "false"
    assert environment("everything")["OTEL_TRACES_SAMPLER_ARG"] == "0.1"


def test_no_secret_is_in_a_render() -> None:
    """Passwords, keys and URLs with passwords come from Secrets, which the chart names and does not make."""
    for example in EXAMPLES:
        assert of(example, "Secret") == []
        store = next(item for item in gateway(example)["containers"][0]["env"] if item["name"] == "NSM_STORE")
        assert "secretKeyRef" in store.get("valueFrom", {}) or "$(REDIS_PASSWORD)" in store["value"]


def test_the_password_is_set_before_the_url_that_it_is_part_of() -> None:
    names = [entry["name"] for entry in gateway("default")["containers"][0]["env"]]
    assert names.index("REDIS_PASSWORD") < names.index("NSM_STORE")


def test_probes_ask_for_routes_that_exist() -> None:
    container = gateway("default")["containers"][0]
    asked = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert asked == {"/health/live", "/health/ready"} <= every_route()
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"  # a full store is no reason to be killed


def every_route() -> set[str]:
    app = create_app(Settings(), FakeBackend(), SqliteSessionStore(None))
    undocumented = {path for route in app.routes if (path := getattr(route, "path", None))}
    return {*app.openapi()["paths"], *undocumented}


def test_the_ingress_passes_every_route_but_the_metrics() -> None:
    rule = one("everything", "Ingress", "-gateway")["spec"]["rules"][0]
    paths = [(path["path"], path["pathType"]) for path in rule["http"]["paths"]]

    def is_open(route: str) -> bool:
        return any(
            route == path or (kind == "Prefix" and route.startswith(f"{path.rstrip('/')}/")) for path, kind in paths
        )

    closed = {route for route in every_route() if not is_open(route)}
    assert len(every_route()) > 30
    assert closed == {"/metrics"}


def test_the_ingress_holds_back_no_stream_and_allows_what_a_gateway_allows() -> None:
    prefix = "nginx.ingress.kubernetes.io/"
    notes = one("everything", "Ingress", "-gateway")["metadata"]["annotations"]
    settings = environment("everything")
    assert notes[prefix + "proxy-buffering"] == "off"
    assert notes[prefix + "proxy-body-size"] == settings["NSM_MAX_BODY_BYTES"]
    assert int(notes[prefix + "proxy-read-timeout"]) > float(settings["NSM_REQUEST_TIMEOUT_S"])


def test_the_turns_of_a_session_go_to_one_gateway_by_a_service_of_their_own() -> None:
    """ingress-nginx hashes for a whole service."""
    ingress = one("everything", "Ingress", "-sessions")
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1/sessions/", "Prefix")
    service = one("everything", "Service", path["backend"]["service"]["name"])
    others = one("everything", "Service", "-gateway")
    assert service["spec"]["selector"] == others["spec"]["selector"]
    monitor = one("everything", "ServiceMonitor", "-gateway")["spec"]["selector"]["matchLabels"]
    assert not monitor.items() <= service["metadata"]["labels"].items()  # a gateway is scraped once
    notes = ingress["metadata"]["annotations"]
    assert notes["nginx.ingress.kubernetes.io/upstream-hash-by"] == "$uri"
    assert notes["nginx.ingress.kubernetes.io/proxy-request-buffering"] == "off"  # a session reads text as it comes
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_are_given_the_time_that_a_drain_takes(example: str) -> None:
    pod = gateway(example)
    pause = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pause[0] == "sleep"
    frames_s = 2.0
    assert pod["terminationGracePeriodSeconds"] > int(pause[1]) + float(environment(example)["NSM_GRACE_S"]) + frames_s


def test_triton_runs_as_its_folder_says() -> None:
    """deploy/triton/README.md has probes, times and variables."""
    said = re.search(r"```yaml\n(.*?)```", (ROOT / "deploy" / "triton" / "README.md").read_text(), re.DOTALL)
    assert said is not None
    pod = one("triton-gpu", "StatefulSet", "triton")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    for name, value in yaml.safe_load(said[1]).items():
        assert container[name] == value, name
    assert pod["terminationGracePeriodSeconds"] == 50
    readme = (ROOT / "deploy" / "triton" / "README.md").read_text()
    schema = json.loads(SCHEMA.read_text())
    assert all(f"`{name}`" in readme for name in schema["properties"]["triton"]["properties"]["settings"]["properties"])


def test_triton_has_a_gpu_shared_memory_and_the_parameters_that_were_asked_for() -> None:
    pod = one("triton-gpu", "StatefulSet", "triton")["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}} in pod["volumes"]
    source = dict(PARAMETER.findall((ROOT / "model_repository" / "nsm" / "config.pbtxt").read_text()))
    made = dict(PARAMETER.findall(one("triton-gpu", "ConfigMap", "triton")["data"]["config.pbtxt"]))
    changed = {"queue_limit": "2048", "kept_states_mb": "8192"}
    assert made == {**source, **changed}


def test_gateways_have_the_gpu_that_was_asked_for_and_room_for_its_kernels() -> None:
    pod = gateway("gpu")
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert environment("gpu")["NSM_DEVICE"] == "cuda"
    assert [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "tmp"] == ["2Gi"]
    assert "nvidia.com/gpu" not in gateway("default")["containers"][0]["resources"]["limits"]


def test_gateways_know_every_triton_server_by_a_name_that_exists() -> None:
    servers = one("triton-gpu", "StatefulSet", "triton")
    name = servers["metadata"]["name"]
    assert servers["spec"]["serviceName"] == one("triton-gpu", "Service", "triton")["metadata"]["name"] == name
    want = [f"{name}-{number}.{name}:8001" for number in range(servers["spec"]["replicas"])]
    assert environment("triton-gpu")["NSM_TRITON_URL"].split(",") == want


def test_redis_runs_from_the_same_files_and_with_the_same_image_as_with_compose() -> None:
    files = one("default", "ConfigMap", "redis")["data"]
    assert files == {path.name: path.read_text() for path in (ROOT / "deploy" / "redis").iterdir()}
    container = one("default", "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == services()["redis"]["image"]
    assert container["command"] == services()["redis"]["command"]


def test_redis_has_twice_the_memory_of_its_sessions() -> None:
    container = one("everything", "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "REDIS_MAXMEMORY", "value": "16384mb"} in container["env"]
    assert container["resources"]["limits"]["memory"] == "33024Mi"


def test_own_images_are_targets_of_the_dockerfile_at_the_version_of_the_chart() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert gateway("default")["containers"][0]["image"] == f"nsm-gateway:{version}"
    triton = one("triton-gpu", "StatefulSet", "triton")["spec"]["template"]["spec"]["containers"][0]
    assert triton["image"] == f"nsm-triton:{version}"
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert " AS gateway\n" in dockerfile
    assert " AS triton\n" in dockerfile
    assert f"ARG VERSION={version}\n" in dockerfile
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("example", EXAMPLES)
def test_who_may_talk_to_whom(example: str) -> None:
    policies = {item["metadata"]["name"].removeprefix("nsm-"): item["spec"] for item in of(example, "NetworkPolicy")}
    want = {"minimal": set(), "external-redis": {"gateway"}, "triton-gpu": {"gateway", "redis", "triton"}}
    assert set(policies) == want.get(example, {"gateway", "redis"})
    for part in {"redis", "triton"} & set(policies):
        assert policies[part]["policyTypes"] == ["Ingress", "Egress"]
        assert "egress" not in policies[part]  # nowhere
        only = policies[part]["ingress"][0]["from"]
        assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in only] == ["gateway"]


def test_selectors_find_the_pods() -> None:
    for example in EXAMPLES:
        found = [*of(example, "Deployment"), *of(example, "StatefulSet")]
        labels = [item["spec"]["template"]["metadata"]["labels"] for item in found]
        for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            for item in of(example, kind):
                spec = item["spec"]
                if kind == "Service":
                    selector = spec["selector"]
                else:
                    selector = spec.get("podSelector", spec.get("selector"))["matchLabels"]
                assert any(selector.items() <= own.items() for own in labels), item["metadata"]["name"]


def documented_metrics() -> set[str]:
    return set(re.findall(r"nsm_\w+", (ROOT / "docs" / "metrics.md").read_text()))


def test_gateways_are_scaled_by_metrics_that_exist() -> None:
    scaler = one("external-redis", "HorizontalPodAutoscaler")["spec"]
    targets = {item["pods"]["metric"]["name"]: item["pods"]["target"]["averageValue"] for item in scaler["metrics"]}
    assert targets == {"nsm_num_requests_waiting": "2", "nsm_num_requests_running": "3200m"}  # 10 % of 32 slots
    triggers = one("everything", "ScaledObject")["spec"]["triggers"]
    named = {name for trigger in triggers for name in re.findall(r"nsm_\w+", trigger["metadata"]["query"])}
    assert named == {"nsm_num_requests_waiting", "nsm_num_requests_running", "nsm_max_slots"}
    assert named | set(targets) <= documented_metrics()
    assert one("triton-gpu", "HorizontalPodAutoscaler")["spec"]["metrics"][0]["resource"]["name"] == "cpu"


@pytest.mark.parametrize(("kind", "wanted"), [("hpa", "averageValue: 20480m"), ("keda", 'threshold: "4"')])
def test_gateways_with_gpus_are_scaled_at_fewer_slots(kind: str, wanted: str) -> None:
    """4 % of 512 slots."""
    given = ("--set", f"autoscaling.kind={kind}", "--set", "autoscaling.prometheusUrl=http://prometheus:9090")
    values = FOLDER / "examples" / "gpu.yaml"
    assert wanted in helm("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", values, *given)


@pytest.mark.parametrize("example", ["external-redis", "triton-gpu", "everything"])
def test_an_autoscaler_has_the_number_of_replicas_to_itself(example: str) -> None:
    deployment = one(example, "Deployment")
    (scaler,) = of(example, "HorizontalPodAutoscaler") + of(example, "ScaledObject")
    assert "replicas" not in deployment["spec"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_a_scaled_object_has_the_fields_of_keda() -> None:
    spec = one("everything", "ScaledObject")["spec"]
    assert set(spec) == {
        "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "advanced", "triggers",
    }  # fmt: skip
    for trigger in spec["triggers"]:
        assert set(trigger) == {"type", "metricType", "metadata"}
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        assert f'namespace="{NAMESPACE}"' in trigger["metadata"]["query"]


def test_monitors_use_the_names_that_dashboards_know() -> None:
    spec = one("everything", "ServiceMonitor")["spec"]
    (endpoint,) = spec["endpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "nsm"}]
    assert endpoint["authorization"] == {"credentials": {"name": "nsm-metrics", "key": "key"}}
    service = one("everything", "Service", "gateway")
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_rules_are_those_of_the_repository() -> None:
    files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
    want = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert one("everything", "PrometheusRule")["spec"] == {"groups": want}
