"""`nsm bench`: measures this engine or any server, and compares two builds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options
from service.cli.lab import lab_command
from service.cli.output import console, note, print_json
from service.cli.progress import progress

if TYPE_CHECKING:
    from nsm_core.loaded_model import LoadedModel, SequenceModel
    from nsm_lab.bench.gate import Verdict
    from nsm_lab.bench.result import BenchResult
    from service.backends.local import LocalBackend
    from service.settings import Settings

LOST = 1  # exit status of a gate that does not open

DRIFT = (
    "Two runs one after the other differ by the machine's drift too; to judge a change use `nsm bench gate`, "
    "which takes turns."
)

app = typer.Typer(help="Measure an engine, a server, or two builds against each other.", no_args_is_help=True)

Sizes = Annotated[str, typer.Option(help="Requests at once: numbers with commas between them.", metavar="N,N,…")]
Lengths = Annotated[
    str, typer.Option(help="Of prompts and sessions: numbers with commas between them.", metavar="N,N,…")
]
NumTokens = Annotated[int, typer.Option("--tokens", min=1, help="New tokens of each request.")]
Repeats = Annotated[int, typer.Option(min=1, help="Times that everything is measured, after a warm-up.")]
Output = Annotated[Path | None, typer.Option(show_default=False, help="File to write the result to, as JSON.")]
Plots = Annotated[Path | None, typer.Option(show_default=False, help="Directory to write pictures (SVG) to.")]
Profile = Annotated[
    Path | None, typer.Option(show_default=False, help="File for a trace (Chrome's JSON) of one more repeat.")
]
Threads = Annotated[
    int | None, typer.Option("--num-threads", min=1, help="CPU threads of the model.", show_default="NSM_NUM_THREADS")
]


@app.command()
@lab_command()
def engine(
    model: options.Model = None,
    device: options.Device = None,
    executor: Annotated[
        str | None, typer.Option(help="How the model is computed.", show_default="NSM_EXECUTOR")
    ] = None,
    num_threads: Threads = None,
    batches: Sizes = "1,8,32",
    lengths: Lengths = "512,2048,8192",
    num_tokens: NumTokens = 32,
    repeats: Repeats = 5,
    profile: Profile = None,
    output: Output = None,
    plots: Plots = None,
    as_json: options.AsJson = False,
) -> None:
    """The engine in this process: decoding, prompts, resumed sessions, memory; by the clock and by CPU seconds."""
    from service.settings import load_settings

    wanted = _numbers(batches, "--batches")
    slots = {"max_slots": max(wanted), "token_budget": max(256, *wanted)}
    settings = load_settings(model=model, device=device, executor=executor, num_threads=num_threads, **slots)
    from nsm_lab.bench.engine_bench import bench_engine
    from nsm_lab.bench.engine_load import EngineWork

    make_engine = _engine_factory(settings)
    configured = {name: getattr(settings, name) for name in ("device", "executor", "max_slots", "token_budget")}
    work = EngineWork(batches=wanted, num_tokens=num_tokens, lengths=_numbers(lengths, "--lengths"), repeats=repeats)
    try:
        with progress("engine", repeats) as show:
            result = asyncio.run(
                bench_engine(make_engine, settings.model, work, options=configured, profile=profile, on_progress=show)
            )
    except MemoryError as error:
        raise typer.BadParameter(str(error), param_hint="'--batches'") from error
    _show(result, output=output, plots=plots, as_json=as_json)


@app.command()
@lab_command()
def components(
    model: options.Model = None,
    num_threads: Threads = None,
    batches: Sizes = "1,8",
    lengths: Lengths = "512",
    repeats: Repeats = 5,
    profile: Profile = None,
    output: Output = None,
    as_json: options.AsJson = False,
) -> None:
    """The parts of a model, as it is written: CPU time of a decoding step and of a prompt by router, states, head, …"""
    from service.settings import load_settings

    work_batches, work_lengths = _numbers(batches, "--batches"), _numbers(lengths, "--lengths")
    settings = load_settings(model=model, num_threads=num_threads)
    from nsm_lab.bench.components import ComponentWork, bench_components

    work = ComponentWork(batches=work_batches, lengths=work_lengths, repeats=repeats)
    with progress("components", repeats) as show:
        result = bench_components(
            settings.model, work, num_threads=settings.num_threads, profile=profile, on_progress=show
        )
    _show(result, output=output, plots=None, as_json=as_json)


@app.command()
@lab_command()
def http(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server, this one or any other.")],
    model: Annotated[str | None, typer.Option(help="As requests name it.", show_default="the server's choice")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with an API key, where the server wants one.")] = None,
    pid: Annotated[int | None, typer.Option(help="Of the server, for its CPU seconds and memory.")] = None,
    clients: Sizes = "1,8,32",
    lengths: Lengths = "512,2048",
    num_tokens: NumTokens = 64,
    repeats: Repeats = 5,
    output: Output = None,
    plots: Plots = None,
    as_json: options.AsJson = False,
) -> None:
    """A server over HTTP: streams of many clients, long prompts, growing conversations, stored sessions."""
    from nsm_lab.bench.http_bench import bench_http
    from nsm_lab.bench.http_client import Endpoint
    from nsm_lab.bench.http_load import HttpWork

    key = None if key_file is None else key_file.read_text("utf-8").strip()
    work = HttpWork(
        concurrencies=_numbers(clients, "--clients"),
        num_tokens=num_tokens,
        lengths=_numbers(lengths, "--lengths"),
        repeats=repeats,
        model=model,
    )
    with progress("http", repeats) as show:
        result = asyncio.run(bench_http(Endpoint(url, api_key=key), work, pid=pid, on_progress=show))
    _show(result, output=output, plots=plots, as_json=as_json)


@app.command()
@lab_command()
def compare(
    first: Annotated[Path, typer.Argument(help="A result that --output wrote.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="Another.", show_default=False)],
    plots: Plots = None,
    as_json: options.AsJson = False,
) -> None:
    """The second result relative to the first, with an interval from the spread of both."""
    import dataclasses

    from nsm_lab.bench import compare as comparing
    from nsm_lab.bench.result import read_result

    one, other = read_result(first), read_result(second)
    rows = comparing.compare(one, other)
    for line in comparing.differences(one, other):
        note(line)
    if plots is not None:
        from nsm_lab.bench.pictures import draw

        draw({first.stem: one, second.stem: other}, plots)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    _table(
        ("measure", "unit", first.name, second.name, "ratio", "from", "to", ""),
        [
            (row.name, row.unit, _short(row.first), _short(row.second), _times(row.ratio), _times(row.low),
             _times(row.high), "" if not row.is_clear else "better" if row.ratio > 1 else "worse")
            for row in rows
        ],
    )  # fmt: skip
    print(DRIFT)


@app.command()
@lab_command()
def gate(
    base: Annotated[Path, typer.Option(help="Checkout to measure this build against.", show_default=False)],
    model: options.Model = None,
    num_threads: Threads = 1,
    batches: Sizes = "1,8",
    lengths: Lengths = "512",
    num_tokens: NumTokens = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Times that both builds are run, in turns.")] = 7,
    tolerance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Loss that is let through, as a share.")] = 0.05,
    wall: Annotated[
        bool, typer.Option("--wall", help="Go by the clock: for a machine that does nothing else.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Refuse a build that is slower than the base beyond doubt: exit status 1.

    Both are run in turns on this machine; CPU seconds count, so that a busy neighbour does not decide.
    """
    import dataclasses

    from nsm_lab.bench import builds
    from nsm_lab.bench import gate as gating

    num_measures = len(_numbers(batches, "--batches")) + 2 * len(_numbers(lengths, "--lengths"))
    if rounds < gating.rounds_needed(num_measures):
        raise typer.BadParameter(
            f"must be at least {gating.rounds_needed(num_measures)} to detect a loss in one of {num_measures} measures "
            f"from chance, got {rounds}",
            param_hint="'--rounds'",
        )
    arguments = ["--batches", batches, "--lengths", lengths, "--tokens", str(num_tokens), "--repeats", "1"]
    arguments += ["--num-threads", str(num_threads)] if num_threads is not None else []
    arguments += ["--model", str(model.absolute() if model.exists() else model)] if model is not None else []
    with progress("rounds", rounds) as show:
        taken = builds.in_turns(
            builds.Build.at("base", base), builds.this_build(), arguments, rounds=rounds, on_progress=show
        )
    wanted = gating.WALL_MEASURES if wall else gating.CPU_MEASURES
    verdicts = gating.decide(*taken, wanted=wanted, tolerance=tolerance)
    if as_json:
        print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    else:
        _show_verdicts(verdicts)
    if any(verdict.is_lost for verdict in verdicts):
        raise typer.Exit(LOST)


