"""`nsm serve`: every setting as an option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _setting(text: str, default: str) -> Any:
    """The default is shown, not set: an option that is absent leaves its variable in force."""
    return typer.Option(help=text, show_default=default)


TOKEN_BUDGET = (
    "Most tokens in one step, at least as many as slots. All streams wait for a step: a prompt of 24K tokens read in "
    "one froze another stream for 6.6 s, in steps of 256 for 0.14 s."
)


def serve(
    ctx: typer.Context,
    host: Annotated[str | None, _setting("Address to listen on.", "127.0.0.1")] = None,
    port: Annotated[int | None, _setting("0 takes any free port.", "8000")] = None,
    data_dir: Annotated[Path | None, _setting("Where sessions are kept.", "the user's data directory")] = None,
    store: Annotated[str | None, _setting("sqlite, sqlite:///PATH, memory or a Redis URL.", "sqlite")] = None,
    model: Annotated[Path | None, _setting("Model directory.", "the bundled model")] = None,
    backend: Annotated[str | None, _setting("Where the model runs: local or triton.", "local")] = None,
    triton_url: Annotated[str | None, _setting("host:port of Triton servers, with commas.", "none")] = None,
    triton_wait_s: Annotated[float | None, _setting("For a first one to be ready at the start.", "60")] = None,
    triton_tls_ca: Annotated[Path | None, _setting("PEM file of their certificates' CA.", "no TLS")] = None,
    triton_tls_cert: Annotated[Path | None, _setting("PEM file of this side's certificate.", "none")] = None,
    triton_tls_key: Annotated[Path | None, _setting("PEM file of its key.", "none")] = None,
    triton_tls_name: Annotated[str | None, _setting("The name in their certificates.", "their host's")] = None,
    served_model_name: Annotated[str | None, _setting("The name that clients use.", "the model's own")] = None,
    api_keys_file: Annotated[Path | None, _setting("TOML file of API keys and tenants.", "no keys")] = None,
    allow_anonymous: Annotated[bool | None, _setting("Without keys, serve other hosts too.", "no")] = None,
    executor: Annotated[str | None, _setting("How the model is computed: auto, eager or native.", "auto")] = None,
    num_threads: Annotated[int | None, _setting("CPU threads of the model.", "torch decides")] = None,
    max_slots: Annotated[int | None, _setting("Requests that run at once.", "16")] = None,
    token_budget: Annotated[int | None, _setting(TOKEN_BUDGET, "256")] = None,
    queue_limit: Annotated[int | None, _setting("Requests that may wait.", "256")] = None,
    speculation: Annotated[str | None, _setting("Drafts of tokens at low load: lookup or off.", "lookup")] = None,
    max_body_bytes: Annotated[int | None, _setting("Largest request body.", "8388608")] = None,
    max_prompt_tokens: Annotated[int | None, _setting("Longest prompt.", "131072")] = None,
    max_tokens_limit: Annotated[int | None, _setting("Most new tokens a request may ask for.", "32768")] = None,
    request_timeout_s: Annotated[float | None, _setting("Deadline of a request that names none.", "600")] = None,
    receive_timeout_s: Annotated[float | None, _setting("For a head; between pieces of a body.", "30")] = None,
    detached_s: Annotated[float | None, _setting("A session's turn may go on without its client.", "300")] = None,
    lease_s: Annotated[float | None, _setting("A session stays busy after its server is lost.", "10")] = None,
    turn_ttl_s: Annotated[float | None, _setting("The result of a turn can be had again so long.", "86400")] = None,
    turn_records: Annotated[int | None, _setting("Newest turns of a session whose results are kept.", "16")] = None,
    kept_snapshots: Annotated[int | None, _setting("Older states of a session, for rewinds and forks.", "2")] = None,
    state_dtype: Annotated[str | None, _setting("Numbers of stored states: fp32, fp16 or int8.", "fp32")] = None,
    grace_s: Annotated[float | None, _setting("Requests may go on when the server stops.", "20")] = None,
    prefix_cache: Annotated[bool | None, _setting("Stateless calls start from stored states.", "yes")] = None,
    prefix_cache_mb: Annotated[int | None, _setting("MiB that these states take in all.", "512")] = None,
    prefix_cache_tenant_mb: Annotated[int | None, _setting("MiB of each tenant.", "as much as of all")] = None,
    prefix_cache_min_tokens: Annotated[int | None, _setting("Tokens that a new state must spare.", "128")] = None,
    prefix_cache_ttl_s: Annotated[float | None, _setting("Kept so long after their last use.", "3600")] = None,
    playground: Annotated[bool | None, _setting("The page at /.", "yes")] = None,
    energy: Annotated[bool | None, _setting("Count joules, and charge them to requests.", "yes")] = None,
    energy_core_watts: Annotated[float | None, _setting("Of a busy core, where nothing measures it.", "10")] = None,
    log_level: Annotated[str | None, _setting("debug, info, warning or error.", "info")] = None,
    log_format: Annotated[str | None, _setting("text, or json: an object a line.", "text")] = None,
    log_prompts: Annotated[bool | None, _setting("Write prompts to the log.", "no")] = None,
    otlp_endpoint: Annotated[str | None, _setting("Base URL of an OTLP receiver for traces.", "no traces")] = None,
    trace_sample: Annotated[float | None, _setting("Share of the traces that begin here.", "1")] = None,
    trace_service_name: Annotated[str | None, _setting("Of this server, in traces.", "nsm")] = None,
) -> None:
    """Serve the model over HTTP until Ctrl-C.

    Every option is also a variable, --max-slots is NSM_MAX_SLOTS; the option wins. Times are in seconds.
    """
    from service.settings import load_settings

    settings = load_settings(**ctx.params)  # the parameters above are the settings, name by name
    from service.server import run  # loads much, so it comes after bad settings were refused

    run(settings)
