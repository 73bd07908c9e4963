"""Input files of batches, and their output."""

from __future__ import annotations

import json
from typing import Any


def input_of(*bodies: dict[str, Any], url: str = "/v1/completions") -> bytes:
    """A file of requests; their ids are line-0, line-1 and so on."""
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def lines_of(raw: bytes) -> dict[str, dict[str, Any]]:
    """Results by their ids; no id may come twice."""
    lines = [json.loads(line) for line in raw.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
