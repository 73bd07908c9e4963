"""Writes docs/settings.md from the definitions in service/settings.py: python -m deploy.docs.settings"""

from __future__ import annotations

from pathlib import Path

from service.cli.serve import option_type
from service.settings import ENV_PREFIX, Settings, shown, shown_default

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
HEAD = """# Settings

Every setting is a variable, which all commands read, and an option of `nsm serve`, which wins: `NSM_MAX_SLOTS=32` is
`--max-slots 32`. An unknown `NSM_` variable or a bad value ends the start with one line; an empty one counts as unset.
Switches are `true` or `false` (`--energy`, `--no-energy`). `_S` means seconds, `_MB` MiB. OpenTelemetry's variables set
[traces](tracing.md). `python -m deploy.docs.settings` writes this page.
"""


def row_of(name: str) -> str:
    """One setting as a row of a table."""
    field = Settings.model_fields[name]
    _, choices = option_type(field.annotation)
    values = f": {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
    page = f" ({shown(name).page})" if shown(name).page else ""
    return f"| `{ENV_PREFIX}{name.upper()}`{values} | {shown_default(name)} | {field.description}{page} |"


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    for name in Settings.model_fields:
        if section := shown(name).section:
            lines += ["", f"## {section}", "", "| variable, values | default | |", "| --- | --- | --- |"]
        lines.append(row_of(name))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
