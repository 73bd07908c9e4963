"""Native steps go to several threads while that makes them faster: src/sharing.cpp, in a program of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from nsm_core.execution.native.build import SOURCES, find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")

# Arguments: tokens, steps, and the milliseconds of a step alone and shared, any number of times. Prints each time how
# many steps were shared.
PROGRAM = """
#include <cstdio>
#include <cstdlib>

#include "sharing.cpp"

int main(int count, char** words) {
  nsm::Sharing sharing;
  for (int i = 1; i + 3 < count; i += 4) {
    const int tokens = std::atoi(words[i]), steps = std::atoi(words[i + 1]);
    int shared = 0;
    for (int step = 0; step < steps; ++step) {
      const bool is_shared = sharing.is_next_shared(tokens);
      shared += is_shared;
      sharing.record(tokens, std::atof(words[is_shared ? i + 3 : i + 2]) * 1e-3);
    }
    std::printf("%d\\n", shared);
  }
}
"""

CountShared = Callable[..., list[int]]


@pytest.fixture(scope="module")
def count_shared(tmp_path_factory: pytest.TempPathFactory) -> CountShared:
    directory = tmp_path_factory.mktemp("sharing")
    source, program = directory / "program.cpp", directory / "program"
    source.write_text(PROGRAM)
    subprocess.run([find_compiler() or "", "-std=c++17", f"-I{SOURCES}", source, "-o", program], check=True)

    def count(*phases: tuple[int, int, float, float]) -> list[int]:
        words = [str(number) for phase in phases for number in phase]
        output = subprocess.run([program, *words], stdout=subprocess.PIPE, text=True, check=True).stdout
        return [int(line) for line in output.split()]

    return count


@pytest.mark.parametrize("tokens", [1, 8, 256, 100_000])
def test_steps_are_shared_while_that_is_faster(count_shared: CountShared, tokens: int) -> None:
    (shared,) = count_shared((tokens, 1000, 10, 6))
    assert 970 <= shared < 1000  # a few are tried alone


@pytest.mark.parametrize("seconds", [(10, 30), (10, 10), (10, 9.9)])
def test_steps_that_gain_nothing_are_the_callers(count_shared: CountShared, seconds: tuple[float, float]) -> None:
    """Several threads take more CPU time than one."""
    (shared,) = count_shared((1, 1000, *seconds))
    assert 0 < shared <= 100


def test_a_finding_follows_the_machine(count_shared: CountShared) -> None:
    busy, quiet = count_shared((8, 1000, 10, 30), (8, 2000, 10, 6))
    assert busy <= 60
    assert quiet >= 1000


def test_one_slow_step_changes_nothing(count_shared: CountShared) -> None:
    """Its length is a chance: the caller alone might have met the same program."""
    _, once, after = count_shared((8, 500, 10, 6), (8, 1, 500, 500), (8, 500, 10, 6))
    assert once <= 1
    assert after >= 480


def test_steps_of_other_lengths_have_findings_of_their_own(count_shared: CountShared) -> None:
    short, long = count_shared((1, 500, 1, 2), (32, 500, 20, 11))
    assert short <= 60
    assert long >= 480
