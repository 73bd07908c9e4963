"""`nsm inspect`: the effect of a text on the model's states, as figures, a page or a picture."""

from __future__ import annotations

import asyncio
import dataclasses
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
    from nsm_core.model.loader import LoadedNsm
    from service.settings import Settings
    from service.state.recent_text import RecentText

DEFAULT_TOKENS = 256
READ_TIMEOUT_S = 3600.0
COLUMNS = ("layer", "kind", "entropy", "states/token", "sparsity", "strength", "smoothness", "half-life")


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
        loaded, inspection = _inspect_session(settings, SessionKey(tenant, session), max_tokens)
    else:
        from service.settings import load_settings

        given = file.read_text("utf-8") if file is not None else read_stdin() if text == STDIN else text
        loaded, inspection = _inspect_text(load_settings(model=model, device=device), given, max_tokens)
    _write(loaded, inspection, html=html, png=png, token=token)
    _print(inspection, as_json=as_json)


def _inspect_text(settings: Settings, text: str, max_tokens: int) -> tuple[LoadedNsm, Inspection]:
    """From its start-of-text token on."""
    loaded = _load(settings)
    ids = [loaded.tokenizer.end_of_text_id, *loaded.tokenizer.encode(text)]
    if len(ids) > max_tokens:
        note(f"the first {max_tokens} of {len(ids)} tokens")
    return loaded, _read(loaded, ids[:max_tokens], None)


def _inspect_session(settings: Settings, key: SessionKey, max_tokens: int) -> tuple[LoadedNsm, Inspection]:
    """Its last tokens, on top of the state before them."""
    recent = asyncio.run(_recent(settings, key, max_tokens))
    if not recent.ids:
        raise InvalidRequest(f"session {key.session_id!r} has read nothing yet")
    loaded = _load(settings)
    return loaded, _read(loaded, recent.ids, recent.state)


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


def _load(settings: Settings) -> LoadedNsm:
    from nsm_core.architectures import require_nsm
    from nsm_lab.baselines.register import register_baselines
    from service.server import with_model

    register_baselines()
    return with_model(settings, require_nsm)


def _read(loaded: LoadedNsm, ids: Sequence[int], raw: bytes | None) -> Inspection:
    from nsm_core.inspection.reading import inspect as inspect_ids

    state = None if raw is None else loaded.model.state_spec.unpack(raw, loaded.model.embedding.weight.device)
    with progress("reading", len(ids)) as show:
        return inspect_ids(loaded.model, ids, state, progress=show)


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
    from rich.table import Table

    print(f"{len(inspection.ids)} tokens on top of {inspection.position}")
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("layer", "kind") else "right", no_wrap=True)
    for layer in layers:
        table.add_row(layer.layer, layer.kind, *map(_number, _figures(layer)))
    console().print(table)


def _figures(layer: LayerReport) -> tuple[float | None, ...]:
    trajectory = sorted(state.half_life for state in layer.states if state.half_life is not None)
    median = trajectory[len(trajectory) // 2] if trajectory else None
    return layer.entropy, layer.states_per_token, layer.sparsity, layer.strength, layer.smoothness, median


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
