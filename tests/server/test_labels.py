"""Labels: what a request is called in logs, listings and metrics (O3)."""

import fastapi
import fastapi.testclient
import flask
import litestar
import litestar.testing
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from coatcheck import AsyncEngine, Engine
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.flask import Coatcheck
from coatcheck.server.litestar import IdempotencyPlugin


def of_fastapi(observe):
    app = fastapi.FastAPI()
    app.add_middleware(IdempotencyMiddleware, engine=AsyncEngine("memory://", observers=[observe]))

    @app.post("/orders/{number}")
    def change(number: int):
        return number

    return fastapi.testclient.TestClient(app)


def of_starlette(observe):
    def change(_request):
        return PlainTextResponse("changed")

    app = Starlette(
        routes=[Mount("/orders", routes=[Route("/{number}", change, methods=["POST"])])]
    )
    engine = AsyncEngine("memory://", observers=[observe])
    return TestClient(IdempotencyMiddleware(app, engine=engine))


def of_flask(observe):
    app = flask.Flask("shop")
    Coatcheck(app, engine=Engine("memory://", observers=[observe]))
    app.post("/orders/<number>")(lambda number: number)
    return app.test_client()


def of_litestar(observe):
    @litestar.post("/orders/{number:int}")
    async def change() -> str:
        return "changed"

    plugin = IdempotencyPlugin(engine=AsyncEngine("memory://", observers=[observe]))
    return litestar.testing.TestClient(litestar.Litestar([change], plugins=[plugin]))


LABELS = {
    of_fastapi: "POST /orders/{number}",
    of_starlette: "POST /orders/{number}",
    of_flask: "POST /orders/<number>",
    of_litestar: "POST /orders/{number}",
}


@pytest.mark.parametrize("client_of", LABELS)
def test_the_label_of_a_route_without_a_mark_is_its_template(client_of):
    """O3: otherwise each order would be a label of its own in metrics, and show its number."""
    decisions = []
    client = client_of(decisions.append)
    for number in (1, 2):
        client.post(f"/orders/{number}", headers={"Idempotency-Key": f"k-{number}"})
    client.post("/unknown/17", headers={"Idempotency-Key": "k-3"})
    labels = {decision.label for decision in decisions}
    assert labels - {"POST /unknown/17"} == {LABELS[client_of]}
