"""Whatever values the chart is given: it refuses them in words, or what it renders is Kubernetes' and starts."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from google.protobuf import json_format, text_format
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from deploy.helm.write import CHART, NAMESPACE, OF_CHART, SCHEMA, helm, objects, parameters
from nsm_core.triton.config import PARAMETERS, WorkerConfig, read_config
from service.settings import ENV_PREFIX, Settings, refuse_unknown_variables
from tests.deploy.helm_renders import variables_of
from tests.support.counts import scaled

KUBERNETES = "1.34"
KINDS = {"Deployment", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount",
         "Ingress", "HorizontalPodAutoscaler"}  # fmt: skip
# How the chart says no: by the schema, or by one of its own sentences. Anything else is a fault of a template
REFUSALS = ("values don't meet the specifications of the schema", "execution error at (nsm-serve/templates/checks.yaml")
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SETTINGS: dict[str, Any] = json.loads(SCHEMA.read_text())["definitions"]["settings"]["properties"]
# each example starts Helm, so a failure is shown as it was found and not made smaller
PHASES = (Phase.explicit, Phase.generate)


def examples(reduced: int, full: int) -> settings:
    return settings(max_examples=scaled(reduced, full), deadline=None, phases=PHASES)


def rendered(values: dict[str, Any], release: str = "nsm") -> list[dict[str, Any]] | str:
    """All objects, or why the chart refuses the values."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "values.yaml"
        path.write_text(yaml.safe_dump(values, allow_unicode=True))
        try:
            return objects(helm("template", release, CHART, "--namespace", NAMESPACE, "--values", path))
        except subprocess.CalledProcessError as error:
            reason = str(error.stderr)
    assert any(words in reason for words in REFUSALS), reason
    return reason


def check(found: list[dict[str, Any]]) -> None:
    """What was rendered is of Kubernetes, and every program in it would start."""
    for item in found:
        if item["kind"] in KINDS:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
        if item["kind"] in ("Deployment", "StatefulSet"):
            check_pod(item["spec"]["template"]["spec"])
        if item["kind"] == "ConfigMap" and "config.pbtxt" in item["data"]:
            worker_config(item["data"]["config.pbtxt"])


def check_pod(pod: dict[str, Any]) -> None:
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for container in pod["containers"]:
        names = [entry["name"] for entry in container.get("env", [])]
        assert len(set(names)) == len(names)
        if container["name"] == "gateway":
            gateway_settings(variables_of(container))


def gateway_settings(variables: dict[str, str]) -> Settings:
    """Raises what a gateway with these variables would raise when it starts."""
    own = {name: value for name, value in variables.items() if name.startswith(ENV_PREFIX) and value}
    refuse_unknown_variables(own)
    given_ones = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in own.items()}
    given_ones.pop("model", None)  # of a volume that is not here
    return Settings(**given_ones)


def worker_config(text: str) -> WorkerConfig:
    """Raises what the worker would raise when Triton loads a model with this config.pbtxt."""
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    return read_config(json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)))


def paths(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, name))


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: nested(path[1:], value) if path[1:] else value}


@examples(20, 400)
@given(path=st.sampled_from(list(paths(DEFAULTS))), has_triton=st.booleans())
@example(path=("gateway", "resources"), has_triton=False)
@example(path=("triton", "resources"), has_triton=True)
@example(path=("triton", "gpu"), has_triton=True)
def test_X14_any_value_may_be_null_or_is_refused_by_name(path: tuple[str, ...], has_triton: bool) -> None:
    values = {"triton": {"enabled": has_triton}} if path[0] != "triton" else {}
    values |= nested(path, None)
    found = rendered(values)
    if isinstance(found, str):
        assert path[-1] in found or path[0] == "apiKeys"
    else:
        check(found)


