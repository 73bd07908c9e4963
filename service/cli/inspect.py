"""`nsm inspect`: the effect of a text on the model's states, as figures, a page or a picture."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsm_core.errors import InvalidRequest
from service.cli import options
from service.cli.generate import STDIN, read_stdin
from service.cli.lab import lab_command
from service.cli.output import console, note, print_json
from service.cli.progress import progress
from service.cli.stores import opened_store, store_settings
from service.stores.sessions.base import DEFAULT_TENANT
from service.stores.sessions.key import SessionKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsm_core.inspection.reading import Inspection
    from nsm_core.inspection.report import LayerReport
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from nsm_core.model.loader import LoadedNsm
    from nsm_core.rwkv7.matrix_use import MatrixUse
    from nsm_core.rwkv7.model import Rwkv7Model
    from service.settings import Settings
    from service.state.recent_text import RecentText

DEFAULT_TOKENS = 256
READ_TIMEOUT_S = 3600.0
COLUMNS = ("layer", "kind", "entropy", "states/token", "sparsity", "strength", "smoothness", "half-life")
MATRIX_COLUMNS = ("layer", "kind", "norm", "decay", "half-life", "shortest", "longest")


@lab_command()
def inspect(
    text: Annotated[str, typer.Argument(help="A text; - reads it from standard input.", show_default=False)] = "",
    file: Annotated[Path | None, typer.Option(help="A text file in UTF-8.", show_default=False)] = None,
    session: Annotated[str | None, typer.Option(help="Id of a stored session.", show_default=False)] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=4096, help="Of a text the first, of a session the last so many tokens.")
    ] = DEFAULT_TOKENS,
    token: Annotated[int | None, typer.Option(min=0, help="Trace this token, from 0.", show_default="the last")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page here.", show_default=False)] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a picture here; needs matplotlib.", show_default=False)
    ] = None,
    tenant: options.Tenant = DEFAULT_TENANT,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """Effect of a text on the model's states: routing, content of states, influence of earlier tokens."""
    if sum(given is not None for given in (text or None, file, session)) != 1:
        raise typer.BadParameter("give one of a text, --file and --session")
    if token is not None and html is None and png is None:
        raise typer.BadParameter(
            "a traced token is shown in a page or a picture: give --html or --png", param_hint="'--token'"
        )
    if session is not None:
        settings = store_settings(data_dir, store, model=model, device=device)
        text_read = _session_text(settings, SessionKey(tenant, session), max_tokens)
        loaded = _load(settings)
    else:
        from service.settings import load_settings

        given = file.read_text("utf-8") if file is not None else read_stdin() if text == STDIN else text
        loaded = _load(load_settings(model=model, device=device))
        text_read = _given_text(loaded, given, max_tokens)
    from nsm_core.rwkv7.model import Rwkv7Model

    if isinstance(loaded.model, Rwkv7Model):
        if html is not None or png is not None:
            raise InvalidRequest(f"{loaded.name} has no memory slots to draw: leave out --html and --png")
        _print_matrices(loaded.model, text_read, as_json=as_json)
        return
    from nsm_core.architectures import require_nsm

    own = require_nsm(loaded)
    inspection = _read(own, text_read)
    _write(own, inspection, html=html, png=png, token=token)
    _print(inspection, as_json=as_json)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """`ids` on top of `position` tokens; `state`: after these, None: the start of a text."""

    ids: Sequence[int]
    position: int = 0
    state: bytes | None = None


def _given_text(loaded: LoadedModel[SequenceModel], text: str, max_tokens: int) -> _Text:
    """From its start-of-text token on."""
    ids = [loaded.tokenizer.end_of_text_id, *loaded.tokenizer.encode(text)]
    if len(ids) > max_tokens:
        note(f"the first {max_tokens} of {len(ids)} tokens")
    return _Text(ids=ids[:max_tokens])


def _session_text(settings: Settings, key: SessionKey, max_tokens: int) -> _Text:
    """Its last tokens, on top of the state before them."""
    recent = asyncio.run(_recent(settings, key, max_tokens))
    if not recent.ids:
        raise InvalidRequest(f"session {key.session_id!r} has read nothing yet")
    return _Text(ids=recent.ids, position=recent.position, state=recent.state)


