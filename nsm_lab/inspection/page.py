"""An inspection as one HTML page. The page has no script, loads nothing, and shows all text as text."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nsm_core.inspection.figures import state_figures, write_of
from nsm_core.inspection.reading import Inspection, LayerActivity
from nsm_core.inspection.routing_capture import STATES
from nsm_core.inspection.summary import skipped_layers_note, summarise
from nsm_lab.inspection.clusters import cluster_states
from nsm_lab.inspection.heatmap import data_uri, heatmap_png
from nsm_lab.inspection.trace import LayerTrace, trace

NUM_SHOWN_STATES = 8
NUM_SHOWN_TOKENS = 5
NUM_TRACED_STATES = 3
NUM_CLUSTERS = 4
CELL_PX = 8
MAX_WIDTH_PX = 1600
# The browser loads nothing and runs nothing
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
h2 { margin-top: 2em } h3 { margin: 1em 0 0.2em; font-size: 14px }
table { border-collapse: collapse } td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd }
td.text, th.text { text-align: left } code { background: #eee; border-radius: 3px; white-space: pre-wrap }
.scroll { overflow-x: auto }
.tokens { white-space: pre-wrap; font: 15px/1.9 ui-monospace, monospace; max-width: 70em }
.tokens span { border-radius: 3px } .tokens .here { outline: 2px solid #d55e00 }
img { image-rendering: pixelated; display: block } p.note { color: #666; max-width: 60em }
"""


def inspection_page(inspection: Inspection, labels: Sequence[str], *, title: str, token: int | None = None) -> str:
    """`labels`: the text of each token; `token`: the one whose trace is shown, None: the last.

    Raises InvalidRequest for a token that the text does not have.
    """
    token = len(inspection.ids) - 1 if token is None else token
    traces = trace(inspection, token)
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{len(inspection.ids)} tokens, read on top of {inspection.position}.</p>",
        *_trace_section(traces, labels, token),
        *_layer_table(inspection),
    ]
    for layer in inspection.layers:
        if layer.kind in STATES:
            parts += _layer_section(layer, labels)
    return "\n".join([*parts, "</body></html>", ""])


def _trace_section(traces: Sequence[LayerTrace], labels: Sequence[str], token: int) -> Iterator[str]:
    yield "<h2>Trace of the token</h2>"
    yield (
        '<p class="note">Darker tokens wrote more of the content that the layers read at the outlined token; mean over '
        "layers and heads. A pointer on a token shows each layer's share.</p>"
    )
    shares = torch.stack([one.tokens for one in traces]).mean(dim=0) if traces else torch.zeros(token + 1)
    top = float(shares.max()) or 1.0
    spans = []
    for index, label in enumerate(labels):
        share = 0.0 if index > token else float(shares[index])
        by_layer = ", ".join(f"layer {one.layer}: {float(one.tokens[index]):.1%}" for one in traces if index <= token)
        name = ' class="here"' if index == token else ""
        style = f"background: rgba(0, 114, 178, {share / top * 0.8:.3f})" if share else ""
        title = html.escape(f"{index}: {by_layer}")
        spans.append(f'<span{name} style="{style}" title="{title}">{_text(label)}</span>')
    yield f'<div class="tokens">{"".join(spans)}</div>'
    yield "<table><tr><th>layer</th><th class=text>kind</th><th>before the text</th><th class=text>tokens</th>"
    yield "<th class=text>states that it read, and the tokens that wrote to them</th></tr>"
    for one in traces:
        kind = one.kind if one.is_exact else f"{one.kind} (by routing)"
        yield f"<tr><td>{one.layer}</td><td class=text>{kind}</td><td>{float(one.before.mean()):.1%}</td>"
        yield f"<td class=text>{_shares(one.tokens, labels)}</td><td class=text>{_states_read(one, labels)}</td></tr>"
    yield "</table>"


def _states_read(one: LayerTrace, labels: Sequence[str]) -> str:
    if one.states is None or one.by_state is None:
        return ""
    found = _largest(one.states, NUM_TRACED_STATES)
    parts = (f"state {state} {share:.1%}: {_shares(one.by_state[state], labels, 2)}" for state, share in found)
    return "<br>".join(parts)


