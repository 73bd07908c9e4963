"""`nsm triton`: a Triton server that runs the model, for development."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from service.cli.output import note

app = typer.Typer(help="Run the model inside a Triton server.", no_args_is_help=True)


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
    instances: Annotated[int, typer.Option(min=1, max=16, help="Processes that run the model, on each device.")] = 1,
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of GPUs, with commas.", show_default="all, or the CPU")
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Where scripts/triton-server installed it.", show_default="in the environment"),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file: gRPC over TLS with this certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="PEM file: clients need a certificate of this CA.")] = None,
) -> None:
    """Serve the model with Triton until Ctrl-C. For development: production uses the vendor's container."""
    from service.backends.triton.dev_server import InstanceGroup, ServerTls, TritonServer, default_home, run

    parameters = dict(_split(item) for item in parameter or ())
    if model is not None:
        parameters["model"] = str(model.resolve())
    server = TritonServer(
        home=home or default_home(),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        tls=ServerTls.of(cert=tls_cert, key=tls_key, client_ca=tls_client_ca),
    )
    note(f"gRPC {host}:{grpc_port}, HTTP {server.http_host}:{http_port}, metrics {host}:{metrics_port}/metrics")
    raise typer.Exit(run(server, parameters, instances=InstanceGroup(instances, _numbers(gpus))))


@app.command()
def probe(
    kind: Annotated[Literal["startup", "readiness", "liveness"], typer.Argument(help="Kind of probe.")],
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC.")] = "localhost:8001",
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds for each of three questions at most.")
    ] = 1.5,
    tls_ca: Annotated[Path | None, typer.Option(help="PEM file of the CA of its certificate.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of this side's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    tls_name: Annotated[str | None, typer.Option(help="The name in its certificate.", show_default="the host")] = None,
) -> None:
    """Check a Triton server's worker; the exit status is the result. For the probes of a container.

    liveness: the engine's loop runs. startup, readiness: the model makes a step, now.
    """
    from service.backends.triton.probe import ask_worker
    from service.backends.triton.tls import TritonTls

    if tls_ca is None and (tls_cert or tls_key or tls_name):
        raise typer.BadParameter("needed with the other --tls options", param_hint="'--tls-ca'")
    tls = None if tls_ca is None else TritonTls.read(ca=tls_ca, cert=tls_cert, key=tls_key, server_name=tls_name)
    note(asyncio.run(ask_worker(kind, url, tls=tls, timeout_s=timeout_s)))


def _numbers(gpus: str | None) -> tuple[int, ...]:
    numbers = () if gpus is None else tuple(gpus.split(","))
    if not all(number.isascii() and number.isdigit() for number in numbers) or len(set(numbers)) < len(numbers):
        message = f"must be different numbers with commas, as in 0,1, got {gpus!r}"
        raise typer.BadParameter(message, param_hint="'--gpus'")
    return tuple(map(int, numbers))


def _split(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not equals:
        raise typer.BadParameter(f"must be NAME=VALUE, got {item!r}", param_hint="'--parameter'")
    return name, value
