#!/usr/bin/env python3
"""Shows which faults the tiers of the tests find: seeded mutations of the server's source, one at a time.

    .venv/bin/python scripts/mutations.py --seed 17 --count 50 --output benchmarks/results/mutations.txt

Each mutation changes one place of `nsm_core` or `service` in a scratch copy: it flips a comparison, negates a
condition, shifts a whole number by one, or drops a statement. The same seed and source give the same mutations; a
larger count adds to those of a smaller one.

One run of the fast tier on the unchanged source, with a probe at each mutation, shows which tests reach which. Then
each mutation gets a run of the files of these tests, until the first failure; those that mirror the mutated file lead.
No other test can find it. For a mutation that the fast tier does not find, the `test` tier runs the tests that concern
the file and that the fast tier has not run. These are the files in the folder that mirrors the file's package, and the
files, in any folder, that import from this package, themselves or through a module of `tests/support`. They also are
the tests of the fast tier for what runs as a module is imported, which every test reaches.

A mutation is killed if a test fails, and if this test passes on the unchanged source. A test that fails there too is
left out, and the run is repeated. A run beyond its limit also kills. The runs use `--cores` cores and one thread a
process. Kernels for GPUs are left out: no tier of a machine without one runs them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import fnmatch
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("nsm_core", "service")
LEFT_OUT = ("nsm_core/execution/cuda/*", "nsm_core/ops/*/kernel*.py", "nsm_core/sampling/kernel.py")
MUTATED = "MUTATED_FILE"  # read below, when pytest loads this file as a plugin
IS_AFTER_FAST = "MUTATIONS_AFTER_FAST"  # likewise: leave out the tests of the fast tier
TEST_LIMIT_S = 600  # of one test: the runs have the lowest priority, on machines that do other work
MOST_LEFT_OUT = 5  # tests that fail on the unchanged source; more of them make a comparison worthless
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
LOGGERS = {"logger", "logging", "warnings"}
PROBE = "mutations_probe"  # a module at the root of the copy, for its processes
PROBE_SOURCE = """
import os

_seen = set()


def reached(number):
    key = f"{number} {os.environ.get('PYTEST_CURRENT_TEST', '')}"
    if key not in _seen:
        _seen.add(key)
        with open(__file__ + ".log", "a") as log:
            log.write(key + "\\n")
