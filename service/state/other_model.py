"""Words for a session that another model made than the one that runs: which one, and how to go on."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from nsm_core.errors import StateMismatch
from nsm_core.model.bundled import BUNDLED, bundled_name, commit_of_replaced
from nsm_core.model_info import ModelInfo
from service.stores.sessions.base import SessionHead

SHOWN_DIGITS = 12


class OtherModel(NamedTuple):
    """`shown`: the name of a bundled model with its fingerprint's beginning, also of earlier weights of the default; of
    any other model the beginning alone. `ways`: commands for an operator whose store has its sessions; they keep the
    running model.
    """

    shown: str
    ways: str


def other_model(fingerprint: str, running: str) -> OtherModel:
    """`running`: the fingerprint of the model that is served.

    The first call reads the bundled models' files, for a tenth of a second: from an event loop, in a thread.
    """
    ways = f"`nsm sessions migrate` moves sessions to the running model, {_serving(fingerprint, running)}"
    return OtherModel(shown_model(fingerprint), ways)


def shown_model(fingerprint: str) -> str:
    """Reads files as `other_model` does."""
    name, short = bundled_name(fingerprint), fingerprint[:SHOWN_DIGITS]
    if name is None and commit_of_replaced(fingerprint) is not None:
        return f"{BUNDLED.name} (earlier weights, {short})"
    return short if name is None else f"{name} ({short})"


async def require_own_model(head: SessionHead, model: ModelInfo, *, tokenizer_fingerprint: str) -> None:
    """Raises StateMismatch for a session with a text that another model made: its state is that model's alone."""
    if head.num_log_tokens and head.model_fingerprint != model.fingerprint:
        is_readable = head.tokenizer_fingerprint == tokenizer_fingerprint
        raise StateMismatch(await asyncio.to_thread(_refusal, head, model.fingerprint, is_readable))


def _refusal(head: SessionHead, running: str, is_readable: bool) -> str:
    """`is_readable`: the running model has the tokenizer of the session's log."""
    made_by = head.model_fingerprint
    begin = f"session {head.session_id!r} was made by model {shown_model(made_by)}"
    if is_readable:
        return f"{begin}, which is not served here, as {shown_model(running)} is: {other_model(made_by, running).ways}"
    return f"{begin} with another tokenizer than that of {shown_model(running)}: {_serving(made_by, running)}"


def _serving(fingerprint: str, running: str) -> str:
    name, commit = bundled_name(fingerprint), commit_of_replaced(fingerprint)  # reads files
    served = bundled_name(running) or "RUNNING"
    serving = f"`nsm serve --model {served} --model {name or 'before=DIRECTORY'}` also continues theirs"
    if name is not None or commit is None:
        return serving
    return f"{serving}: DIRECTORY is nsm_core/model/checkpoints/{BUNDLED.name} at commit {commit} of the repository"
