"""An inspection as one picture with axes, for papers and notebooks. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nsm_core.inspection.figures import write_of
from nsm_core.inspection.reading import Inspection
from nsm_core.inspection.routing_capture import STATES
from nsm_lab.inspection.trace import trace

MAX_LABELS = 60  # token texts under the picture; longer texts show every n-th
INCHES_PER_LAYER = 2.2
DPI = 110


def draw_inspection(
    inspection: Inspection, labels: Sequence[str], path: Path, *, title: str, token: int | None = None
) -> None:
    """Writes a PNG: the trace of a token (None: the last), then for each layer with states the writes of each
    token and the distance of states from their start. Raises InvalidRequest or OSError.
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
        if layer.trajectory is not None:
            moved = layer.trajectory.moved.mean(dim=1).T.numpy()
            right.imshow(moved, aspect="auto", interpolation="nearest", origin="lower")
            right.set(title=f"layer {layer.name}: distance from the start")
    figure.savefig(path, dpi=DPI, format="png")


def draw_trace(axes: Axes, inspection: Inspection, labels: Sequence[str], token: int) -> None:
    """Draws the share of each token in the content that each layer reads at the traced token."""
    for one in trace(inspection, token):
        axes.plot(range(token + 1), one.tokens.numpy(), marker=".", linewidth=0.8, label=f"{one.layer} {one.kind}")
    step = -(-len(labels) // MAX_LABELS)
    ticks = range(0, len(labels), step)
    axes.set_xticks(list(ticks), [_plain(labels[tick]) for tick in ticks], rotation=90, fontsize=7)
    axes.set_title("share of each token in the content that layers read at the traced token")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside: inside it would lie on points


def _plain(text: str) -> str:
    """A label without formulas and without characters that matplotlib's font lacks."""
    shown = "".join(
        char if char.isprintable() and ord(char) < 0x250 else "·" if char.isspace() else "?" for char in text
    )
    return shown.replace("\\", "\\\\").replace("$", r"\$")
