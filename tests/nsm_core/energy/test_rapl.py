from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core.energy.rapl import RaplMeter
from nsm_core.errors import ConfigError

RANGE_UJ = 262_143_328_850


def zone(root: Path, path: str, name: str, energy_uj: int) -> Path:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sockets, the second without a counter of its memory; cores are a part of their package."""
    zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 500_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 7_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", RANGE_UJ - 1_000_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def shown(meter: RaplMeter) -> dict[tuple[str, str], float]:
    return {(use.source, use.method): use.joules for use in meter.read()}


def test_packages_and_memory_are_summed_up(root: Path) -> None:
    meter = RaplMeter(root)
    assert shown(meter) == {("cpu", "rapl"): 0.0, ("dram", "rapl"): 0.0}
    zone(root, "intel-rapl:0", "package-0", 4_000_000)
    zone(root, "intel-rapl:0:0", "core", 2_500_000)
    zone(root, "intel-rapl:0:1", "dram", 7_500_000)
    assert shown(meter) == {("cpu", "rapl"): 3.0, ("dram", "rapl"): 0.5}


def test_engines_that_share_a_machine_add_up_to_its_counter(root: Path) -> None:
    meters = [RaplMeter(root, share=1 / 2) for _ in range(2)]
    zone(root, "intel-rapl:0", "package-0", 4_000_000)
    assert [shown(meter)["cpu", "rapl"] for meter in meters] == [1.5, 1.5]


def test_a_counter_that_began_anew_goes_on(root: Path) -> None:
    meter = RaplMeter(root)
    zone(root, "intel-rapl:1", "package-1", 1_000_000)
    assert shown(meter)["cpu", "rapl"] == 2.0
    zone(root, "intel-rapl:1", "package-1", 1_500_000)
    assert shown(meter)["cpu", "rapl"] == 2.5


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RAPL reports no energy"):
        RaplMeter(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no counter under"):
        RaplMeter(tmp_path)


def test_a_counter_that_is_no_number_is_refused(root: Path) -> None:
    (root / "intel-rapl:0" / "energy_uj").write_text("what\n")
    with pytest.raises(ConfigError, match="RAPL reports no energy"):
        RaplMeter(root)
