"""`nsm tier`: a model with fewer memory slots, as a model directory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli import options
from service.cli.output import note


def tier(
    model: Annotated[Path, typer.Argument(help="Model directory, or the name of a bundled model.", show_default=False)],
    states: Annotated[int, typer.Option(min=1, help="Memory slots a head, the first so many.", show_default=False)],
    output: Annotated[Path, typer.Option("--out", help="Directory to write, new or empty.", show_default=False)],
    device: options.Device = None,
) -> None:
    """Write a model with fewer memory slots: smaller states for `nsm serve --model DIR`."""
    from nsm_core.execution.devices import resolve_device
    from nsm_core.model.bundled import find_checkpoint
    from nsm_core.model.loader import load_checkpoint
    from nsm_core.model.tiers import write_tier
    from service.settings import load_settings

    write_tier(find_checkpoint(model), states, output)
    where = resolve_device(load_settings(device=device).device)
    whole, small = load_checkpoint(model, where), load_checkpoint(output, where)
    if states not in whole.config.state_tiers:
        note(f"the model was not trained to be read with {states} states: expect a loss")
    sizes = whole.model.state_spec.num_bytes, small.model.state_spec.num_bytes
    note(f"{output}: a state has {sizes[1]:,} bytes, of the model {sizes[0]:,}")
