"""Limits of control groups, read from trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsm_core import control_group
from nsm_core.control_group import MemoryWatch, max_memory_bytes, max_threads, num_killed

MB = 2**20
VERSION_1 = "4:memory:/pod/box\n1:cpu,cpuacct:/pod/box\n0::/\n"
VERSION_2 = "0::/pod/box\n"
NONE_IN_VERSION_1 = "9223372036854771712"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_group, "PROC", tmp_path / "proc")
    monkeypatch.setattr(control_group, "ROOT", tmp_path / "sys")
    monkeypatch.setattr(control_group, "SAMPLE_S", 0.0)
    return tmp_path


def write(tree: Path, groups: str, files: dict[str, str]) -> None:
    (tree / "proc").write_text(groups)
    for name, content in files.items():
        path = tree / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_machine_without_control_groups_has_no_limits(tree: Path) -> None:
    assert (max_threads(), max_memory_bytes(), num_killed()) == (None, None, 0)
    assert not MemoryWatch().is_low()


def test_group_without_limits_has_none(tree: Path) -> None:
    write(tree, VERSION_2, {"pod/box/cpu.max": "max 100000", "pod/box/memory.max": "max"})
    assert (max_threads(), max_memory_bytes()) == (None, None)
    files = {"cpu,cpuacct/pod/box/cpu.cfs_quota_us": "-1", "cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000"}
    write(tree, VERSION_1, files | {"memory/pod/box/memory.limit_in_bytes": NONE_IN_VERSION_1})
    assert (max_threads(), max_memory_bytes()) == (None, None)


@pytest.mark.parametrize(("quota", "threads"), [(50_000, 1), (100_000, 1), (150_000, 2), (800_000, 8)])
def test_quota_of_processor_time_bounds_threads_in_both_versions(tree: Path, quota: int, threads: int) -> None:
    write(tree, VERSION_2, {"pod/box/cpu.max": f"{quota} 100000"})
    assert max_threads() == threads
    write(tree, VERSION_2, {"pod/box/cpu.max": "max 100000", "pod/cpu.max": f"{quota} 100000"})
    assert max_threads() == threads
    (tree / "sys/pod/cpu.max").unlink()
    files = {"cpu,cpuacct/pod/box/cpu.cfs_quota_us": str(quota), "cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000"}
    write(tree, VERSION_1, files)
    assert max_threads() == threads


def test_least_limit_of_the_groups_above_counts(tree: Path) -> None:
    write(tree, VERSION_2, {"pod/box/memory.max": str(300 * MB), "pod/memory.max": str(200 * MB)})
    assert max_memory_bytes() == 200 * MB


def test_container_that_sees_its_group_as_the_root_is_limited(tree: Path) -> None:
    """Its path is still that of the machine, and no folder of that name is there."""
    write(tree, VERSION_1, {"memory/memory.limit_in_bytes": str(100 * MB)})
    assert max_memory_bytes() == 100 * MB


def test_memory_is_low_when_little_is_left_without_the_caches_of_files(tree: Path) -> None:
    write(tree, VERSION_2, {"pod/box/memory.max": str(100 * MB)})
    watch = MemoryWatch()
    for used, cached, is_low in ((50, 0, False), (97, 0, True), (97, 20, False), (99, 1, True)):
        stat = f"anon 5\ninactive_file {cached * MB}"
        write(tree, VERSION_2, {"pod/box/memory.current": str(used * MB), "pod/box/memory.stat": stat})
        assert watch.is_low() is is_low
    write(tree, VERSION_1, {"memory/pod/box/memory.limit_in_bytes": str(100 * MB)})
    watch = MemoryWatch()
    for cached, is_low in ((0, True), (20, False)):
        stat = f"inactive_file 0\ntotal_inactive_file {cached * MB}"
        files = {"memory/pod/box/memory.usage_in_bytes": str(97 * MB), "memory/pod/box/memory.stat": stat}
        write(tree, VERSION_1, files)
        assert watch.is_low() is is_low


def test_killed_processes_are_counted_in_both_versions(tree: Path) -> None:
    write(tree, VERSION_2, {"pod/box/memory.events": "oom 3\noom_kill 2"})
    assert num_killed() == 2
    (tree / "sys/pod/box/memory.events").unlink()
    write(tree, VERSION_1, {"memory/pod/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1"})
    assert num_killed() == 1
