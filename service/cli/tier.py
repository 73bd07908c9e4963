"""`nsm tier`: a model with fewer memory slots, as a model directory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.output import note


def tier(
    model: Annotated[Path, typer.Argument(help="Model directory, or the name of a bundled model.", show_default=False)],
    states: Annotated[int, typer.Option(min=1, help="Memory slots a head, the first so many.", show_default=False)],
    output: Annotated[Path, typer.Option("--out", help="Directory to write, new or empty.", show_default=False)],
) -> None:
    """Write a model with fewer memory slots: smaller states for `nsm serve --model DIR`."""
    from nsm_core.model.bundled import find_checkpoint
    from nsm_core.model.loader import load_checkpoint
    from nsm_core.model.tiers import write_tier

    write_tier(find_checkpoint(model), states, output)
    whole, small = load_checkpoint(model), load_checkpoint(output)
    if states not in whole.config.state_tiers:
        note(f"the model was not trained to be read with {states} states: expect a loss")
    sizes = whole.model.state_spec.num_bytes, small.model.state_spec.num_bytes
    note(f"{output}: a state has {sizes[1]:,} bytes, of the model {sizes[0]:,}")