QUANTITIES = st.sampled_from([2, 0, 0.5, "2", "500m", "1.5", "1e3", "0", ".5", "3.", "1500u"])
AMOUNTS = st.sampled_from([1024, "1Gi", "512Mi", "1e9", "1G", "1536Mi", 2**31])
RESOURCES = st.fixed_dictionaries(
    {},
    optional={
        part: st.dictionaries(st.just("cpu"), QUANTITIES) | st.dictionaries(st.just("memory"), AMOUNTS) | st.none()
        for part in ("requests", "limits")
    },
) | st.none()  # fmt: skip
HOSTILE = st.sampled_from(["$1x", "${1}", "a\\b", 'a"b', "a\nb", "{{ .Values }}", "#x", "yes", "é", "a: b", "$$"])
LABELS = st.dictionaries(st.sampled_from(["team", "example.com/x"]), st.sampled_from(["a", "true", "1", ""]))
AFFINITY: dict[str, Any] = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
        }
    }
}
POD: dict[str, st.SearchStrategy[Any]] = {
    "affinity": st.sampled_from([{}, AFFINITY]) | st.none(),
    "priorityClassName": st.sampled_from(["", "high", "1000"]) | st.none(),
    "podLabels": LABELS | st.none(),
    "podAnnotations": st.dictionaries(st.just("example.com/note"), HOSTILE) | st.none(),
    "initContainers": st.sampled_from([[], [{"name": "wait", "image": "busybox", "command": ["true"]}]]) | st.none(),
    "nodeSelector": LABELS | st.none(),
    "tolerations": st.sampled_from([[], [{"operator": "Exists"}]]) | st.none(),
}
VOLUME: dict[str, Any] = {"name": "mine", "emptyDir": {}}
FOLLOWS_HOST = {"name": "HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
EXTRA: dict[str, st.SearchStrategy[Any]] = {
    "extraEnv": st.sampled_from([[], [FOLLOWS_HOST], [{"name": "X", "value": "a$(b)"}]]) | st.none(),
    "extraVolumes": st.just([VOLUME]),
    "resources": RESOURCES,
}
GATEWAY_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "NSM_SERVED_MODEL_NAME": HOSTILE,
        "OTEL_SERVICE_NAME": HOSTILE,
        "OTEL_TRACES_SAMPLER_ARG": st.floats(0, 1),
        "NSM_CORS_ORIGINS": st.sampled_from(["*", "https://a.example, http://b.example:8080", ""]),
        "NSM_MAX_BODY_BYTES": st.integers(1, 2**40),
        "NSM_REQUEST_TIMEOUT_S": st.floats(1e-3, 86_400),
        "NSM_LOG_PROMPTS": st.booleans() | st.none(),
        "OTEL_EXPORTER_OTLP_ENDPOINT": st.just("http://$(HOST_IP):4318"),
    },
)
PARAMETER_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "model": HOSTILE,
        "max_slots": st.integers(1, 256),
        "queue_limit": st.integers(0, 2**40) | st.just("17"),
        "energy": st.booleans() | st.none(),
        "drain_s": st.floats(0, 29.9),
        "energy_core_watts": st.floats(1e-3, 100),
        "speculation": st.sampled_from(["off", "lookup"]),
        "executor": st.just("auto"),
    },
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "gateway": st.fixed_dictionaries(
            {},
            optional={
                "settings": GATEWAY_SETTINGS | st.none(),
                "graceS": st.integers(0, 3600) | st.floats(0, 3600),
                "preStopS": st.integers(0, 300),
                "image": st.fixed_dictionaries({}, optional={"tag": st.sampled_from([20240101, "1.0", "", 7])}),
                **POD,
                **EXTRA,
            },
        ),
        "redis": st.fixed_dictionaries({}, optional={"cpu": QUANTITIES, "maxmemoryMiB": st.integers(64, 2**20), **POD}),
        "triton": st.fixed_dictionaries(
            {"enabled": st.booleans()}, optional={"parameters": PARAMETER_VALUES | st.none(), **POD, **EXTRA}
        ),
        "ingress": st.fixed_dictionaries({"enabled": st.just(True), "host": st.sampled_from(["*.x.org", "x.org"])}),
        "autoscaling": st.fixed_dictionaries({"kind": st.sampled_from(["none", "hpa"])}),
    },
)


@examples(10, 400)
@given(values=VALUES, release=st.sampled_from(["nsm", "1st", "a.b", "123", "true", "n" * 53]))
def test_X14_what_helm_and_kubernetes_take_is_taken(values: dict[str, Any], release: str) -> None:
    found = rendered(values, release)
    assert not isinstance(found, str), found
    check(found)


@examples(10, 400)
@given(parameters=PARAMETER_VALUES)
@example(parameters={"model": "$1x"})
@example(parameters={"model": "a\\b"})
def test_X14_a_parameter_reaches_the_worker_as_it_was_written(parameters: dict[str, Any]) -> None:
    found = rendered({"triton": {"enabled": True, "parameters": parameters}})
    assert not isinstance(found, str), found
    (text,) = [item["data"]["config.pbtxt"] for item in found if "config.pbtxt" in item.get("data", {})]
    config = worker_config(text)
    if "model" in parameters:
        assert str(config.model) == parameters["model"]
    if "max_slots" in parameters:
        assert config.engine.max_slots == parameters["max_slots"]


ANYTHING = st.one_of(
    st.integers(-1, 600), st.floats(-1, 1e6, allow_nan=False), st.booleans(), st.none(), HOSTILE,
    st.sampled_from(["", "off", "cpu", "cuda", "gpu", "auto", "info", "int8", "http://x", "http://:1", "512", "-1"]),
)  # fmt: skip
ANY_SETTINGS = st.dictionaries(st.sampled_from(sorted(SETTINGS)), ANYTHING, max_size=4)
ANY_PARAMETERS = st.dictionaries(st.sampled_from(sorted(parameters())), ANYTHING, max_size=3)


