"""The mutations by which tiers of these tests are compared."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_a_seed_gives_the_same_mutations_and_a_larger_count_adds_to_them(tmp_path: Path) -> None:
    for path in ("nsm_core/box.py", "nsm_core/execution/cuda/box.py", "service/web/box.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(SOURCE)
    drawn = mutations.draw(17, 20, tmp_path)
    assert drawn == mutations.draw(17, 50, tmp_path)[:20] != mutations.draw(18, 20, tmp_path)
    assert {mutation.path for mutation in drawn} == {"nsm_core/box.py", "service/web/box.py"}


@pytest.mark.parametrize(
    ("test", "shared"),
    [(("nsm_core", "engine", "test_apply.py"), 3), (("nsm_core", "engine", "test_engine.py"), 2), (("service",), 0)],
)
def test_tests_that_mirror_a_file_are_nearest(test: tuple[str, ...], shared: int) -> None:
    assert mutations.num_shared(test, ("nsm_core", "engine", "apply.py")) == shared


PROGRAM = """
def sign(x, *, zero=0):
    if x < 0:
        raise ValueError("below")
    match x:
        case 7:
            x += 1
    return x
"""


def test_probes_tell_which_places_a_program_comes_to_and_change_nothing_else() -> None:
    found = dict(enumerate(mutations.find_mutations("sign.py", PROGRAM.encode())))
    with_probes, numbers = mutations.probed(PROGRAM.encode(), found)
    assert "7" not in {found[number].old for number in numbers}  # a pattern takes no call
    reached: set[int] = set()
    space: dict[str, Any] = {"__import__": lambda _: SimpleNamespace(reached=reached.add)}
    exec(compile(with_probes, "sign.py", "exec"), space)

    def met() -> set[str]:
        return {found[number].old for number in reached}

    assert space["sign"](3) == 3
    assert met() == {"0"}
    assert space["sign"](7) == 8
    assert met() == {"0", "1"}
    with pytest.raises(ValueError, match="below"):
        space["sign"](-1)
    assert met() == {"0", "1", 'raise ValueError("below")'}


def test_files_of_tests_that_came_to_a_place_are_found_in_the_notes() -> None:
    notes = "3 tests/b/test_x.py::test_a (call)\n3 tests/a/test_y.py::test_b[1] (setup)\n31 tests/c.py::d (call)\n4 \n"
    assert mutations.files_reaching(3, notes) == ["tests/a/test_y.py", "tests/b/test_x.py"]
    assert mutations.files_reaching(4, notes) is None
    assert mutations.files_reaching(5, notes) == []
