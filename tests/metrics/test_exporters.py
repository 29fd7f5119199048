"""What an engine does is counted once, with both libraries alike."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from coatcheck import (
    CoatcheckError,
    DidNotHappen,
    Happened,
    Misconfigured,
    Policy,
    StoreUnavailable,
    Unknown,
)
from coatcheck.metrics import exporter as exporter_module
from coatcheck.metrics import opentelemetry, prometheus
from coatcheck.metrics.labels import without_ids
from coatcheck.telemetry import Claimed, Completed, CountedInDoubt, Decision, Event
from tests.metrics.readings import OpenTelemetryReadings, PrometheusReadings
from tests.support.engines import LEASE_S, ROUND_S, Handler, held_up
from tests.support.times import eventually, wait_for

DECISION = Decision("executed", "7D3F-92AB-1C4E", "POST /orders", "caller", 1, "", 12)


def test_decisions_are_counted_by_label_outcome_and_code(guards, engine, readings):
    """O3."""
    for argument in (1, 1):
        guards.run(engine, "k", Handler(), argument, scope="orders")
    with pytest.raises(CoatcheckError):
        guards.run(engine, "k", Handler(), 2, scope="orders")
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "f", Handler(ZeroDivisionError()), scope="orders")
    for outcome, code in {
        "executed": "",
        "replayed": "",
        "failed": "",
        "refused": "key-reused",
    }.items():
        count = readings.value("coatcheck.decisions", label="orders", outcome=outcome, code=code)
        assert count == 1, outcome
        assert readings.value("coatcheck.duration", outcome=outcome)[0] == 1
    assert readings.value("coatcheck.store.errors") == 0


def test_the_writes_of_claims_and_of_ends_are_timed(guards, engine, readings):
    """O3: an execution and a failure are two of each; a replay and a refusal write nothing."""
    before_s = time.perf_counter()
    for argument in (1, 1):
        guards.run(engine, "k", Handler(), argument, scope="orders")
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "f", Handler(ZeroDivisionError()), scope="orders")
    took_s = time.perf_counter() - before_s
    for name in ("coatcheck.claim", "coatcheck.complete"):
        count, sum_s = readings.value(name)
        assert count == 2
        assert 0 < sum_s < took_s


def test_an_outage_of_the_store_is_counted(guards, engine, readings, store):
    """O3, D2."""
    store.troubles = ["down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", Handler(), policy=Policy(patience=0))
    assert readings.value("coatcheck.store.errors") == 1


def test_running_attempts_renewals_and_waits_are_measured(guards, engine, readings, store, clock):
    """O3, L3, L5."""
    handler = held_up()
    calls = [guards.beside(engine, "k", handler)]
    wait_for(handler.is_running)
    assert readings.value("coatcheck.in_flight") == 1
    clock.advance(LEASE_S / 2)
    engine.attempts.heartbeat.tick()
    calls.append(guards.beside(engine, "k", handler))
    eventually(lambda: engine.attempts.waiters.count(store.record.id) == 1)
    clock.advance(1.5)
    handler.may_end.set()
    assert [call.result() for call in calls] == ["done", "done"]
    assert readings.value("coatcheck.in_flight") == 0
    assert readings.value("coatcheck.leases.renewed") == 1
    assert readings.value("coatcheck.wait") == (1, 1.5)
    assert readings.value("coatcheck.duration", outcome="executed") == (1, LEASE_S / 2 + 1.5)


def test_a_lost_lease_is_counted_and_its_attempt_no_longer_runs(
    guards, engine, readings, store, clock
):
    """O3, L5."""
    handler = held_up()
    call = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    clock.advance(LEASE_S + 1)
    other = guards.engine(store, clock=clock, sweep_every_s=None)
    guards.run(other, "k", Handler("theirs"))
    handler.may_end.set()
    assert call.result() == "theirs"
    assert readings.value("coatcheck.leases.lost") == 1
    assert readings.value("coatcheck.in_flight") == 0


@pytest.mark.parametrize(
    ("answer", "outcome", "in_doubt"),
    [
        (Happened(value=1), "completed", 0),
        (DidNotHappen(), "released", 0),
        (Unknown(), "in doubt", 1),
    ],
)
def test_a_recovery_is_counted_by_its_outcome(
    guards, engine, readings, clock, *, answer, outcome, in_doubt
):
    """O3, L6: and an operation in doubt, which had a value of 0 before."""
    assert readings.value("coatcheck.in_doubt") == 0
    policy = Policy(recovery="reconcile", reconcile=lambda _: answer)
    with pytest.raises(SystemExit):
        guards.run(engine, "k", Handler(SystemExit()), policy=policy)
    clock.advance(ROUND_S)
    engine.recovery.round()
    assert readings.value("coatcheck.recovered", outcome=outcome) == 1
    assert readings.value("coatcheck.in_doubt") == in_doubt
    assert readings.value("coatcheck.in_flight") == 0


def test_a_sweep_is_counted_and_its_time_is_known(guards, engine, readings, clock):
    """O3, T3."""
    started_s = time.time()
    assert started_s - 60 < readings.value("coatcheck.last_sweep") <= started_s
    guards.run(engine, "k", Handler(), policy=Policy(window="1h", margin=0))
    for _ in range(2):
        clock.advance(3_600)
        engine.attempts.heartbeat.tick()
        eventually(lambda: not engine.sweeper.is_sweeping())
    assert readings.value("coatcheck.records.swept") == 1
    assert started_s <= readings.value("coatcheck.last_sweep") <= time.time()


def test_the_operations_that_are_in_doubt_are_a_gauge(readings):
    """O3: it goes down when they are settled."""
    assert readings.value("coatcheck.operations.in_doubt") == 0
    for number in (3, 2):
        readings.exporter.listen(CountedInDoubt(number))
        assert readings.value("coatcheck.operations.in_doubt") == number


def test_a_cancelled_attempt_is_not_counted_forever(readings, monkeypatch):
    """O3: it has no event at its end."""
    monkeypatch.setattr(exporter_module, "_RUNNING_MAX", 2)
    events: list[Event] = [Claimed(f"R{number}", "orders", "", 1) for number in range(5)]
    for event in [*events, events[-1]]:
        readings.exporter.listen(event)
    assert readings.value("coatcheck.in_flight") == 2
    for number in range(5):
        readings.exporter.listen(Completed(f"R{number}", "orders", "", 1))
    assert readings.value("coatcheck.in_flight") == 0


# --- labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/orders/{}", "/{}/lines", "/a-{}", "/\udcff{}"],
    ids=["last", "first", "word", "bytes"],
)
def test_ten_thousand_paths_make_few_labels(readings, path):
    """O3: the label of a route without a mark is its path, which the client chooses."""
    for number in range(10_000):
        label = f"POST {path.format(number)}"
        readings.exporter.observe(DECISION._replace(label=label))
    assert len(readings.labels()) <= 11  # ten words with one digit
    assert not [label for label in readings.labels() if "999" in label]


@pytest.mark.parametrize("readings", [PrometheusReadings, OpenTelemetryReadings])
def test_words_beyond_the_limit_share_one_label(readings):
    """O3: also words that do not look like ids, and all of them are counted."""
    found = readings()
    words = "abcdefghij"
    for number in range(10_000):
        word = "".join(words[int(digit)] for digit in str(number))
        found.exporter.observe(DECISION._replace(label=f"POST /{word}"))
    assert len(found.labels()) == 201
    counted = found.value("coatcheck.decisions", label="other", outcome="executed", code="")
    assert counted == 9_800


def test_a_page_of_metrics_survives_every_path():
    """O3: a path may have bytes that are no text, or the marks of the format."""
    readings = PrometheusReadings()
    for path in ("/\udcff", '/"}\n\\', "/" + "x" * 300):
        readings.exporter.observe(DECISION._replace(label=f"POST {path}"))
    lines = generate_latest(readings.registry).decode().splitlines()
    assert len([line for line in lines if line.startswith("coatcheck_decisions_total{")]) == 3


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("POST /orders", "POST /orders"),
        ("POST /orders/17", "POST /orders/{id}"),
        ("POST /orders/17/lines/3 @shop", "POST /orders/{id}/lines/{id} @shop"),
        ("POST /v1/orders/07c202d7-fdb9-4b59-a34f-388e536bbc95", "POST /v1/orders/{id}"),
        ("POST /oauth2/token", "POST /oauth2/token"),
        ("POST /orders/{order1}/<int:line2>", "POST /orders/{order1}/<int:line2>"),
        ("POST /orders/ord_9fX2", "POST /orders/{id}"),
        ("shop.orders2024", "shop.orders2024"),
    ],
)
def test_a_segment_that_looks_like_an_id_is_replaced(label, expected):
    assert without_ids(label) == expected


@pytest.mark.parametrize("made", [PrometheusReadings, OpenTelemetryReadings])
def test_an_application_can_give_its_own_labels(made):
    """O3: within the same limit."""
    readings = made(label=lambda label: label.split("/")[1], labels_max=1)
    for path in ("/orders/17", "/orders/x", "/charges/1"):
        readings.exporter.observe(DECISION._replace(label=f"POST {path}"))
    assert readings.labels() == {"orders", "other"}


@pytest.mark.parametrize("options", [{"labels_max": -1}, {"labels_max": "9"}, {"label": "orders"}])
def test_wrong_settings_of_labels_are_refused(options):
    for made in (PrometheusReadings, OpenTelemetryReadings):
        with pytest.raises(Misconfigured, match=next(iter(options))):
            made(**options)


# --- setting it up ----------------------------------------------------------------------------


def test_an_engine_or_its_middleware_is_instrumented_once(guards, readings):
    """O3: also one that has run before, and also if it is asked for twice."""
    engine = guards.engine()
    guards.run(engine, "before", Handler())
    readings.exporter.instrument(engine, SimpleNamespace(engine=engine)).instrument(engine)
    guards.run(engine, "k", Handler(), scope="orders")
    count = readings.value("coatcheck.decisions", label="orders", outcome="executed", code="")
    assert count == 1
    assert readings.value("coatcheck.in_flight") == 0
    assert readings.value("coatcheck.duration", outcome="executed")[0] == 1


def test_one_line_instruments_with_either_library(guards):
    """O3."""
    engine, registry = guards.engine(), CollectorRegistry()
    spans = OpenTelemetryReadings()
    prometheus.instrument(engine, registry=registry)
    opentelemetry.instrument(engine, tracer_provider=spans.tracer_provider)
    guards.run(engine, "k", Handler(), scope="orders")
    labels = {"label": "orders", "outcome": "executed", "code": ""}
    assert registry.get_sample_value("coatcheck_decisions_total", labels) == 1
    assert [span.name for span in spans.spans.get_finished_spans()] == ["coatcheck orders"]


def test_what_is_no_engine_is_refused_and_nothing_is_instrumented(guards, readings):
    engine = guards.engine()
    with pytest.raises(Misconfigured, match="neither an engine"):
        readings.exporter.instrument(engine, "memory://")
    assert engine.attempts.telemetry.observers == ()


def test_a_registry_has_the_metrics_once():
    registry = CollectorRegistry()
    prometheus.Metrics(registry)
    with pytest.raises(Misconfigured, match="same Metrics for all engines"):
        prometheus.Metrics(registry)


WORKER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from coatcheck import Engine
from coatcheck.metrics import prometheus

engine = Engine("memory://")
prometheus.instrument(engine)
engine.run("k", int, scope="orders")
together = CollectorRegistry()
multiprocess.MultiProcessCollector(together)
print(generate_latest(together).decode())
"""


def test_worker_processes_are_counted_together(tmp_path):
    """O3: in the multiprocess mode of the library, as servers with workers need it."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WORKER]
    for workers in (1, 2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        counted = 'coatcheck_decisions_total{code="",label="orders",outcome="executed"}'
        assert f"{counted} {workers}.0" in done.stdout
        assert "coatcheck_in_flight 0.0" in done.stdout


WITHOUT = """
import sys
sys.modules[{package!r}] = None
try:
    import coatcheck.metrics.{name}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("prometheus", "prometheus_client", "prometheus"), ("opentelemetry", "opentelemetry", "otel")],
)
def test_an_exporter_without_its_library_names_the_extra(name, package, extra):
    program = WITHOUT.format(name=name, package=package)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"run: pip install 'coatcheck[{extra}]'" in done.stdout
