"""Metrics of engines for Prometheus, with `prometheus_client`.

They are plain metrics of that library, so they also work in its multiprocess mode.
"""

from __future__ import annotations

from collections.abc import Callable

from coatcheck.errors import Misconfigured, MissingExtra
from coatcheck.metrics.exporter import (
    BUCKETS_S,
    IN_DOUBT_NOW,
    LAST_SWEEP,
    STORE_ERROR,
    TIMED,
    Exporter,
    Instrumented,
    Instruments,
)
from coatcheck.metrics.labels import LABELS_MAX, Labels
from coatcheck.telemetry import Decision

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:
    raise MissingExtra("prometheus", "prometheus_client") from error


class Metrics(Exporter):
    """
    The metrics of all engines of a process.

    `Metrics().instrument(engine)`, or `AsyncEngine(url, observers=[metrics.observe],
    listeners=[metrics.listen])`. One registry has them once: give all engines to the same object.

    Args:
        registry: where the metrics are registered; by default that of `prometheus_client`.
        labels_max: how many different values the label "label" may have. All others are "other".
        label: returns the value of "label" for the label of a decision ("POST /orders/17"). By
            default, segments that look like an id become `{id}`.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        labels_max: int = LABELS_MAX,
        label: Callable[[str], str] | None = None,
    ) -> None:
        labels = Labels(labels_max, label)
        try:
            instruments = self._register(registry)
        except ValueError as error:
            raise Misconfigured(
                "this registry has the metrics of coatcheck already: call instrument() of the "
                "same Metrics for all engines, or give each Metrics a registry of its own"
            ) from error
        super().__init__(labels, instruments)

    def _register(self, to: CollectorRegistry) -> Instruments:
        self._decisions = Counter(
            "coatcheck_decisions",
            "Guarded requests and calls by route, outcome and problem code.",
            ("label", "outcome", "code"),
            registry=to,
        )
        self._duration = Histogram(
            "coatcheck_duration_seconds",
            "How long guarded requests and calls took, by outcome.",
            ("outcome",),
            buckets=BUCKETS_S,
            registry=to,
        )
        # Found once: `labels` takes as long as the counting itself.
        self._count: dict[tuple[str, str, str], Callable[[], None]] = {}
        self._time: dict[str, Callable[[float], None]] = {}
        self._store_errors = Counter(
            "coatcheck_store_errors",
            "Requests and calls that were refused or ran unguarded: the store was unavailable.",
            registry=to,
        )
        return _instruments(to)

    def observe(self, decision: Decision) -> None:
        """Count *decision*: an observer of engines."""
        outcome, code = decision.outcome, decision.code
        which = self._labels.of(decision.label), outcome, code
        count, time = self._count.get(which), self._time.get(outcome)
        if count is None:
            count = self._count[which] = self._decisions.labels(*which).inc
        if time is None:
            time = self._time[outcome] = self._duration.labels(outcome).observe
        count()
        time(decision.duration_ms / 1_000)
        if code == STORE_ERROR:
            self._store_errors.inc()


def instrument(*engines: Instrumented, registry: CollectorRegistry = REGISTRY) -> Metrics:
    """Count what *engines* do, in *registry*; a middleware stands for its engine."""
    return Metrics(registry).instrument(*engines)


def _instruments(to: CollectorRegistry) -> Instruments:
    recovered = Counter(
        "coatcheck_recovered",
        "Abandoned operations that the background settled, by outcome.",
        ("outcome",),
        registry=to,
    )
    claim, complete, wait = (
        Histogram(f"coatcheck_{name}_seconds", words, buckets=buckets, registry=to)
        for name, (words, buckets) in TIMED.items()
    )
    return Instruments(
        in_flight=Gauge(
            "coatcheck_in_flight",
            "Attempts that run now.",
            multiprocess_mode="livesum",
            registry=to,
        ).inc,
        claim_s=claim.observe,
        complete_s=complete.observe,
        waited_s=wait.observe,
        renewed=Counter("coatcheck_renewals", "Renewed leases.", registry=to).inc,
        lost=Counter(
            "coatcheck_lost_leases", "Attempts that another one took over.", registry=to
        ).inc,
        in_doubt=Counter("coatcheck_in_doubt", "Operations that became in doubt.", registry=to).inc,
        swept=Counter("coatcheck_swept_records", "Deleted expired records.", registry=to).inc,
        in_doubt_now=Gauge(
            "coatcheck_operations_in_doubt",
            IN_DOUBT_NOW,
            multiprocess_mode="mostrecent",
            registry=to,
        ).set,
        last_sweep_s=Gauge(
            "coatcheck_last_sweep_timestamp_seconds",
            LAST_SWEEP,
            multiprocess_mode="max",
            registry=to,
        ).set,
        recovered=lambda outcome: recovered.labels(outcome).inc(),
    )
