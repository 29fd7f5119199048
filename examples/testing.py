"""Tests of an application that is guarded by coatcheck: `pytest testing.py`."""

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from coatcheck import Operation, OutcomeUnknown, Policy
from coatcheck.server.fastapi import IdempotencyMiddleware
from coatcheck.testing import (
    AnswerLost,
    AttemptKilled,
    Request,
    assert_every_unsafe_route_takes_a_key,
    assert_idempotent,
    next_attempt_of,
)

# ----------------------------------------------------------------------------- the application

orders: list[str] = []
charges: list[int] = []


def make_app(store: str) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=store)

    @app.post("/orders", status_code=201)
    async def place(order: dict[str, str]) -> dict[str, int]:
        orders.append(order["item"])
        return {"order": len(orders)}

    return app


def charge(amount: int, operation: Operation) -> int:
    operation.note({"about to charge": amount})
    return operation.step("charge", take_money, amount)


def take_money(amount: int) -> int:
    charges.append(amount)
    return len(charges)


# ----------------------------------------------------------------------------------- its tests


@pytest.fixture(autouse=True)
def empty_shop():
    orders.clear()
    charges.clear()


@pytest.fixture
def app():
    return make_app(store="memory://")


def test_placing_an_order_is_idempotent(app):
    request = Request("POST", "/orders", json={"item": "coat"})
    assert_idempotent(app, request, effects=lambda: orders)


def test_every_route_that_changes_something_takes_a_key(app):
    assert_every_unsafe_route_takes_a_key(app)


def test_an_answer_that_is_lost_is_sent_again(app, lossy_network):
    client = TestClient(lossy_network.asgi(app))
    headers = {"Idempotency-Key": "test-1"}
    lossy_network.lose_answers(1)
    with pytest.raises(AnswerLost):
        client.post("/orders", json={"item": "coat"}, headers=headers)
    again = client.post("/orders", json={"item": "coat"}, headers=headers)
    assert again.json() == {"order": 1}
    assert again.headers["Idempotent-Replayed"] == "true"


@pytest.fixture
def client(app):
    return TestClient(app)


@pytest.mark.duplicated
def test_an_order_is_placed_once(client):
    answer = client.post("/orders", json={"item": "coat"}, headers={"Idempotency-Key": "test-1"})
    assert answer.status_code == 201
    assert orders == ["coat"]


def test_a_charge_is_taken_once_over_all_attempts(operation):
    assert charge(30, operation) == 1
    assert charge(30, next_attempt_of(operation)) == 1
    assert charges == [30]
    assert [note.what for note in operation.notes] == [{"about to charge": 30}]


@pytest.fixture
def idempotency_policy():
    return Policy(window="1h", recovery="manual")


def test_after_its_window_a_key_is_free_again(idempotency_engine):
    for _ in range(2):
        idempotency_engine.run("order-1", take_money, 30)
    assert charges == [30]
    idempotency_engine.travel_past_window()
    idempotency_engine.run("order-1", take_money, 30)
    assert charges == [30, 30]


def test_a_charge_whose_process_died_is_left_to_an_operator(idempotency_engine, crash_injector):
    injector = crash_injector("after effect")
    with pytest.raises(AttemptKilled):
        idempotency_engine.run("order-1", injector.effect(take_money), 30)
    idempotency_engine.travel_past_lease()
    with pytest.raises(OutcomeUnknown):
        idempotency_engine.run("order-1", take_money, 30)
    assert charges == [30]
