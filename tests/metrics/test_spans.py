"""A span for each guarded request, below the span of its request."""

import pytest
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from coatcheck import AsyncEngine
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.telemetry import Decision
from tests.metrics.readings import OpenTelemetryReadings

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
    assert [span.name for span in spans] == ["coatcheck POST /orders/{id}", "server"] * 2
    first, first_server, replay, replay_server = spans
    for ours, server in ((first, first_server), (replay, replay_server)):
        assert ours.parent.span_id == server.context.span_id
        assert ours.attributes["http.request.method"] == "POST"
        assert ours.attributes["http.route"] == "/orders/{id}"
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
