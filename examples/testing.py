"""Tests of an application that is guarded by coatcheck: `pytest testing.py`."""

from fastapi import FastAPI
from starlette.testclient import TestClient

from coatcheck import Engine, Policy
from coatcheck.server.fastapi import IdempotencyMiddleware

effects: list[object] = []


def make_app(store: str) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=store)

    @app.post("/orders", status_code=201)
    async def place(order: dict[str, str]) -> dict[str, str]:
        return order

    return app


def test_a_retried_order_is_taken_once():
    with TestClient(make_app(store="memory://")) as client:
        headers = {"Idempotency-Key": "test-1"}
        first = client.post("/orders", json={"item": "coat"}, headers=headers)
        again = client.post("/orders", json={"item": "coat"}, headers=headers)
    assert first.status_code == again.status_code == 201
    assert again.json() == first.json()
    assert again.headers["Idempotent-Replayed"] == "true"


def test_after_its_window_a_key_is_free_again():
    now_ms = 1_000_000
    with Engine("memory://", Policy(window="1h"), clock=lambda: now_ms) as engine:
        assert engine.run("order-1", effects.append, "first", scope="orders") is None
        assert engine.run("order-1", effects.append, "first", scope="orders") is None
        now_ms += 3_600_000
        assert engine.run("order-1", effects.append, "first", scope="orders") is None
    assert effects == ["first", "first"]
