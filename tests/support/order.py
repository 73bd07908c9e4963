"""The order of files where several processes share a run: what takes longest first, lest one runs alone at the end.

`make test PYTEST_ARGS=--durations=0` shows the times.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

LONGEST = (
    "tests/integration/test_servers_that_stop.py",
    "tests/nsm_core/execution/cuda/test_rwkv7_executor.py",
    "tests/integration/test_change_of_model.py",
    "tests/integration/test_fine_tuning_survives_kill.py",
    "tests/integration/test_gateway_on_engine.py",
    "tests/integration/test_batches_survive_kill.py",
    "tests/integration/test_redis_gateways.py",
    "tests/integration/test_devices.py",
    "tests/integration/test_openapi.py",
    "tests/integration/test_workers.py",
    "tests/integration/test_turns_on_processes.py",
    "tests/integration/test_random_kills.py",
    "tests/integration/test_prefix_resume.py",
    "tests/integration/test_redis_failures.py",
    "tests/integration/test_streams_survive.py",
    "tests/nsm_core/execution/cuda/test_compiling.py",
    "tests/nsm_core/execution/cuda/test_cuda_executor.py",
    "tests/nsm_core/execution/cuda/test_reading_again.py",
    "tests/nsm_core/execution/test_executor.py",
    "tests/nsm_lab/evaluation/recall_size/test_recall_size.py",
    "tests/loadtests/test_runs.py",
    "tests/service/cli/test_bench.py",
    "tests/service/cli/test_arbitrary_user.py",
)


class _Item(Protocol):
    nodeid: str


Item = TypeVar("Item", bound=_Item)


def longest_first(items: Iterable[Item]) -> list[Item]:
    """The tests of LONGEST, file by file, then the others as they were."""
    position = {path: number for number, path in enumerate(LONGEST)}
    return sorted(items, key=lambda item: position.get(item.nodeid.partition("::")[0], len(LONGEST)))
