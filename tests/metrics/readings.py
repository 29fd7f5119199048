"""What an exporter has counted, read with its library and under the same names for both."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from coatcheck.metrics import opentelemetry, prometheus

# The name in Prometheus of each metric of OpenTelemetry.
NAMES = {
    "coatcheck.decisions": "coatcheck_decisions_total",
    "coatcheck.duration": "coatcheck_duration_seconds",
    "coatcheck.store.errors": "coatcheck_store_errors_total",
    "coatcheck.leases.renewed": "coatcheck_renewals_total",
    "coatcheck.leases.lost": "coatcheck_lost_leases_total",
    "coatcheck.in_doubt": "coatcheck_in_doubt_total",
    "coatcheck.in_flight": "coatcheck_in_flight",
    "coatcheck.records.swept": "coatcheck_swept_records_total",
    "coatcheck.recovered": "coatcheck_recovered_total",
    "coatcheck.wait": "coatcheck_wait_seconds",
    "coatcheck.claim": "coatcheck_claim_seconds",
    "coatcheck.complete": "coatcheck_complete_seconds",
    "coatcheck.operations.in_doubt": "coatcheck_operations_in_doubt",
    "coatcheck.last_sweep": "coatcheck_last_sweep_timestamp_seconds",
}


class PrometheusReadings:
    """Reads a registry; a histogram is its number of values and their sum."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.exporter = prometheus.Metrics(self.registry, **options)

    def value(self, name: str, **labels: str) -> Any:
        """The value of the metric *name* with exactly these labels; None: there is none."""
        name = NAMES[name]
        count = self.registry.get_sample_value(f"{name}_count", labels)
        if count is not None:
            return count, self.registry.get_sample_value(f"{name}_sum", labels)
        return self.registry.get_sample_value(name, labels)

    def labels(self) -> set[str]:
        """The labels of all decisions."""
        (decisions,) = [m for m in self.registry.collect() if m.name == "coatcheck_decisions"]
        return {sample.labels["label"] for sample in decisions.samples}


class OpenTelemetryReadings:
    """Reads the exporters in memory of the SDK."""

    def __init__(self, **options: Any) -> None:
        self._reader = InMemoryMetricReader()
        self.spans = InMemorySpanExporter()
        self.tracer_provider = TracerProvider(shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.spans))
        meter_provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.exporter = opentelemetry.Telemetry(self.tracer_provider, meter_provider, **options)

    def value(self, name: str, **labels: str) -> Any:
        """The value of the metric *name* with exactly these labels; None: there is none."""
        wanted = {f"coatcheck.{label}": value for label, value in labels.items()}
        for point in self._points(name):
            if point.attributes == wanted:
                return point.value if hasattr(point, "value") else (point.count, point.sum)
        return None

    def labels(self) -> set[str]:
        """The labels of all decisions."""
        points = self._points("coatcheck.decisions")
        return {point.attributes["coatcheck.label"] for point in points}

    def _points(self, name: str) -> list[Any]:
        found = self._reader.get_metrics_data()
        return [
            point
            for resource in found.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]
