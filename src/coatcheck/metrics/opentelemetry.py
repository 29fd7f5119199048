"""Metrics and spans of engines for OpenTelemetry.

An engine reports a request when it has ended. So its span is made then, with the start in the past,
as a child of the span that is current where the request runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from coatcheck.errors import MissingExtra
from coatcheck.metrics.exporter import BUCKETS_S, STORE_ERROR, Exporter, Instrumented, Instruments
from coatcheck.metrics.labels import LABELS_MAX, Labels
from coatcheck.telemetry import Decision

try:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter
    from opentelemetry.trace import Status, StatusCode, TracerProvider, get_tracer
except ImportError as error:
    raise MissingExtra("otel", "opentelemetry-api") from error

_SCOPE = "coatcheck"
# The label of a route, with or without the name of its service: "POST /orders @shop".
_ROUTE = re.compile(r"([A-Z]+) (/.*?)(?: @\S+)?")


class Telemetry(Exporter):
    """
    The metrics and spans of all engines of a process.

    `Telemetry().instrument(engine)`, or `AsyncEngine(url, observers=[telemetry.observe],
    listeners=[telemetry.listen])`.

    Args:
        tracer_provider: makes the spans; by default the global one.
        meter_provider: makes the metrics; by default the global one.
        labels_max: how many different values the attribute "coatcheck.label" may have. All others
            are "other".
        label: returns the value of "coatcheck.label" for the label of a decision
            ("POST /orders/17"). By default, segments that look like an id become `{id}`.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        labels_max: int = LABELS_MAX,
        label: Callable[[str], str] | None = None,
    ) -> None:
        labels = Labels(labels_max, label)
        self._tracer = get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter = get_meter(_SCOPE, meter_provider=meter_provider)
        self._decisions = meter.create_counter(
            "coatcheck.decisions",
            unit="{decision}",
            description="Guarded requests and calls by route, outcome and problem code.",
        )
        self._duration = meter.create_histogram(
            "coatcheck.duration",
            unit="s",
            description="How long guarded requests and calls took, by outcome.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        self._store_errors = meter.create_counter(
            "coatcheck.store.errors",
            unit="{decision}",
            description="Requests and calls that were refused or ran unguarded: "
            "the store was unavailable.",
        )
        self._store_errors.add(0)
        super().__init__(labels, _instruments(meter))

    def observe(self, decision: Decision) -> None:
        """Count *decision* and make its span: an observer of engines."""
        outcome, code = decision.outcome, decision.code
        label = self._labels.of(decision.label)
        which = {"coatcheck.label": label, "coatcheck.outcome": outcome, "coatcheck.code": code}
        self._decisions.add(1, which)
        self._duration.record(decision.duration_ms / 1_000, {"coatcheck.outcome": outcome})
        if code == STORE_ERROR:
            self._store_errors.add(1)
        self._make_span(decision, label)

    def _make_span(self, decision: Decision, label: str) -> None:
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            f"coatcheck {label}", start_time=end_ns - decision.duration_ms * 1_000_000
        )
        if span.is_recording():
            span.set_attributes(attributes_of(decision, label))
            if decision.outcome == "failed" or decision.code == STORE_ERROR:
                span.set_status(Status(StatusCode.ERROR, decision.code or None))
        span.end(end_ns)


def instrument(
    *engines: Instrumented,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Telemetry:
    """Report what *engines* do to these providers; a middleware stands for its engine."""
    return Telemetry(tracer_provider, meter_provider).instrument(*engines)


def attributes_of(decision: Decision, label: str) -> dict[str, str | int]:
    """The attributes of a span: none of them is a key, a body or a path with ids."""
    found: dict[str, str | int] = {
        "coatcheck.label": label,
        "coatcheck.outcome": decision.outcome,
        "coatcheck.reference": decision.reference,
        "coatcheck.scope": decision.scope,
        "coatcheck.attempt": decision.attempt,
    }
    route = _ROUTE.fullmatch(label)
    if route is not None:
        found["http.request.method"], found["http.route"] = route.groups()
    if decision.code:
        found["coatcheck.code"] = decision.code
    if decision.code == STORE_ERROR:
        found["error.type"] = decision.code
    return found


def _instruments(meter: Meter) -> Instruments:
    counted = {
        "coatcheck.leases.renewed": "Renewed leases.",
        "coatcheck.leases.lost": "Attempts that another one took over.",
        "coatcheck.in_doubt": "Operations that became in doubt.",
        "coatcheck.records.swept": "Deleted expired records.",
    }
    counters = [meter.create_counter(name, description=words) for name, words in counted.items()]
    for counter in counters:
        counter.add(0)  # so that a rule sees the step from 0 to 1
    renewed, lost, in_doubt, swept = (counter.add for counter in counters)
    recovered = meter.create_counter(
        "coatcheck.recovered",
        description="Abandoned operations that the background settled, by outcome.",
    )
    last_sweep = _LastSweep()
    meter.create_observable_gauge(
        "coatcheck.last_sweep",
        callbacks=[last_sweep.observe],
        unit="s",
        description="When the last sweep ended; the start of the process if there was none.",
    )
    return Instruments(
        in_flight=meter.create_up_down_counter(
            "coatcheck.in_flight", description="Attempts that run now."
        ).add,
        waited_s=meter.create_histogram(
            "coatcheck.wait",
            unit="s",
            description="How long duplicates waited for the attempt of another request.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        ).record,
        renewed=renewed,
        lost=lost,
        in_doubt=in_doubt,
        swept=swept,
        last_sweep_s=last_sweep.set,
        recovered=lambda outcome: recovered.add(1, {"coatcheck.outcome": outcome}),
    )


class _LastSweep:
    """Its value is asked for: older SDKs export a gauge only once after it was set."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def set(self, at_s: float) -> None:
        self._at_s = at_s

    def observe(self, _options: CallbackOptions) -> Sequence[Observation]:
        return [Observation(self._at_s)]
