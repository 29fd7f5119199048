"""What telemetry is measured with, by the name of its row."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from prometheus_client import CollectorRegistry

from coatcheck import AsyncEngine
from coatcheck.metrics import opentelemetry, prometheus


def _without(_engine: AsyncEngine) -> None:
    pass


def _nothing(engine: AsyncEngine) -> None:
    telemetry = engine.attempts.telemetry
    telemetry.observers = telemetry.listeners = (lambda _: None,)


def _prometheus(engine: AsyncEngine) -> None:
    prometheus.instrument(engine, registry=CollectorRegistry())


def _otel(engine: AsyncEngine) -> None:
    # One of a hundred traces is kept, as services with many requests do.
    opentelemetry.instrument(
        engine,
        tracer_provider=TracerProvider(TraceIdRatioBased(0.01), shutdown_on_exit=False),
        meter_provider=MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False),
    )


EXPORTERS: dict[str, Callable[[AsyncEngine], object]] = {
    "without": _without,
    "an observer and a listener that do nothing": _nothing,
    "Prometheus": _prometheus,
    "OpenTelemetry": _otel,
}
