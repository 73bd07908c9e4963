"""`nsm triton`: a Triton server that runs the model, for development."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from service.cli.output import note

app = typer.Typer(help="Run the model inside a Triton server.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """A group even with one command, so that others may join it."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="For gateways.")] = 8001,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="For curl; a gateway is at 8000.")] = 8003,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="For Prometheus.")] = 8002,
    model: Annotated[Path | None, typer.Option(help="Model directory.", show_default="the bundled model")] = None,
    parameter: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of model_repository/nsm/config.pbtxt; may be repeated.")
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Where scripts/triton-server installed it.", show_default="in the environment"),
    ] = None,
) -> None:
    """Serve the model with Triton until Ctrl-C. For development: production uses the vendor's container."""
    from service.triton_server import TritonServer, default_home, run

    parameters = dict(_split(item) for item in parameter or ())
    if model is not None:
        parameters["model"] = str(model.resolve())
    note(f"gRPC {host}:{grpc_port}, HTTP {host}:{http_port}, metrics {host}:{metrics_port}/metrics")
    server = TritonServer(
        home=home or default_home(), host=host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
    )
    raise typer.Exit(run(server, parameters))


def _split(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise typer.BadParameter(f"must be NAME=VALUE, got {item!r}", param_hint="'--parameter'")
    return name, value
