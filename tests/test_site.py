"""The site of the documentation builds strictly, is whole, and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browsers import chromium

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


COPIED = """
Array.from(document.querySelectorAll(".language-console code")).map(code => {
  code.setAttribute("data-md-copying", "");  // as the copy button does, which takes innerText then
  const text = code.innerText;
  code.removeAttribute("data-md-copying");
  return text.trimEnd();
})
"""


@pytest.mark.chromium
async def test_copy_button_of_console_blocks_takes_commands_without_prompts_and_output(site: Path) -> None:
    async with chromium() as browser:
        page = await browser.new_page()
        await page.goto((site / "quickstart.html").as_uri())
        copied = await page.evaluate(COPIED)
    assert copied[0] == "make serve"
    assert not [text for text in copied if re.search(r"^\$ |^\{", text, re.MULTILINE)]
    assert "\n    -d '{" in copied[1]  # lines that continue a command