async def _recent(settings: Settings, key: SessionKey, num_tokens: int) -> RecentText:
    from service.server import make_backend
    from service.state.recent_text import recent_text

    async with opened_store(settings) as store:
        head = await store.get(key)
        backend = make_backend(settings)
        await backend.start()
        try:
            return await recent_text(backend, store, head, num_tokens=num_tokens, timeout_s=READ_TIMEOUT_S)
        finally:
            await backend.stop()


def _load(settings: Settings) -> LoadedModel[SequenceModel]:
    from nsm_lab.baselines.register import register_baselines
    from service.local_model import with_model

    register_baselines()
    return with_model(settings, lambda loaded: loaded)


def _read(loaded: LoadedNsm, text: _Text) -> Inspection:
    from nsm_core.inspection.reading import inspect as inspect_ids

    state = None
    if text.state is not None:
        state = loaded.model.state_spec.unpack(text.state, loaded.model.embedding.weight.device)
    with progress("reading", len(text.ids)) as show:
        return inspect_ids(loaded.model, text.ids, state, progress=show)


def _print_matrices(model: Rwkv7Model, text: _Text, *, as_json: bool) -> None:
    from nsm_core.rwkv7.matrix_use import matrix_uses

    state = None if text.state is None else model.state_spec.unpack(text.state, model.device)
    with progress("reading", len(text.ids)) as show:
        layers = matrix_uses(model, text.ids, state, progress=show)
    if as_json:
        heads = [[dataclasses.asdict(head) for head in layer] for layer in layers]
        described = [{"layer": number, "kind": "matrix", "heads": each} for number, each in enumerate(heads)]
        print_json({"position": text.position, "num_tokens": len(text.ids), "layers": described})
        return
    rows = [(str(number), "matrix", *map(_number, _matrix_figures(layer))) for number, layer in enumerate(layers)]
    _print_table(len(text.ids), text.position, MATRIX_COLUMNS, rows)


def _write(
    loaded: LoadedNsm, inspection: Inspection, *, html: Path | None, png: Path | None, token: int | None
) -> None:
    from service.generate.openai_format import token_text

    labels = [token_text(loaded.tokenizer, token_id) for token_id in inspection.ids]
    title = f"{loaded.name}: effect of a text on its states"
    if html is not None:
        from nsm_lab.inspection.page import inspection_page

        html.write_text(inspection_page(inspection, labels, title=title, token=token), "utf-8")
        note(f"page: {html}")
    if png is not None:
        from nsm_lab.inspection.plots import draw_inspection

        draw_inspection(inspection, labels, png, title=title, token=token)
        note(f"picture: {png}")


def _print(inspection: Inspection, *, as_json: bool) -> None:
    from nsm_core.inspection.summary import skipped_layers_note, summarise

    layers, skipped = summarise(inspection), skipped_layers_note(inspection)
    if skipped is not None:
        note(skipped)
    if as_json:
        fields: dict[str, Any] = {"position": inspection.position, "num_tokens": len(inspection.ids)}
        print_json({**fields, "layers": [dataclasses.asdict(layer) for layer in layers]})
        return
    rows = [(layer.layer, layer.kind, *map(_number, _figures(layer))) for layer in layers]
    _print_table(len(inspection.ids), inspection.position, COLUMNS, rows)


def _print_table(num_tokens: int, position: int, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    print(f"{num_tokens} tokens on top of {position}")
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("layer", "kind") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _matrix_figures(heads: Sequence[MatrixUse]) -> tuple[float, ...]:
    lives = sorted(head.half_life for head in heads)
    norm, decay = (statistics.fmean(getattr(head, name) for head in heads) for name in ("norm", "decay"))
    return norm, decay, statistics.median(lives), lives[0], lives[-1]


def _figures(layer: LayerReport) -> tuple[float | None, ...]:
    trajectory = sorted(state.half_life for state in layer.states if state.half_life is not None)
    median = trajectory[len(trajectory) // 2] if trajectory else None
    return layer.entropy, layer.states_per_token, layer.sparsity, layer.strength, layer.smoothness, median


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
