"""A hook of the site's builder: links to files outside of docs/ become the names of these files.

In the repository such links are good (a test follows every one); the site does not have what they lead to.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """`[results](../benchmarks/a.txt)` -> results (`benchmarks/a.txt`)."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
