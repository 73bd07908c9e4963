"""`nsm tune`: a start state that is trained on examples becomes a named state."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.stores import opened_store, target_settings
from service.stores.sessions.base import DEFAULT_TENANT

if TYPE_CHECKING:
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from nsm_core.tuning.config import TuneConfig
    from nsm_core.tuning.run import TunedState
    from nsm_core.tuning.tuner import Report
    from service.settings import Settings
    from service.transfer.session_file import SessionFile


def tune(
    examples: Annotated[
        Path, typer.Argument(help="JSON lines: prompt and completion, or messages.", show_default=False)
    ],
    name: Annotated[str, typer.Option(help="Of the state: 1 to 64 of A-Z a-z 0-9 _ and -.", show_default=False)],
    valid: Annotated[
        Path | None, typer.Option(help="Examples to hold out.", show_default="a tenth of the others")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the examples.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a step.")] = 8,
    rate: Annotated[float, typer.Option(help="Step size of Adam.")] = 0.1,
    patience: Annotated[int, typer.Option(min=1, help="Stop after so many held-out losses without a better one.")] = 5,
    seed: Annotated[int, typer.Option(help="Order of the examples, and which are held out.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest example.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in memory at once; bounds the memory.")] = 2048,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File to continue from after an interruption.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the state to this file, not to the store.", show_default=False)
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="A state of all tenants.")] = False,
    tenant: options.Tenant = DEFAULT_TENANT,
    model: options.Model = None,
    device: options.Device = None,
    num_threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads.", show_default="NSM_NUM_THREADS, or a quarter of the cores"),
    ] = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Train a start state on examples; the model stays as it is. The state gets the next version of a name."""
    from nsm_core.tuning.config import TuneConfig
    from service.schemas.states import check_state_name
    from service.stores.states.base import PUBLISHED

    config = TuneConfig(
        num_epochs=epochs,
        batch_size=batch,
        rate=rate,
        seed=seed,
        patience=patience,
        max_tokens_at_once=batch_tokens,
    )
    settings = target_settings(data_dir, store, model=model, device=device, num_threads=num_threads)
    owner = PUBLISHED if published else tenant
    check_state_name(name)
    if out is None:
        asyncio.run(_require_free(settings, owner, name))
    raw, held_out = examples.read_bytes(), None if valid is None else valid.read_bytes()
    file, made = _train(settings, config, raw, held_out, max_tokens, checkpoint, owner, name)
    found = out.name if out is not None else asyncio.run(_add(settings, owner, name, file))
    if out is not None:
        _write(settings, out, file)
    report = made.report
    losses = f"held-out loss {report.start_loss:.4f} before, {report.best_loss:.4f} at step {report.best_step}"
    print(f"made {found}: {losses}")


def _train(
    settings: Settings,
    config: TuneConfig,
    raw: bytes,
    held_out: bytes | None,
    max_tokens: int,
    checkpoint: Path | None,
    owner: str,
    name: str,
) -> tuple[SessionFile, TunedState]:
    import torch

    from nsm_core.architectures import load_model
    from nsm_core.chat_template import get_template
    from nsm_core.state.quantize import StateFormat
    from nsm_core.tuning.examples import ExampleLimits
    from nsm_core.tuning.run import TuneData, read_data, run_id_of, tune
    from service.cli.local_model import with_local_model
    from service.named_states.tuned import tuned_file
    from service.tuning.process import tuning_threads

    torch.set_num_threads(settings.num_threads or tuning_threads(None))

    def run(loaded: LoadedModel[SequenceModel]) -> tuple[SessionFile, TunedState]:
        template = get_template(settings.chat_template or loaded.chat_template)
        data = TuneData(examples=raw, held_out=held_out, template=template, limits=ExampleLimits(max_tokens=max_tokens))
        train, rest = read_data(data, loaded, config.seed)
        _say(f"{len(train)} examples, {len(rest)} held out, {config.num_steps(len(train))} steps on {loaded.device}")
        run_id = run_id_of(loaded.fingerprint, config, data)
        made = tune(loaded, config, train, rest, on_report=_show, checkpoint=checkpoint, run_id=run_id)
        file = tuned_file(
            made.state,
            model=loaded.info,
            tokenizer_fingerprint=loaded.tokenizer.fingerprint,
            tenant=owner,
            name=name,
            state_format=StateFormat(settings.state_dtype),
        )
        return file, made

    return with_local_model(settings, load_model, run)


def _show(report: Report) -> None:
    training = "" if report.train_loss is None else f"training {report.train_loss:.4f}, "
    best = " (the best so far)" if report.best_step == report.step else ""
    _say(f"step {report.step} of {report.num_steps}: {training}held out {report.held_out_loss:.4f}{best}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _require_free(settings: Settings, owner: str, name: str) -> None:
    """Before minutes are spent. Raises VersionConflict for a name that is published for all tenants."""
    from service.stores.states.base import PUBLISHED, name_is_published
    from service.stores.states.factory import states_beside

    async with opened_store(settings) as sessions:
        states = states_beside(sessions)
        is_own = owner == PUBLISHED or await states.get(tenant=owner, name=name) is not None
        if not is_own and await states.get(tenant=PUBLISHED, name=name) is not None:
            raise name_is_published(name)


async def _add(settings: Settings, owner: str, name: str, file: SessionFile) -> str:
    from service.named_states.library import new_state
    from service.named_states.tuned import SOURCE
    from service.stores.states.factory import states_beside

    async with opened_store(settings) as sessions:
        new = new_state(owner, name, file, source=SOURCE, text=None, metadata={})
        return (await states_beside(sessions).add(tenant=owner, name=name, state=new)).reference


def _write(settings: Settings, out: Path, file: SessionFile) -> None:
    from service.named_states.signature import StateSeal
    from service.transfer.session_file import encode_file

    out.write_bytes(StateSeal.from_file(settings.state_key_file).seal(encode_file(file)))
