"""Words for a session that another model made than the one that runs: which one, and how to go on."""

from __future__ import annotations

from typing import NamedTuple

from nsm_core.model.bundled import bundled_name

SHOWN_DIGITS = 12


class OtherModel(NamedTuple):
    """`shown`: the name of a bundled model with its fingerprint's beginning, of any other that alone. `ways`: commands
    for an operator whose store has its sessions.
    """

    shown: str
    ways: str


def other_model(fingerprint: str) -> OtherModel:
    """The first call reads the bundled models' files, for a tenth of a second: from an event loop, in a thread."""
    name = bundled_name(fingerprint)
    serve = "nsm serve --model DIRECTORY" if name is None else f"nsm serve --model {name}"
    ways = f"`nsm sessions migrate` moves sessions to the running model, `{serve}` continues with theirs"
    return OtherModel(shown_model(fingerprint), ways)


def shown_model(fingerprint: str) -> str:
    """Reads files as `other_model` does."""
    name, short = bundled_name(fingerprint), fingerprint[:SHOWN_DIGITS]
    return short if name is None else f"{name} ({short})"
