"""The tables of a run on a page of the documentation, between two marks that the page has for its device."""

from __future__ import annotations

import os
import re
from pathlib import Path


def put_on_page(page: Path, device: str, output: Path) -> None:
    """Replaces what stands between `<!-- DEVICE -->` and `<!-- /DEVICE -->`. Raises ValueError where a mark is missing.

    Headings of the tables go two levels down, and pictures are linked where they lie, in `output`.
    """
    text = page.read_text("utf-8")
    start, end = f"<!-- {device} -->", f"<!-- /{device} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} has no place for {device}: it needs the lines {start} and {end}")
    before, rest = text.split(start)
    after = rest.split(end)[1]
    page.write_text(f"{before}{start}\n\n{_body(output, page.parent)}\n\n{end}{after}", "utf-8")


def _body(output: Path, folder: Path) -> str:
    title, _, tables = (output / "table.md").read_text("utf-8").partition("\n\n")
    if not title.startswith("# "):
        raise ValueError(f"{output / 'table.md'} begins with {title[:20]!r}")
    relative = os.path.relpath(output, folder)
    links = [f"[{path.stem}]({relative}/{path.name})" for path in sorted(output.glob("*.svg"))]
    pictures = f"Microseconds a token by length: {', '.join(links)}." if links else ""
    return "\n\n".join(
        part for part in (re.sub(r"^## ", "#### ", tables.strip(), flags=re.MULTILINE), pictures) if part
    )
