"""The site of the documentation builds strictly, is whole, and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FETCHED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=.?(https?:)?//|<link[^>]*rel=.?stylesheet[^>]*//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # not --quiet: with it the builder does not count its warnings, and nothing is strict
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_on_the_site(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert pages
    assert [page for page in pages if not (site / page).exists()] == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    assert [page.name for page in site.rglob("*.html") if FETCHED.search(page.read_text("utf-8"))] == []


def test_files_outside_of_the_documentation_are_named_instead_of_linked(site: Path) -> None:
    text = (site / "performance.html").read_text("utf-8") + (site / "energy.html").read_text("utf-8")
    assert 'href="../benchmarks' not in text
    assert "<code>benchmarks/results/energy_gpu-h200.txt</code>" in text
