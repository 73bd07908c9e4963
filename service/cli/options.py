"""Options of several commands, and their conversion."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from nsm_core.errors import InvalidRequest
from nsm_core.sampling.params import SEED_BITS, SamplingParams

# Milder than HTTP's defaults, which are those of OpenAI's clients: a person at a terminal wants to read something, and
# the bundled model repeats itself in long texts without a penalty (benchmarks/quality/loops.md)
TEMPERATURE, TOP_P, REPETITION_PENALTY = 0.8, 0.95, 1.1

Model = Annotated[
    Path | None, typer.Option(show_default=False, help="Model directory (default: NSM_MODEL, or the bundled model).")
]
Device = Annotated[
    str | None, typer.Option(show_default=False, help="auto, cpu, cuda or a GPU as cuda:1 (default: NSM_DEVICE).")
]
DataDir = Annotated[
    Path | None, typer.Option(show_default=False, help="Directory of the SQLite store (default: NSM_DATA_DIR).")
]
Store = Annotated[
    str | None, typer.Option(show_default=False, help="sqlite, sqlite:///PATH or a Redis URL (default: NSM_STORE).")
]
Tenant = Annotated[str, typer.Option(help="Whose sessions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MaxTokens = Annotated[int, typer.Option(help="Most new tokens.")]
Temperature = Annotated[float, typer.Option(help="In [0, 2]; 0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Draw from the most likely tokens that have this share, in (0, 1].")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest, in [0, 1].")]
RepetitionPenalty = Annotated[float, typer.Option(help="In (0, 10]; 1: none.")]
PresencePenalty = Annotated[float, typer.Option(help="In [-2, 2]; 0: none.")]
FrequencyPenalty = Annotated[float, typer.Option(help="In [-2, 2]; 0: none.")]
Stop = Annotated[list[str] | None, typer.Option(show_default=False, help="End before this text; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after end of text.")]
Seed = Annotated[int | None, typer.Option(show_default=False, help="The same seed gives the same text.")]


def make_sampling(*, seed: int | None, **params: Any) -> SamplingParams:
    """Raises a usage error that names the option. Without a seed one is drawn."""
    try:
        return SamplingParams(seed=secrets.randbits(SEED_BITS) if seed is None else seed, **params)
    except InvalidRequest as error:
        name = error.param or ""
        option = "--" + name.replace("_", "-")
        raise typer.BadParameter(str(error).removeprefix(name).strip(), param_hint=f"'{option}'") from error
