"""An inspection as one picture with axes, for papers and notebooks. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nsm_core.inspection.figures import write_of
from nsm_core.inspection.looks import STATES
from nsm_core.inspection.reading import Inspection
from nsm_lab.inspection.trace import trace

MAX_LABELS = 60  # token texts under the picture; of longer texts every few
INCHES_PER_LAYER = 2.2
DPI = 110


def draw_inspection(
    inspection: Inspection, labels: Sequence[str], path: Path, *, title: str, token: int | None = None
) -> None:
    """Writes a PNG: the trace of a token (None: the last), then for each layer with states what each token wrote to
    them and how far they have moved. Raises InvalidRequest or OSError.
    """
    layers = [layer for layer in inspection.layers if layer.kind in STATES]
    figure = Figure(figsize=(14, INCHES_PER_LAYER * (len(layers) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(title))
    grid = figure.subplots(len(layers) + 1, 2, squeeze=False)
    for axes in grid[0]:
        axes.remove()
    top = figure.add_subplot(grid[0][0].get_subplotspec().get_gridspec()[0, :])
    draw_trace(top, inspection, labels, len(inspection.ids) - 1 if token is None else token)
    for layer, (left, right) in zip(layers, grid[1:], strict=True):
        written = write_of(layer).sum(dim=1).T.numpy()
        left.imshow(written, aspect="auto", interpolation="nearest", origin="lower")
        left.set(title=f"layer {layer.name}: written", ylabel="state")
        if layer.lives is not None:
            moved = layer.lives.moved.mean(dim=1).T.numpy()
            right.imshow(moved, aspect="auto", interpolation="nearest", origin="lower")
            right.set(title=f"layer {layer.name}: distance from the start")
    figure.savefig(path, dpi=DPI, format="png")


def draw_trace(axes: Axes, inspection: Inspection, labels: Sequence[str], token: int) -> None:
    """What each token gave to what each layer reads at the traced one."""
    for one in trace(inspection, token):
        axes.plot(range(token + 1), one.tokens.numpy(), marker=".", linewidth=0.8, label=f"{one.layer} {one.kind}")
    step = -(-len(labels) // MAX_LABELS)
    places = range(0, len(labels), step)
    axes.set_xticks(list(places), [_plain(labels[place]) for place in places], rotation=90, fontsize=7)
    axes.set_title("share of each token in what the layers read at the traced one")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside: inside it would lie on points


def _plain(text: str) -> str:
    """A label that matplotlib takes as it is: no formulas, and nothing that its font has no sign for."""
    shown = "".join(
        char if char.isprintable() and ord(char) < 0x250 else "·" if char.isspace() else "?" for char in text
    )
    return shown.replace("\\", "\\\\").replace("$", r"\$")
