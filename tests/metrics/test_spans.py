"""A span for each guarded request, below the span of its request."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from coatcheck import AsyncEngine, Engine, KeyRing
from coatcheck.metrics.opentelemetry import Telemetry
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.telemetry import Decision
from tests.metrics.readings import OpenTelemetryReadings
from tests.support.engines import LEASE_S, Handler, WatchedStore, held_up
from tests.support.times import Clock, wait_for

DECISION = Decision("executed", "7D3F-92AB-1C4E", "POST /orders", "caller", 1, "", 12)


@pytest.fixture
def readings():
    return OpenTelemetryReadings()


def test_a_request_and_its_replay_are_spans_below_those_of_the_server(readings):
    """O3: both have the reference, by which a trace of a replay leads to the first one."""

    async def place(_request):
        return PlainTextResponse("placed")

    tracer = readings.tracer_provider.get_tracer("server")

    class Traced:
        def __init__(self, app):
            self._app = app

        async def __call__(self, scope, receive, send):
            with tracer.start_as_current_span("server"):
                await self._app(scope, receive, send)

    app = Starlette(routes=[Route("/orders/{number}", place, methods=["POST"])])
    engine = AsyncEngine("memory://", observers=[readings.exporter.observe])
    guarded = IdempotencyMiddleware(app, engine=engine)
    client = TestClient(Traced(guarded))
    for _ in range(2):
        assert client.post("/orders/17", headers={"Idempotency-Key": "k" * 20}).text == "placed"
    spans = readings.spans.get_finished_spans()
    assert [span.name for span in spans] == ["coatcheck POST /orders/{number}", "server"] * 2
    first, first_server, replay, replay_server = spans
    for ours, server in ((first, first_server), (replay, replay_server)):
        assert ours.parent.span_id == server.context.span_id
        assert ours.attributes["http.request.method"] == "POST"
        assert ours.attributes["http.route"] == "/orders/{number}"
        assert "k" * 20 not in str(ours.attributes)
    assert first.attributes["coatcheck.outcome"] == "executed"
    assert replay.attributes["coatcheck.outcome"] == "replayed"
    assert first.attributes["coatcheck.reference"] == replay.attributes["coatcheck.reference"] != ""


def test_a_span_has_the_duration_and_the_attributes_of_its_decision(readings):
    """O3."""
    readings.exporter.observe(DECISION._replace(label="POST /orders @shop"))
    (span,) = readings.spans.get_finished_spans()
    assert span.end_time - span.start_time == 12_000_000
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes == {
        "coatcheck.label": "POST /orders @shop",
        "coatcheck.outcome": "executed",
        "coatcheck.reference": "7D3F-92AB-1C4E",
        "coatcheck.scope": "caller",
        "coatcheck.attempt": 1,
        "http.request.method": "POST",
        "http.route": "/orders",
    }


def finished(readings):
    return readings.spans.get_finished_spans()


def target_of(span):
    (link,) = span.links
    return link.context.trace_id, link.context.span_id


def ids_of(span):
    return span.context.trace_id, span.context.span_id


@pytest.mark.parametrize("is_cached", [True, False], ids=["from memory", "from the store"])
def test_the_span_of_a_replay_links_to_that_of_the_execution(guards, readings, is_cached):
    """O3: the trace context is stored with the answer, so that any process has it."""
    store = WatchedStore()
    for number in range(2):
        if number == 0 or not is_cached:
            engine = guards.engine(store)
            readings.exporter.instrument(engine)
        assert guards.run(engine, "k", Handler()) == "done"
    executed, replayed = finished(readings)
    assert executed.links == ()
    assert target_of(replayed) == ids_of(executed)
    assert replayed.context.trace_id != executed.context.trace_id
    assert (executed.attributes["coatcheck.outcome"], executed.status.status_code) == (
        *("executed", StatusCode.UNSET),
    )


@pytest.mark.parametrize(
    "keyring", [None, KeyRing({"2026": bytes(32)})], ids=["plain", "encrypted"]
)
def test_a_link_survives_the_process_that_executed(guards, readings, tmp_path, keyring):
    """O3, D3: the trace context is in the file, with the answer."""
    for _ in range(2):
        engine = guards.engine(f"sqlite:///{tmp_path}/shop.db", keyring=keyring)
        readings.exporter.instrument(engine)
        assert guards.run(engine, "k", Handler()) == "done"
        guards.close()
    executed, replayed = finished(readings)
    assert target_of(replayed) == ids_of(executed)


def test_a_replay_in_transaction_mode_has_a_link_too(readings, tmp_path):
    """O3: the trace context is committed with the answer and the effect."""
    for _ in range(2):
        with Engine(f"sqlite:///{tmp_path}/shop.db") as engine:
            readings.exporter.instrument(engine)
            assert engine.transaction("k", str, "done", scope="orders") == "done"
    executed, replayed = finished(readings)
    assert target_of(replayed) == ids_of(executed)


def test_a_replay_links_to_the_attempt_whose_answer_it_gets(guards, readings):
    """O3, L4: not to one that failed before; a failure has a span, and stores nothing."""
    engine = guards.engine()
    readings.exporter.instrument(engine)
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", Handler(ZeroDivisionError()))
    guards.run(engine, "k", Handler())
    guards.run(engine, "k", Handler())
    failed, executed, replayed = finished(readings)
    assert failed.attributes["error.type"] == "_OTHER"
    assert target_of(replayed) == ids_of(executed)


def test_an_attempt_that_was_taken_over_links_to_its_successor(guards, readings):
    """O3, L5: its client gets the answer of the other attempt."""
    clock, store, handler = Clock(), WatchedStore(), held_up()
    engines = [guards.engine(store, clock=clock, sweep_every_s=None) for _ in range(2)]
    readings.exporter.instrument(*engines)
    call = guards.beside(engines[0], "k", handler)
    wait_for(handler.is_running)
    clock.advance(LEASE_S + 1)
    guards.run(engines[1], "k", Handler("theirs"))
    handler.may_end.set()
    assert call.result() == "theirs"
    theirs, ours = finished(readings)
    assert target_of(ours) == ids_of(theirs)


def test_nothing_is_stored_for_traces_that_are_not_kept(guards):
    """O3: nor without OpenTelemetry; a link would lead to nothing."""
    for exporter in (None, Telemetry(TracerProvider(ALWAYS_OFF, shutdown_on_exit=False))):
        store = WatchedStore()
        engine = guards.engine(store)
        if exporter is not None:
            exporter.instrument(engine)
        guards.run(engine, "k", Handler())
        assert guards.run(engine, "k", Handler()) == "done"
        assert store.record.progress is None


def test_tracing_that_fails_does_not_fail_the_operation(guards, readings, caplog):
    """O3."""
    engine = guards.engine()
    readings.exporter.instrument(engine)
    engine.attempts.telemetry.tracing = lambda request, now_ms: 1 / 0
    assert guards.run(engine, "k", Handler()) == "done"
    assert "tracing raised" in caplog.text
    assert len(finished(readings)) == 1


@pytest.mark.parametrize(
    ("outcome", "code", "is_error"),
    [
        ("failed", "", True),
        ("refused", "store-unavailable", True),
        ("unguarded", "store-unavailable", True),
        ("refused", "key-reused", False),  # a mistake of the client
    ],
)
def test_a_span_is_an_error_if_the_service_failed(readings, outcome, code, is_error):
    """O3."""
    readings.exporter.observe(DECISION._replace(outcome=outcome, code=code, label="charges"))
    (span,) = readings.spans.get_finished_spans()
    assert (span.status.status_code is StatusCode.ERROR) == is_error
    assert span.attributes.get("coatcheck.code", "") == code
    assert "http.route" not in span.attributes