@examples(25, 2000)
@given(own=ANY_SETTINGS, of_triton=ANY_PARAMETERS, has_triton=st.booleans(), gpus=st.integers(0, 1))
@example(own={"NSM_MAX_SLOTS": 512}, of_triton={}, has_triton=False, gpus=1)
@example(own={"NSM_SPECULATION": "off"}, of_triton={}, has_triton=True, gpus=1)
@example(own={}, of_triton={"device": "gpu"}, has_triton=True, gpus=1)
@example(own={"NSM_TRITON_TLS_DIR": "/x"}, of_triton={}, has_triton=False, gpus=1)
@example(own={"NSM_CORS_ORIGINS": "https://a/b"}, of_triton={}, has_triton=False, gpus=1)
@example(own={}, of_triton={"max_slots": 512}, has_triton=True, gpus=1)
@example(own={}, of_triton={"default_timeout_s": 700.0, "max_timeout_s": 600}, has_triton=True, gpus=1)
def test_X14_what_renders_also_starts(
    own: dict[str, Any], of_triton: dict[str, Any], has_triton: bool, gpus: int
) -> None:
    triton = {"enabled": has_triton, "parameters": of_triton, "gpu": {"count": gpus}}
    found = rendered({"gateway": {"settings": own}, "triton": triton})
    if isinstance(found, str):
        assert any(name in found for name in (*own, *of_triton))
        return
    check(found)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"triton": {"enabled": True, "parameters": {"device": "cuda"}, "gpu": {"count": 0}}}, "triton.gpu.count"),
        ({"gateway": {"extraEnv": [{"name": "NSM_MAX_SLOTS", "value": "3"}]}}, "valueFrom only"),
        ({"gateway": {"extraEnv": [{"name": "NSM_STORE", "valueFrom": {}}]}}, "gateway.extraEnv.0.name"),
        ({"gateway": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}}, "a volume tmp is there already"),
        ({"gateway": {"extraVolumeMounts": [{"name": "x", "mountPath": "/x"}]}}, "there is no volume x"),
        ({"gateway": {"podLabels": {"app.kubernetes.io/name": "x"}}}, "podLabels"),
    ],
)  # fmt: skip
def test_X14_what_a_pod_could_not_be_made_of_is_refused(values: dict[str, Any], words: str) -> None:
    found = rendered(values)
    assert isinstance(found, str)
    assert words in found


def test_X14_a_variable_may_come_from_a_secret() -> None:
    source = {"secretKeyRef": {"name": "collector", "key": "url"}}
    found = rendered({"gateway": {"extraEnv": [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": source}]}})
    assert not isinstance(found, str)
    (deployment,) = [item for item in found if item["kind"] == "Deployment"]
    entries = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": source} in entries


def test_X14_the_charts_lists_are_those_of_the_programs() -> None:
    assert set(parameters()) == set(PARAMETERS)
    assert {name.upper() for name in Settings.model_fields if name not in OF_CHART} == {
        name.removeprefix(ENV_PREFIX) for name in SETTINGS
    }


def test_each_gpu_has_an_engine_or_an_instance() -> None:
    values: dict[str, Any] = {
        "gateway": {"gpu": {"resource": "nvidia.com/gpu", "count": 2}, "settings": {"NSM_DEVICE": "cuda:0,cuda:1"}}
    }
    found = rendered(values)
    assert not isinstance(found, str)
    (deployment,) = [item for item in found if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "NSM_DEVICE", "value": "cuda:0,cuda:1"} in container["env"]
    for count, kind in ((0, "instance_group [ { count: 1 } ]"), (2, "instance_group [ { count: 1 kind: KIND_GPU } ]")):
        triton = {"enabled": True, "gpu": {"resource": "nvidia.com/gpu", "count": count}}
        found = rendered({"triton": triton})
        assert not isinstance(found, str)
        (config,) = [item["data"]["config.pbtxt"] for item in found if "config.pbtxt" in item.get("data", {})]
        assert kind in config


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda", "needs as many GPUs"), ("auto", "needs as many GPUs"), ("cuda:1,cuda:1", "must name each GPU once")],
)
def test_gpus_that_no_engine_would_use_are_refused(device: str, words: str) -> None:
    gpu = {"resource": "nvidia.com/gpu", "count": 2}
    found = rendered({"gateway": {"gpu": gpu, "settings": {"NSM_DEVICE": device}}})
    assert isinstance(found, str)
    assert words in found
