"""Metrics and spans of engines for OpenTelemetry.

An engine reports a request when it has ended. So its span is made then, with the start in the past,
as a child of the span that is current where the request runs. The span of an execution is made
before its answer is stored, because its trace context is stored with the answer: the span of a
replay has a link to it.

The SDK takes several microseconds for each change of an instrument. So what can be counted here is
counted here, and the SDK asks for it when it exports.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Self, get_args

from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import ClaimRequest
from coatcheck.errors import MissingExtra
from coatcheck.metrics.exporter import (
    BUCKETS_S,
    IN_DOUBT_NOW,
    LAST_SWEEP,
    STORE_ERROR,
    TIMED,
    Exporter,
    Instrumented,
    Instruments,
    telemetry_of,
)
from coatcheck.metrics.labels import LABELS_MAX, Labels
from coatcheck.telemetry import Decision, DecisionOutcome

try:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation, get_meter
    from opentelemetry.trace import (
        Link,
        Span,
        Status,
        StatusCode,
        TracerProvider,
        format_span_id,
        format_trace_id,
        get_current_span,
        get_tracer,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise MissingExtra("otel", "opentelemetry-api") from error

_SCOPE = "coatcheck"
_BY_OUTCOME = {outcome: {"coatcheck.outcome": outcome} for outcome in get_args(DecisionOutcome)}
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
        self._decisions = _Decisions()
        meter.create_observable_counter(
            "coatcheck.decisions",
            callbacks=[self._decisions.observe],
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
        meter.create_observable_up_down_counter(
            "coatcheck.in_flight",
            callbacks=[lambda _options: [Observation(len(self._running))]],
            description="Attempts that run now.",
        )
        super().__init__(labels, _instruments(meter))

    def instrument(self, *engines: Instrumented) -> Self:
        """Count what these engines do from now on, and store trace contexts with their answers."""
        super().instrument(*engines)
        for engine in engines:
            telemetry_of(engine).tracing = self.trace
        return self

    def trace(self, request: ClaimRequest, now_ms: int) -> str:
        """Begin the span of an execution; its trace context, if the trace is sampled."""
        label = self._labels.of(request.label)
        start_ns = time.time_ns() - (now_ms - request.now_ms) * 1_000_000
        span = self._tracer.start_span(f"coatcheck {label}", start_time=start_ns)
        _begun.set(_Begun(self, reference_of(request.id), span))
        context = span.get_span_context()
        if not context.is_valid or not context.trace_flags.sampled:
            return ""  # a link would lead to nothing
        ids = format_trace_id(context.trace_id), format_span_id(context.span_id)
        return f"00-{'-'.join(ids)}-{context.trace_flags:02x}"

    def observe(self, decision: Decision) -> None:
        """Count *decision* and make its span: an observer of engines."""
        outcome, code = decision.outcome, decision.code
        label = self._labels.of(decision.label)
        self._decisions.add((label, outcome, code))
        self._duration.record(decision.duration_ms / 1_000, _BY_OUTCOME[outcome])
        if code == STORE_ERROR:
            self._store_errors.add(1)
        end_ns = time.time_ns()
        span = self._span_of(decision, label, end_ns)
        if span.is_recording():
            span.set_attributes(attributes_of(decision, label))
            if decision.outcome == "failed" or code == STORE_ERROR:
                span.set_status(Status(StatusCode.ERROR, code or None))
        span.end(end_ns)

    def _span_of(self, decision: Decision, label: str, end_ns: int) -> Span:
        """The span that `trace` has begun for this execution, or a new one."""
        links = _links_to(decision.trace) if decision.trace else []
        begun = _begun.get()
        if begun is not None and begun[:2] == (self, decision.reference):
            _begun.set(None)
            for link in links:  # another attempt took over, and its answer is given
                begun.span.add_link(link.context)
            return begun.span
        start_ns = end_ns - decision.duration_ms * 1_000_000
        return self._tracer.start_span(f"coatcheck {label}", start_time=start_ns, links=links)


class _Begun(NamedTuple):
    """The span of an execution whose answer is being stored."""

    exporter: Telemetry
    reference: str
    span: Span


_begun: ContextVar[_Begun | None] = ContextVar("coatcheck.span", default=None)


def _links_to(traceparent: str) -> list[Link]:
    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    found = get_current_span(context).get_span_context()
    return [Link(found)] if found.is_valid else []


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
    elif decision.outcome == "failed":
        found["error.type"] = (
            "_OTHER"  # as the conventions say; the server's span has the exception
        )
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
    claim, complete, wait = (
        meter.create_histogram(
            f"coatcheck.{name}",
            unit="s",
            description=words,
            explicit_bucket_boundaries_advisory=buckets,
        )
        for name, (words, buckets) in TIMED.items()
    )
    return Instruments(
        in_flight=None,  # it is observed
        claim_s=claim.record,
        complete_s=complete.record,
        waited_s=wait.record,
        renewed=renewed,
        lost=lost,
        in_doubt=in_doubt,
        swept=swept,
        in_doubt_now=_Gauge(meter, "coatcheck.operations.in_doubt", "", IN_DOUBT_NOW).set,
        last_sweep_s=_Gauge(meter, "coatcheck.last_sweep", "s", LAST_SWEEP).set,
        recovered=lambda outcome: recovered.add(1, {"coatcheck.outcome": outcome}),
    )


class _Decisions:
    """Counts decisions; the SDK asks for the counts when it exports."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._mutex = threading.Lock()

    def add(self, which: tuple[str, str, str]) -> None:
        with self._mutex:
            self._counts[which] = self._counts.get(which, 0) + 1

    def observe(self, _options: CallbackOptions) -> Sequence[Observation]:
        with self._mutex:
            counts = dict(self._counts)
        return [
            Observation(
                count,
                {"coatcheck.label": label, "coatcheck.outcome": outcome, "coatcheck.code": code},
            )
            for (label, outcome, code), count in counts.items()
        ]


class _Gauge:
    """Its value is asked for: older SDKs export a gauge only once after it was set."""

    def __init__(self, meter: Meter, name: str, unit: str, description: str) -> None:
        self._value = 0.0
        meter.create_observable_gauge(name, [self.observe], unit, description)

    def set(self, value: float) -> None:
        self._value = value

    def observe(self, _options: CallbackOptions) -> Sequence[Observation]:
        return [Observation(self._value)]
