"""The dashboards are what their generator writes, and fit what provisions them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.expressions import DASHBOARDS, boards, panels
from deploy.grafana.generate.__main__ import rendered
from deploy.grafana.generate.panels import COLUMNS
from deploy.grafana.pictures import __main__ as pictures
from nsm_core.triton import metrics as worker
from service.backends.base import UpstreamStats
from service.telemetry.metrics.metrics import Metrics
from tests.support.fakes import FakeBackend
from tests.support.prometheus_server import CONFIG, DEPLOY
from tests.support.redis_servers import free_port

BOARDS = boards()


def test_the_files_are_what_the_generator_writes() -> None:
    """After a change: `python -m deploy.grafana.generate`."""
    assert {path.name: path.read_text() for path in DASHBOARDS.iterdir()} == rendered()


def test_there_are_five_dashboards_with_ids_of_their_own() -> None:
    assert len({board["uid"] for board in BOARDS}) == len(BOARDS) == 5


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_rows_are_full_and_nothing_overlaps(board: dict[str, Any]) -> None:
    taken = [
        (x, y)
        for area in (panel["gridPos"] for panel in board["panels"])
        for x in range(area["x"], area["x"] + area["w"])
        for y in range(area["y"], area["y"] + area["h"])
    ]
    height = max(y for _, y in taken) + 1
    assert sorted(taken) == sorted(itertools.product(range(COLUMNS), range(height)))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_every_panel_says_what_it_shows(board: dict[str, Any]) -> None:
    for panel in panels(board):
        assert panel["title"], panel["id"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_what_is_provisioned_fits_what_is_there() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == yaml.safe_load(CONFIG.read_text())["global"]["scrape_interval"]
    [provider] = yaml.safe_load((provisioning / "dashboards" / "nsm.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_every_metric_is_shown_or_alerted_on() -> None:
    """One that nobody reads costs memory in every Prometheus, and says nothing to anybody."""
    metrics = Metrics(FakeBackend())
    metrics.watch_redis_pool(lambda: 0)
    metrics.watch_upstreams(lambda: UpstreamStats())
    families = {id(found): found for found in metrics.registry._names_to_collectors.values()}.values()
    names = {family._name for family in families if hasattr(family, "_name")}
    names |= {name.removesuffix("_total") for name in (*worker.GAUGES, *worker.COUNTERS, worker.OUTCOMES[0])}
    names |= set(worker.HISTOGRAMS)
    rules = "".join(path.read_text() for path in (CONFIG.parent / "rules").glob("*.yml"))
    read = {
        re.sub(r"_(total|bucket|count|sum)$", "", name) for name in re.findall(r"nsm_\w+", json.dumps(BOARDS) + rules)
    }
    assert len(names) > 60
    assert names - read == set()


def test_X13_pictures_of_a_prometheus_that_is_not_there_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("sys.argv", ["pictures", "--prometheus", url, "--into", str(tmp_path)])
    assert pictures.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"no pictures: {url}: ")
