"""`nsm sessions states`: report on a session's states, with the local model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsm_core.state.report import Detail
from service.cli import options
from service.cli.output import console, print_json
from service.cli.stores import opened_store, store_settings
from service.stores.sessions.base import DEFAULT_TENANT
from service.stores.sessions.key import SessionKey

if TYPE_CHECKING:
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from nsm_core.state.report import StateReport
    from service.backends.base import InferenceBackend
    from service.settings import Settings

COLUMNS = ("where", "use", "untouched", "effective", "key", "value", "moved", "cosine")


def states(
    session_id: Annotated[str, typer.Argument(help="Id of a session.", show_default=False)],
    detail: Annotated[Detail, typer.Option(help="How finely; slot needs --layer.")] = Detail.LAYER,
    layer: Annotated[int | None, typer.Option(min=0, help="Only this layer.", show_default="all")] = None,
    tenant: options.Tenant = DEFAULT_TENANT,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """How far a session's memory slots have moved from their learned start."""
    settings = store_settings(data_dir, store, model=model, device=device)
    answer = asyncio.run(_describe(settings, SessionKey(tenant, session_id), detail, layer))
    if as_json:
        print_json(answer)
    else:
        _print_table(answer)


class _StoredStates:
    """Describes stored states with a loaded model, which runs nothing."""

    def __init__(self, loaded: LoadedModel[SequenceModel], numerics: str) -> None:
        self.model = dataclasses.replace(loaded.info, numerics=numerics)
        self.tokenizer = loaded.tokenizer
        self._served = loaded.model

    async def inspect_state(
        self, state: bytes | None, *, detail: Detail = Detail.LAYER, layer: int | None = None
    ) -> StateReport:
        from nsm_core.state.inspection import inspect_state

        served = self._served
        return inspect_state(served.state_spec, state, served.initial_state(1), detail=detail, layer=layer)


def _source(settings: Settings) -> _StoredStates:
    from nsm_core.architectures import load_model
    from nsm_core.execution.choose import decide_executor
    from service.cli.local_model import with_local_model

    return with_local_model(
        settings,
        load_model,
        lambda loaded: _StoredStates(loaded, decide_executor(loaded, settings.executor)[1]),
    )


async def _describe(settings: Settings, key: SessionKey, detail: Detail, layer: int | None) -> dict[str, Any]:
    from service.state.describe import describe_stored

    async with opened_store(settings) as store:
        stored = await store.load(key)
    if settings.triton_url is None:
        return await describe_stored(_source(settings), stored, detail=detail, layer=layer)
    async with _upstream(settings) as backend:
        return await describe_stored(backend, stored, detail=detail, layer=layer)


@contextlib.asynccontextmanager
async def _upstream(settings: Settings) -> AsyncIterator[InferenceBackend]:
    """The model in Triton servers, which need not be on this machine."""
    from service.server import make_backend

    backend = make_backend(settings)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


def _print_table(answer: dict[str, Any]) -> None:
    from rich.table import Table

    print(f"position {answer['position']}, {answer['state_bytes']} bytes, dtype {answer['dtype'] or '-'}")
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "where" else "right", no_wrap=True)
    for layer in answer["layers"]:
        for row in _rows(layer):
            table.add_row(*row)
    console().print(table)
    if any(layer["kind"] == "keyed" for layer in answer["layers"]):
        print("-: keyed slots have no key of their own and no learned start to compare with")


def _rows(layer: dict[str, Any]) -> list[tuple[str, ...]]:
    name = f"layer {layer['layer']}" + (f".{layer['part']}" if "part" in layer else "")
    if layer["kind"] == "attention":
        return [(name, f"{layer['filled']}/{layer['window']} tokens")]
    rows = [_use_row(name, layer["use"])]
    for head, use in enumerate(layer.get("heads", ())):
        rows.append(_use_row(f"  head {head}", use))
        slots = use.get("slots", ())
        rows += [(f"    slot {slot}", "", "", "", *_figures(figures)) for slot, figures in enumerate(slots)]
    return rows


def _use_row(name: str, use: dict[str, Any]) -> tuple[str, ...]:
    untouched, effective = f"{use['untouched_share']:.0%}", _number(use["effective_slots"])
    return name, f"{use['num_slots']} slots", untouched, effective, *_figures(use["mean"])


def _figures(figures: dict[str, float | None]) -> tuple[str, ...]:
    return tuple(_number(figures[name]) for name in ("key_norm", "value_norm", "moved", "cosine"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