"""
DROP = "drop a statement"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Mutation:
    """Bytes [start, stop) of a file are replaced by `new`; `line` counts from 1."""

    path: str
    line: int
    start: int
    stop: int
    kind: str
    old: str
    new: str

    def apply(self, source: bytes) -> bytes:
        return self._with(source, self.new)

    def probe(self, source: bytes, number: int) -> bytes:
        """The same program, which also notes that it came to this place."""
        call = f'__import__("{PROBE}").reached({number})'
        is_statement = self.kind == DROP
        return self._with(source, f"{call}; {self.old}" if is_statement else f"({call}, ({self.old}))[1]")

    def _with(self, source: bytes, new: str) -> bytes:
        return source[: self.start] + new.encode() + source[self.stop :]


class Finder(ast.NodeVisitor):
    """Collects the mutations of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._path, self._source = path, source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def _add(self, node: ast.expr | ast.stmt, kind: str, new: str) -> None:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        stop = self._line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        old = self._source[start:stop].decode()
        self.found.append(Mutation(self._path, node.lineno, start, stop, kind, old, new))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            flipped = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
            self._add(node, "flip comparison", f"({ast.unparse(flipped)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "swap and, or", f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and not any(map(_is_text, (node.left, node.right))):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            self._add(node, "swap plus, minus", f"({ast.unparse(ast.BinOp(node.left, other, node.right))})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "flip a truth value", str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "off by one", str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._add(node.test, "negate a condition", f"not ({ast.unparse(node.test)})")
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._add(node.test, "negate a condition", f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not _is_logging(call):
            self._add(node, DROP, "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, DROP, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, DROP, "pass")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # an annotation is no code
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # its decorators say how values behave that no code changes
            self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts stay: positions inside of them are not those of the file in every version of Python."""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_logging(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in LOGGERS


def find_mutations(path: str, source: bytes) -> list[Mutation]:
    """All mutations of a file, in order."""
    finder = Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found)


def draw(seed: int, count: int, root: Path = ROOT) -> list[Mutation]:
    """The mutations of a seed: a pure function of the seed and the source."""
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if not any(fnmatch.fnmatch(path, pattern) for pattern in LEFT_OUT):
                found += find_mutations(path, file.read_bytes())
    random.Random(seed).shuffle(found)
    return found[:count]


def probed(source: bytes, mutations: dict[int, Mutation]) -> tuple[bytes, set[int]]:
    """A file with a probe at each of its mutations that can have one, and the numbers of these. Two that overlap, and
    what Python takes no call for, as in patterns, cannot.
    """
    done: set[int] = set()
    start = len(source)
    for number, mutation in sorted(mutations.items(), key=lambda item: item[1].start, reverse=True):
        changed = mutation.probe(source, number)
        if mutation.stop <= start and _is_python(changed):
            source, start = changed, mutation.start
            done.add(number)
    return source, done


def _is_python(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


# ---- runs ---------------------------------------------------------------------------------------------------------


def fast_command() -> list[str]:
    """The arguments of pytest in `make test-fast`, in one process: the nearest tests must come first."""
    command = ["make", "--dry-run", "--no-print-directory", "test-fast"]
    dry = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    calls = [line for line in dry.stdout.splitlines() if " -m pytest" in line]
    if dry.returncode or len(calls) != 1:
        raise SystemExit(f"mutations: make test-fast does not run pytest once: {dry.stderr.strip() or calls}")
    return [*shlex.split(calls[0].split(" -m pytest", 1)[1]), "-n0"]


def imports_of(source: str) -> set[str]:
    """Full names of the modules, and of the names in them, that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def concerned(path: str, root: Path = ROOT) -> list[str]:
    """Files of tests that mirror the package of the file `path`, or import from it, also through `tests/support`."""
    package = Path(path).parent
    prefix = ".".join(package.parts) + "."
    support = {
        f"tests.support.{file.stem}": imports_of(file.read_text("utf-8"))
        for file in (root / "tests" / "support").glob("*.py")
    }

    def is_user(imports: set[str], seen: frozenset[str] = frozenset()) -> bool:
        if any(name.startswith(prefix) for name in imports):
            return True
        helpers = {name for name in support if any(f"{one}.".startswith(f"{name}.") for one in imports)} - seen
        return any(is_user(support[name], seen | helpers) for name in helpers)

    mirror = root / "tests" / package
    return [
        file.relative_to(root).as_posix()
        for file in sorted((root / "tests").rglob("test_*.py"))
        if file.is_relative_to(mirror) or is_user(imports_of(file.read_text("utf-8")))
    ]


@contextlib.contextmanager
def scratch_copy() -> Iterator[Path]:
    """A copy of the working tree with the native kernels, and without what git ignores otherwise."""
    with tempfile.TemporaryDirectory(prefix="nsm-mutations-") as directory:
        copy = Path(directory)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        kernels = Path("nsm_core", "execution", "native", "build")
        if (ROOT / kernels).is_dir():
            shutil.copytree(ROOT / kernels, copy / kernels, dirs_exist_ok=True)
        (copy / ".venv").symlink_to(Path(sys.prefix))
        yield copy


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`reason`: the first test that failed, or why the run ended without one; None: all tests passed."""

    reason: str | None
    seconds: float

    @property
    def failed_test(self) -> str | None:
        """The test, or the file that cannot be imported."""
        return self.reason if self.reason is not None and self.reason.startswith("tests/") else None


class Runner:
    """Runs tests in a copy, with limits on time, cores and memory. `left_out`: tests that fail without a mutation."""

    def __init__(self, copy: Path, *, limit_s: float, cores: int, memory_gib: float) -> None:
        self.left_out: list[str] = []
        self.copy, self._limit_s = copy, limit_s
        self._cores = sorted(os.sched_getaffinity(0))[:cores]
        self._memory_bytes = int(memory_gib * 2**30)

    def kills(self, mutation: Mutation, arguments: Sequence[str], *, is_after_fast: bool = False) -> Outcome:
        """One run over a mutation; repeated without a test that fails on the unchanged source too."""
        file = self.copy / mutation.path
        source = file.read_bytes()
        while True:
            file.write_bytes(mutation.apply(source))
            try:
                outcome = self._run(arguments, mutation.path, is_after_fast=is_after_fast)
            finally:
                file.write_bytes(source)
            test = outcome.failed_test
            if test is None or self._passes(test):
                return outcome
            self.left_out.append(test)
            print(f"    left out, as it fails on the unchanged source: {test}", flush=True)
            if len(self.left_out) > MOST_LEFT_OUT:
                raise SystemExit("mutations: too many tests fail on the unchanged source")

    def notes_of_probes(self, mutations: dict[int, Mutation], arguments: Sequence[str]) -> str:
        """A line for each mutation without a probe, and for each and a test that came to it: number, test's id."""
        sources, numbers = {}, set()
        (self.copy / f"{PROBE}.py").write_text(PROBE_SOURCE)
        try:
            for path in {mutation.path for mutation in mutations.values()}:
                sources[path] = (self.copy / path).read_bytes()
                own = {number: mutation for number, mutation in mutations.items() if mutation.path == path}
                changed, done = probed(sources[path], own)
                numbers |= done
                (self.copy / path).write_bytes(changed)
            outcome = self._run(arguments, is_to_the_end=True)
        finally:
            for path, source in sources.items():
                (self.copy / path).write_bytes(source)
        print(f"probes at {len(numbers)} of {len(mutations)} mutations: {outcome.seconds:.0f} s", flush=True)
        log = self.copy / f"{PROBE}.py.log"
        notes = log.read_text("utf-8") if log.exists() else ""
        return notes + "".join(f"{number} \n" for number in sorted(set(mutations) - numbers))

    def _passes(self, test: str) -> bool:
        """Whether a test passes on the unchanged source; of a whole file, whether it can be imported."""
        return self._run([test, "-n0"] if "::" in test else [test, "-n0", "--collect-only"]).reason is None

    def _run(
        self,
        arguments: Sequence[str],
        mutated: str = "",
        *,
        is_after_fast: bool = False,
        is_to_the_end: bool = False,
    ) -> Outcome:
        """`mutated`: the file whose tests run first. `is_to_the_end`: a failure ends nothing."""
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "mutations"]
        command += [] if is_to_the_end else ["-x"]
        left_out = [word for test in self.left_out for word in ("--deselect", test)]
        environ = {
            **os.environ, MUTATED: mutated, "PYTHONPATH": f"{self.copy}:{self.copy / 'scripts'}",
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            IS_AFTER_FAST: "1" if is_after_fast else "",
        }  # fmt: skip
        process = subprocess.Popen(
            [*command, *arguments, f"--timeout={TEST_LIMIT_S}", *left_out], cwd=self.copy, env=environ,
            stdin=subprocess.DEVNULL, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=self._limit,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(f"no end within {self._limit_s:g} s", time.monotonic() - started)
        finally:
            with contextlib.suppress(ProcessLookupError):  # programs that tests started end with them
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - started
        if process.returncode in (0, 5):  # 5: no test was left to run
            return Outcome(None, seconds)
        if process.returncode == 4:
            raise SystemExit(f"mutations: pytest was called wrongly:\n{output}")
        failed = FAILED.search(output)
        last = output.strip().splitlines()[-1:] or ["no output"]
        return Outcome(failed.group(1) if failed else f"status {process.returncode}: {last[0]}", seconds)

    def _limit(self) -> None:
        os.nice(10)
        os.sched_setaffinity(0, self._cores)
        resource.setrlimit(resource.RLIMIT_DATA, (self._memory_bytes, self._memory_bytes))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin of pytest: tests of folders and files that mirror the mutated file come first."""
    if os.environ.get(IS_AFTER_FAST):
        from tests.support.tiers import Tier, Tiers  # of the copy: a plugin is loaded before its path is

        tiers = Tiers.load()
        items[:] = [item for item in items if tiers.of(item) > Tier.FAST]
    mutated = os.environ.get(MUTATED)
    if mutated:
        items.sort(key=lambda item: -num_shared(item.path.relative_to(Path.cwd()).parts[1:], Path(mutated).parts))


def num_shared(test: Sequence[str], mutated: Sequence[str]) -> int:
    """The number of leading folders, and the file, that `test` (below tests/) mirrors of `mutated`."""
    num = 0
    for mine, theirs in zip(test, mutated, strict=False):
        if mine.removeprefix("test_") != theirs:
            break
        num += 1
    return num


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="skip the mutations before this number, from 0")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--memory-gib", type=float, default=12.0, help="most data of one process")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of one run; a longer one counts as killed")
    parser.add_argument("--probes", type=Path, help="read which tests reach which mutation from this file, or make it")
    parser.add_argument("--tier", choices=("fast", "test"), default="test", help="the last tier that runs")
    parser.add_argument("--list", action="store_true", help="show the mutations and run nothing")
    parser.add_argument("--output", type=Path, help="add the table to this file as it grows")
    args = parser.parse_args()
    mutations = list(enumerate(draw(args.seed, args.count)))[args.first :]
    if args.list:
        for number, mutation in mutations:
            print(_line(number, mutation))
        return 0
    arguments, found = fast_command(), {"fast": 0, "test": 0, "none": 0}
    with scratch_copy() as copy:
        runner = Runner(copy, limit_s=args.limit_s, cores=args.cores, memory_gib=args.memory_gib)
        if args.probes is None or not args.probes.exists():
            notes = runner.notes_of_probes(dict(mutations), arguments)
            if args.probes is not None:
                args.probes.write_text(notes, "utf-8")
        else:
            notes = args.probes.read_text("utf-8")
        for number, mutation in mutations:
            files = files_reaching(number, notes)
            tier, outcome = _first_tier(runner, mutation, arguments, files, has_test_tier=args.tier == "test")
            found[tier] += 1
            text = f"{_line(number, mutation)}\n    {tier}: {outcome.reason or 'SURVIVED'}"
            print(f"{text}, {outcome.seconds:.0f} s", flush=True)
            if args.output is not None:
                with args.output.open("a", encoding="utf-8") as table:
                    table.write(f"{text}\n")
    print(f"of {len(mutations)}: {found['fast']} by fast, {found['test']} by test alone, {found['none']} by none")
    return 0


def files_reaching(number: int, notes: str) -> list[str] | None:
    """The files of tests that came to a mutation; None where all may have, as it was reached before any test."""
    tests = {line.partition(" ")[2] for line in notes.splitlines() if line.startswith(f"{number} ")}
    return None if "" in tests else sorted({test.partition("::")[0] for test in tests})


def _first_tier(
    runner: Runner,
    mutation: Mutation,
    fast: Sequence[str],
    reaching: Sequence[str] | None,
    *,
    has_test_tier: bool,
) -> tuple[str, Outcome]:
    """The first tier that finds a mutation. `reaching`: see `files_reaching`."""
    files = concerned(mutation.path, runner.copy)
    outcome, near = Outcome(None, 0.0), files if reaching is None else reaching
    if near:
        outcome = runner.kills(mutation, [*fast, *near])
    if outcome.reason is not None:
        return "fast", outcome
    if files and has_test_tier:
        outcome = runner.kills(mutation, [*files, "-n0"], is_after_fast=True)
    return "none" if outcome.reason is None else "test", outcome


def _line(number: int, mutation: Mutation) -> str:
    old, new = (" ".join(text.split()) for text in (mutation.old, mutation.new))
    return f"{number:>3} {mutation.path}:{mutation.line} {mutation.kind}: {old[:70]} -> {new[:70]}"


if __name__ == "__main__":
    sys.exit(main())
