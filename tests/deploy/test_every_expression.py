"""Every expression of every panel and rule, executed by a real Prometheus that has watched a real server under load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image

from deploy.grafana.expressions import Target, boards, panels, targets
from deploy.grafana.pictures.drawing import Period, draw_board
from nsm_core.tokenizer import Tokenizer
from nsm_core.triton import metrics as worker
from service.cli.scrape import histogram_quantile
from tests.deploy import absent_hardware
from tests.deploy.watched import Watched, watched
from tests.support.models import save_small_model
from tests.support.prometheus_server import CONFIG
from tests.support.redis_servers import Topology

pytestmark = [pytest.mark.prometheus, pytest.mark.redis]
TARGETS = [
    target
    for board in boards()
    for panel in panels(board)
    for target in targets(board, panel, window="1m", span="1m")  # longer than the server runs
]
RULES = [
    rule
    for path in sorted((CONFIG.parent / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = [rule for rule in RULES if "record" in rule]
ALERTS = [rule for rule in RULES if "alert" in rule]


@pytest.fixture(scope="module")
def watch(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer, redis_single: Topology
) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    model = save_small_model(directory / "tiny", tiny_tokenizer)
    with redis_single.servers[0].client() as client:
        client.config_set("maxmemory", "2gb")
        try:
            with watched(model, directory, redis_single.own_url()) as result:
                yield result
        finally:
            client.config_set("maxmemory", 0)


def test_both_targets_were_read(watch: Watched) -> None:
    assert sorted((labels["job"], value) for labels, value in watch.query("up")) == [("nsm", 1.0), ("triton", 1.0)]


OF_SEVERAL_MODELS = [target for target in TARGETS if re.search(r"nsm_model_(load|unload)", target.expr)]


@pytest.mark.parametrize("target", [one for one in TARGETS if one not in OF_SEVERAL_MODELS], ids=str)
def test_every_panel_has_data(watch: Watched, target: Target) -> None:
    result = watch.query(target.expr)
    assert [value for _, value in result if math.isfinite(value)], target.expr
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target.legend))
    assert wanted == set(result[0][0]), "the legend names the labels that tell the series apart"


@pytest.mark.parametrize("target", OF_SEVERAL_MODELS, ids=str)
def test_a_panel_on_several_models_is_empty_where_there_is_one(watch: Watched, target: Target) -> None:
    assert not [value for _, value in watch.query(target.expr) if math.isfinite(value)]  # raises what is wrong with it


@pytest.mark.parametrize("rule", RECORDED, ids=lambda rule: rule["record"])
def test_every_recording_rule_has_data(watch: Watched, rule: dict[str, str]) -> None:
    """Both as it is written and as Prometheus recorded it."""
    for expr in (rule["expr"], rule["record"]):
        assert [value for _, value in watch.query(expr) if math.isfinite(value)], expr


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_reads_metrics_that_are_there(watch: Watched, rule: dict[str, str]) -> None:
    watch.query(rule["expr"])  # raises what is wrong with it; without trouble it is empty
    for name in re.findall(r"\b(?:instance:nsm_\w+:\w+|nsm_\w+|up)\b", rule["expr"]):
        assert watch.query(f"count({name})"), name


def test_nothing_fires_on_a_healthy_server(watch: Watched) -> None:
    assert watch.query('ALERTS{alertstate="firing"}') == []


def test_no_rule_failed(watch: Watched) -> None:
    groups = watch.prometheus.get("rules")["groups"]
    states = {rule["name"]: rule.get("lastError", "") for group in groups for rule in group["rules"]}
    assert states == dict.fromkeys([rule.get("record") or rule["alert"] for rule in RULES], "")


def test_the_variable_of_gateways_has_values(watch: Watched) -> None:
    assert watch.prometheus.get("label/instance/values", **{"match[]": "nsm_model_info"})


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("name", ["nsm_time_to_first_token_seconds", "nsm_inter_token_latency_seconds"])
def test_the_terminal_computes_the_quantiles_that_prometheus_does(watch: Watched, name: str, q: float) -> None:
    buckets = [(float(dict(labels)["le"]), count) for labels, count in watch.last.samples(f"{name}_bucket").items()]
    [(_, expected)] = watch.query(f"histogram_quantile({q}, sum by (le) ({name}_bucket))")
    assert histogram_quantile(q, sorted(buckets)) == pytest.approx(expected, rel=1e-12)


def test_dashboards_can_be_drawn_without_grafana(watch: Watched, tmp_path: Path) -> None:
    [board] = [board for board in boards() if board["uid"] == "nsm-energy"]
    path = tmp_path / "energy.png"
    with httpx.Client(base_url=watch.prometheus.url, timeout=60.0) as client:
        draw_board(board, Period(client, watch.at - 8, watch.at, "5s"), path)
    with Image.open(path) as picture:
        assert min(picture.size) > 500
        assert len(picture.getcolors()) > 20  # not an empty page


def test_the_stand_in_shows_nothing_that_servers_do_not(watch: Watched) -> None:
    """A panel that only the stand-in can fill would stay empty for ever."""
    gateway = (Path(__file__).resolve().parents[2] / "service" / "telemetry" / "metrics" / "engine.py").read_text()
    assert set(absent_hardware.GAUGES) <= set(worker.GAUGES)
    counters = {f"{name}_total" for name in absent_hardware.COUNTERS}
    assert all(f'"{name}"' in gateway for name in counters - set(worker.COUNTERS))
    own = {series["__name__"] for series in watch.prometheus.get("series", **{"match[]": '{job="triton"}'})}
    shown = {*absent_hardware.GAUGES, *(f"{name}_total" for name in absent_hardware.COUNTERS)}
    assert set(absent_hardware.HISTOGRAMS) == set(worker.HISTOGRAMS)
    assert f"{absent_hardware.CALLS}_total" == worker.OUTCOMES[0]
    timed = {f"{name}_{part}" for name in worker.HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert {name for name in own if name.startswith("nsm_")} == shown | timed | {
        "nsm_triton_servers",
        "nsm_energy_joules_total",
        "nsm_worker_calls_total",
    }