def _engine_factory(settings: Settings) -> Callable[[], LocalBackend]:
    """Loads the model of the settings, on a model's threads. Without drafts: after random prompts greedy texts repeat
    themselves now and then, which must not decide how fast a build is.
    """
    import dataclasses

    from nsm_core.execution.devices import engine_config
    from nsm_lab.baselines.register import register_baselines
    from service.backends.local import LocalBackend
    from service.local_model import with_model

    register_baselines()

    def make(loaded: LoadedModel[SequenceModel]) -> LocalBackend:
        config = dataclasses.replace(engine_config(settings.engine_limits(), loaded), speculation="off")
        return LocalBackend(loaded, config, executor=settings.executor)

    return lambda: with_model(settings, make)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    """Ascending, each once. Raises a usage error that names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"must be numbers above 0 with commas between, got {text!r}", param_hint=f"'{option}'")
    return tuple(sorted({int(part) for part in parts}))


def _show(result: BenchResult, *, output: Path | None, plots: Path | None, as_json: bool) -> None:
    if output is not None:
        output.write_text(result.to_json() + "\n", "utf-8")
    if plots is not None:
        from nsm_lab.bench.pictures import draw

        draw({result.kind: result}, plots)
    if as_json:
        print(result.to_json())
        return
    _table(
        ("measure", "unit", "median", "from", "to"),
        [
            (measure.name, measure.unit, _short(measure.median), *map(_short, measure.quartiles))
            for measure in result.measures
        ],
    )


def _show_verdicts(verdicts: Sequence[Verdict]) -> None:
    _table(
        ("measure", "unit", "base", "new", "loss", "at least", ""),
        [
            (row.name, row.unit, _short(row.base), _short(row.new), _times(row.loss), _times(row.bound),
             "LOST" if row.is_lost else "")
            for row in verdicts
        ],
    )  # fmt: skip


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _times(value: float) -> str:
    return f"{value:.3f}"
