"""OpenTelemetry spans, sent by OTLP. OpenTelemetry's own variables say where to, how many, and under which name.

A span never holds text that a client wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer

from nsm_core.distribution import DISTRIBUTION, version_of
from nsm_core.errors import ConfigError
from service.addresses import is_loopback_url
from service.settings import trace_receiver

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

SERVICE = "nsm"  # unless OTEL_SERVICE_NAME is set
EXPORT_S = 3.0  # for a batch, retries included: an unreachable receiver must not delay a stop


class Tracing:
    """A provider of its own, apart from any other of the process: the middleware decides which requests are traced."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor`: takes the spans. Raises ConfigError without the extra `tracing`."""
        self._provider = _provider()
        self._provider.add_span_processor(processor)
        self.tracer: Tracer = self._provider.get_tracer(DISTRIBUTION, version_of())

    def shutdown(self) -> None:
        """Sends the rest. Blocks for seconds without a receiver. Idempotent."""
        self._provider.shutdown()


def make_tracing() -> Tracing:
    """To the OTLP receiver (HTTP, protobuf) of OTEL_EXPORTER_OTLP_ENDPOINT. Raises ConfigError without the extra."""
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise _without_extra() from error
    session = requests.Session()
    session.trust_env = not is_loopback_url(trace_receiver())  # HTTP_PROXY is for other machines
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(timeout=EXPORT_S, session=session)))


def _provider() -> TracerProvider:
    """OTEL_TRACES_SAMPLER decides which traces that begin here are kept; those of a client keep its decision."""
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
    except ModuleNotFoundError as error:
        raise _without_extra() from error
    ours = Resource.create({SERVICE_NAME: SERVICE, SERVICE_VERSION: version_of()})
    return TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)


def _without_extra() -> ConfigError:
    return ConfigError("traces to OTEL_EXPORTER_OTLP_ENDPOINT need the extra: pip install 'nsm-serve[tracing]'")
