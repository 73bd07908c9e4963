"""The mutations by which tiers of these tests are compared."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import mutations

SOURCE = '''"""A module."""
import logging

logger = logging.getLogger("é")


@dataclass(frozen=True)
class Box:
    size: Final[3] = 4

    def put(self, things, *, limit=7) -> Literal[5]:
        """Not a statement to drop."""
        text = f"é {limit + 1}"
        if len(things) < limit and self.is_open:
            logger.info("put %s", things)
            self.add(things + [True])
            self.count += 1
        while not things:
            raise ValueError(text + "!")
        return things
'''


def changed() -> set[tuple[str, str, str]]:
    return {(found.kind, found.old, found.new) for found in mutations.find_mutations("box.py", SOURCE.encode())}


def test_each_kind_of_mutation_is_found_and_nothing_that_only_describes_is_changed() -> None:
    assert changed() == {
        ("off by one", "4", "5"),
        ("off by one", "7", "8"),
        ("negate a condition", "len(things) < limit and self.is_open", "not (len(things) < limit and self.is_open)"),
        ("swap and, or", "len(things) < limit and self.is_open", "(len(things) < limit or self.is_open)"),
        ("flip comparison", "len(things) < limit", "(len(things) <= limit)"),
        ("drop a statement", "self.add(things + [True])", "pass"),
        ("swap plus, minus", "things + [True]", "(things - [True])"),
        ("flip a truth value", "True", "False"),
        ("drop a statement", "self.count += 1", "pass"),
        ("off by one", "1", "2"),
        ("negate a condition", "not things", "not (not things)"),
        ("drop a statement", 'raise ValueError(text + "!")', "pass"),
    }


def test_a_mutation_changes_its_place_alone_and_the_file_stays_a_program() -> None:
    for mutation in mutations.find_mutations("box.py", SOURCE.encode()):
        mutated = mutation.apply(SOURCE.encode()).decode()
        ast.parse(mutated)
        before, after = SOURCE.encode()[: mutation.start].decode(), SOURCE.encode()[mutation.stop :].decode()
        assert mutated == before + mutation.new + after


def test_a_seed_gives_the_same_mutations_and_a_larger_count_adds_to_them() -> None:
    assert mutations.draw(17, 20) == mutations.draw(17, 50)[:20] != mutations.draw(18, 20)
    assert not any("cuda" in Path(mutation.path).parts for mutation in mutations.draw(17, 500))


@pytest.mark.parametrize(
    ("test", "shared"),
    [(("nsm_core", "engine", "test_apply.py"), 3), (("nsm_core", "engine", "test_engine.py"), 2), (("service",), 0)],
)
def test_tests_that_mirror_a_file_are_nearest(test: tuple[str, ...], shared: int) -> None:
    assert mutations.num_shared(test, ("nsm_core", "engine", "apply.py")) == shared
