"""The trace that is under way, as gRPC takes it to another server."""

from __future__ import annotations

from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """`traceparent`, and `tracestate` where there is one; None outside of any trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items()) or None
