"""What `make verify-docs` takes for stale, and what not."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from deploy.docs.verify.__main__ import main, pages, verify
from deploy.docs.verify.blocks import Step, steps_of
from deploy.docs.verify.commands import options_of, why_not
from deploy.docs.verify.compare import stale_lines
from deploy.docs.verify.figures import Figure, read_figures, stale_figures
from deploy.docs.verify.shell import ROOT, Shell
from service.telemetry.metrics.metrics import Metrics
from tests.support.fakes import FakeBackend

PAGE = """# Page

```console
$ echo one \\
    two
one two
$ echo 1.5 MB
2.5 MB
```

<!-- verify: VALUE=7 -->

```sh
# a comment
echo $VALUE
```

as the file `hello.py`:

```python
print("hello")
```

```console
$ python hello.py
hell
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_commands_of_a_page_come_in_order_with_what_it_shows(page: Path) -> None:
    steps = list(steps_of(page, "page.md"))
    assert [(step.line, step.command, step.shown) for step in steps] == [
        (4, "echo one \\\n    two", ("one two",)),
        (7, "echo 1.5 MB", ("2.5 MB",)),
        (11, "VALUE=7", ()),
        (15, "echo $VALUE", ()),
        (21, 'print("hello")\n', ()),
        (25, "python hello.py", ("hell",)),
    ]
    assert [step.is_hidden for step in steps] == [False, False, True, False, False, False]
    assert steps[4].file == "hello.py"


def test_a_quotation_over_several_lines_is_one_command(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("""```console\n$ echo '{\n  "a": 1}'\n{\n  "a": 1}\n$ echo # it's open\n```\n""")
    steps = [(step.command, step.shown) for step in steps_of(path, "page.md")]
    assert steps == [("echo '{\n  \"a\": 1}'", ("{", '  "a": 1}')), ("echo # it's open", ())]


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("session a at position 76", "session a at position 77"),
        ("2026-11-28 15:19:39,303 INFO ready", "2027-01-01 01:00:00,001 INFO ready"),
        ('{"id":"cmpl-3be8…","created":1,…}', '{"id":"cmpl-0123456789abcdef","created":2,"x":[3]}'),
        ("key: nsm_14458d05969c_mB8p…", "key: nsm_99aa11bb22cc_Xy-9_z8"),
        ("a    b", "a b"),
        ("…", "anything"),
    ],
)
def test_numbers_ids_and_spaces_may_differ(shown: str, printed: str) -> None:
    assert stale_lines([shown], f"first\n{printed}\nlast\n") == []


@pytest.mark.parametrize(
    ("shown", "printed"),
    [("stop: eos", "stop: length"), ('{"kind":"a"}', '{"sort":"a"}'), ("one", ""), ("a [8, 64]", "a (8, 64)")],
)
def test_words_may_not(shown: str, printed: str) -> None:
    (stale,) = stale_lines([shown], printed)
    assert stale.startswith(f"{shown}\n")


def test_lines_must_come_in_the_pages_order() -> None:
    assert stale_lines(["one", "two"], "two\none\n") != []
    assert stale_lines(["one", "two"], "zero\none\nmore\ntwo\n") == []


def test_a_command_that_is_not_run_has_a_reason_and_its_options_are_known() -> None:
    assert why_not("docker build .")
    assert why_not("nsm train --data data/books-sample --steps 20") == "minutes of processor time"
    assert why_not("nsm sessions list") == ""
    assert why_not('echo "x" | nsm chat --session mine') == ""
    assert why_not("nsm chat") != ""
    known = options_of("NSM_X=1 nsm sessions restore all.nsm --store x --overwrite  # --not-this")
    assert known is not None
    assert (known.program, known.options) == ("nsm sessions restore", ("--store", "--overwrite"))
    assert options_of("kubectl apply --filename x") is None


def test_a_page_is_run_and_what_is_stale_is_told(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.docs.verify.__main__.ROOT", page.parent)
    results = [(outcome.step.line, outcome.kind) for outcome in verify(page, 30.0)]
    assert results == [(4, "ok"), (7, "ok"), (15, "ok"), (21, "ok"), (25, "stale")]


def test_a_command_that_does_not_end_fails_and_the_page_goes_on(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.docs.verify.__main__.ROOT", page.parent)
    page.write_text("```sh\nsleep 60\necho after\n```\n\n<!-- not verified: long -->\n\n```sh\nsleep 70\n```\n")
    outcomes = list(verify(page, 2.0))
    assert [outcome.kind for outcome in outcomes] == ["failed", "ok", "not run"]
    assert (outcomes[2].step.line, outcomes[2].details) == (9, "long")


def test_what_a_page_starts_ends_with_it(tmp_path: Path) -> None:
    with Shell(tmp_path) as shell:
        _, printed = shell.run("sleep 100 & echo $!", limit_s=60.0)
    pid = int(printed.split()[-1])
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # another process's end cannot be awaited


def test_every_page_with_commands_is_among_those_that_are_verified() -> None:
    names = {path.name for path in pages(None)}
    assert {"README.md", "quickstart.md", "cli.md", "triton.md"} <= names
    assert all(isinstance(step, Step) for path in pages(None) for step in steps_of(path, path.name))


def test_X21_figures_of_the_pages_are_those_of_the_results() -> None:
    """The others are measured again with `make verify-docs`, or by the commands that stand beside them."""
    assert list(stale_figures(read_figures())) == []
    assert main(["--figures"]) == 0


def test_X21_a_stale_figure_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("costs 7.1 against 5.8 ms")
    (tmp_path / "results.txt").write_text("ours 0.97\ntheirs 0.60\nparts 0.4 and 0.2\n")
    quote = r"costs ([\d.]+) against ([\d.]+)"

    def stale(*source: str, **fields: str) -> list[str]:
        figure = Figure(**{"page": "page.md", "quote": quote, "results": "results.txt", "source": source, **fields})
        return list(stale_figures([figure], tmp_path))

    assert stale(r"ours ([\d.]+)", r"theirs ([\d.]+)") == ["page.md: 7.1 / 5.8, but results.txt has 0.97 / 0.6"]
    (tmp_path / "page.md").write_text("costs 0.97 against 0.6 ms")
    assert stale(r"ours ([\d.]+)", r"theirs ([\d.]+)") == []
    assert stale(r"ours ([\d.]+)", r"parts ([\d.]+) and ([\d.]+)") == []  # parts of one figure add up
    assert stale(r"ours ([\d.]+)", r"gone ([\d.]+)") == [r"results.txt: nothing fits 'gone ([\\d.]+)'"]
    assert stale(r"ours ([\d.]+)", quote="gone") == ["page.md: nothing fits 'gone'"]


def test_X26_the_page_on_tenants_names_every_metric_with_a_tenants_label() -> None:
    page = (ROOT / "docs" / "tenants.md").read_text()
    registry = Metrics(FakeBackend()).registry
    families = {id(collector): collector for collector in registry._names_to_collectors.values()}.values()
    labelled = {family._name for family in families if "tenant" in getattr(family, "_labelnames", ())}
    assert labelled
    assert {name for name in labelled if name not in page} == set()
