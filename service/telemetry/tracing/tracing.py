"""Spans by OpenTelemetry, sent with OTLP. Off unless an endpoint is named; never a text that somebody wrote."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer

from nsm_core.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

DISTRIBUTION = "nsm-serve"
TRACES_PATH = "/v1/traces"
EXPORT_S = 3.0  # for a batch, tries included: a receiver that is away must not hold up a stop


class Tracing:
    """A provider of its own, apart from whatever the process may have: what is traced is decided here."""

    def __init__(self, processor: SpanProcessor, *, sample: float = 1.0, service_name: str = "nsm") -> None:
        """`processor`: where spans go. `sample`: the share of traces that begin here; those that a client began follow
        its decision. Raises ConfigError without the extra `tracing`.
        """
        self._provider = _provider(sample, service_name)
        self._provider.add_span_processor(processor)
        self.tracer: Tracer = self._provider.get_tracer(DISTRIBUTION, importlib.metadata.version(DISTRIBUTION))

    def shutdown(self) -> None:
        """Sends what is left. Blocks for seconds where nobody takes it. Idempotent."""
        self._provider.shutdown()


def make_tracing(endpoint: str, *, sample: float, service_name: str) -> Tracing:
    """To the OTLP receiver (HTTP, protobuf) at `endpoint`, a base URL. Raises ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise _without_extra() from error
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + TRACES_PATH, timeout=EXPORT_S)
    return Tracing(BatchSpanProcessor(exporter), sample=sample, service_name=service_name)


def _provider(sample: float, service_name: str) -> TracerProvider:
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as error:
        raise _without_extra() from error
    version = importlib.metadata.version(DISTRIBUTION)
    resource = Resource.create({SERVICE_NAME: service_name, SERVICE_VERSION: version})
    sampler = ParentBased(TraceIdRatioBased(sample))
    return TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)


def _without_extra() -> ConfigError:
    return ConfigError("NSM_OTLP_ENDPOINT needs the extra: pip install 'nsm-serve[tracing]'")
