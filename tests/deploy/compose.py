"""docker-compose.yml as data, and what it says when the variables have their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
ENV_EXAMPLE = ROOT / ".env.example"
# ${NAME}, ${NAME:-default}, ${NAME:?error}, ${NAME:+if set}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?+])([^}]*))?\}")


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text()))


def services() -> dict[str, dict[str, Any]]:
    return dict(compose()["services"])


def variables() -> set[str]:
    """Names that docker-compose.yml reads, comments left out."""
    return {found[1] for found in VARIABLE.finditer(yaml.safe_dump(compose()))}


def filled(text: str) -> str:
    """`text` where no variable is set: defaults stay, required ones become their names."""
    return VARIABLE.sub(lambda found: {"-": found[3], "?": found[1], "+": ""}.get(found[2] or "", ""), text)


def env_example() -> dict[str, str]:
    lines = ENV_EXAMPLE.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