def _shares(shares: Tensor, labels: Sequence[str], count: int = NUM_SHOWN_TOKENS) -> str:
    """The tokens with the largest of shares [T]."""
    return ", ".join(f"{_code(labels[index])} {share:.1%}" for index, share in _largest(shares, count))


def _layer_table(inspection: Inspection) -> Iterator[str]:
    names = ("layer", "entropy", "states per token", "sparsity", "strength", "smoothness")
    yield "<h2>Layers with states</h2><table><tr>"
    yield "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for layer in summarise(inspection):
        numbers = (layer.entropy, layer.states_per_token, layer.sparsity, layer.strength, layer.smoothness)
        yield f"<tr><td>{layer.layer}</td>" + "".join(f"<td>{_number(value)}</td>" for value in numbers) + "</tr>"
    yield "</table>"
    skipped = skipped_layers_note(inspection)
    if skipped is not None:
        yield f'<p class="note">{html.escape(skipped.capitalize())}.</p>'


def _layer_section(layer: LayerActivity, labels: Sequence[str]) -> Iterator[str]:
    yield f"<h2>Layer {layer.name} ({layer.kind})</h2>"
    write = write_of(layer)
    yield from _map("Written: how much of a state each token replaces", write.sum(dim=1).T)
    if layer.read is not None:
        yield from _map("Read: the share of each state in the read after a token", layer.read.sum(dim=1).T)
    if layer.usage is not None:
        yield from _map("Usage: how fully and how lately each row was written", layer.usage.T)
    if layer.trajectory is not None:
        yield from _map("Moved: distance of each state from its learned start", layer.trajectory.moved.mean(dim=1).T)
    for token, mix in layer.exchanges.items():
        yield from _map(
            f"Exchange after token {token}: shares of old states in each new one (row)",
            mix.mean(dim=0),
            cell=4,
        )
    yield from _state_table(layer, labels)


def _map(title: str, values: Tensor, *, cell: int = CELL_PX) -> Iterator[str]:
    """values [rows, columns]: states down, tokens across."""
    rows, columns = values.shape
    width = min(MAX_WIDTH_PX, columns * cell)
    text = html.escape(title)
    yield f"<h3>{text} (brightest: {_number(float(values.max()))})</h3>"
    size = f'width="{width}" height="{max(rows * 4, 32)}"'
    yield f'<div class="scroll"><img {size} alt="{text}" src="{data_uri(heatmap_png(values))}"></div>'


def _state_table(layer: LayerActivity, labels: Sequence[str]) -> Iterator[str]:
    figures, by_token = state_figures(layer), write_of(layer).sum(dim=1)
    importance = figures.importance.sum(dim=0)
    groups = cluster_states(layer, min(NUM_CLUSTERS, len(importance)))
    yield f"<h3>The most important states (grouped by content; silhouette {groups.silhouette:.2f})</h3><table>"
    names = ("state", "importance", "utilisation", "half-life", "specialisation", "group")
    yield "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "<th class=text>written most by</th></tr>"
    for state, weight in _largest(importance, NUM_SHOWN_STATES):
        numbers = (
            weight,
            float(figures.utilisation[:, state].mean()),
            float(figures.half_life[:, state].median()),
            float(figures.specialisation[:, state].mean()),
        )
        cells = "".join(f"<td>{_number(value)}</td>" for value in numbers)
        most = ", ".join(_code(labels[token]) for token, _ in _largest(by_token[:, state]))
        group = int(groups.labels[state])
        yield f"<tr><td>{state}</td>{cells}<td>{group}</td><td class=text>{most}</td></tr>"
    yield "</table>"


def _largest(values: Tensor, count: int = NUM_SHOWN_TOKENS) -> list[tuple[int, float]]:
    """(index, value) of the largest of values [N], largest first. Zeros are left out."""
    order = values.argsort(descending=True, stable=True)[:count].tolist()
    return [(index, float(values[index])) for index in order if float(values[index]) > 0]


def _code(label: str) -> str:
    """A token with visible borders."""
    return f"<code>{_text(label)}</code>"


def _text(label: str) -> str:
    """Escaped text. Control characters, which HTML forbids, become U+FFFD."""
    return html.escape("".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in label))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"
