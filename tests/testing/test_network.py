"""The network that loses requests and answers (V2)."""

import asyncio

import httpx
import httpx2
import pytest
from starlette.testclient import TestClient

from coatcheck.client.httpx2 import Client
from coatcheck.errors import Misconfigured
from coatcheck.testing import AnswerLost, LossyNetwork, RequestLost
from tests.testing.shops import Shop

KEY = {"Idempotency-Key": "k"}
COAT = {"item": "coat"}


def client_of(interface, network, shop):
    if interface == "asgi":
        return TestClient(network.asgi(shop.app))
    shop.app.testing = True
    shop.app.wsgi_app = network.wsgi(shop.app.wsgi_app)
    return shop.app.test_client()


@pytest.mark.parametrize("interface", ["asgi", "wsgi"])
def test_a_lost_request_has_no_effect_and_a_lost_answer_has_one(interface):
    """V2: the client fails each time, and its retry gets the answer."""
    network, shop = LossyNetwork(), Shop(interface)
    client = client_of(interface, network, shop)
    network.lose_requests()
    network.lose_answers()
    with pytest.raises(RequestLost):
        client.post("/orders", json=COAT, headers=KEY)
    assert shop.orders == []
    with pytest.raises(AnswerLost):
        client.post("/orders", json=COAT, headers=KEY)
    assert shop.orders == ["coat"]
    answer = client.post("/orders", json=COAT, headers=KEY)
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert shop.orders == ["coat"]
    assert (network.delivered, network.requests_lost, network.answers_lost) == (2, 1, 1)


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_a_client_gets_the_errors_of_its_own_library(library):
    network, shop = LossyNetwork(), Shop("wsgi")
    transport = network.transport(library.WSGITransport(shop.app))
    network.lose_requests()
    network.lose_answers()
    with library.Client(transport=transport, base_url="http://shop") as client:
        with pytest.raises(library.ConnectError):
            client.post("/orders", json=COAT, headers=KEY)
        with pytest.raises(library.ReadError):
            client.post("/orders", json=COAT, headers=KEY)
        assert client.post("/orders", json=COAT, headers=KEY).status_code == 201
    assert shop.orders == ["coat"]


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_an_async_client_gets_the_errors_of_its_own_library(library):
    network, shop = LossyNetwork(), Shop("asgi")
    network.lose_requests()
    network.lose_answers()

    async def send():
        transport = network.transport(library.ASGITransport(shop.app))
        async with library.AsyncClient(transport=transport, base_url="http://shop") as client:
            with pytest.raises(library.ConnectError):
                await client.post("/orders", json=COAT, headers=KEY)
            with pytest.raises(library.ReadError):
                await client.post("/orders", json=COAT, headers=KEY)
            return await client.post("/orders", json=COAT, headers=KEY)

    assert asyncio.run(send()).status_code == 201
    assert shop.orders == ["coat"]


def test_a_client_that_retries_safely_hides_the_losses():
    """C1: the drop-in client sends the same key again."""
    network, shop = LossyNetwork(), Shop("wsgi")
    network.lose_answers(2)
    transport = network.transport(httpx2.WSGITransport(shop.app))
    with Client(transport=transport, base_url="http://shop") as client:
        assert client.post("/orders", json=COAT).json() == {"order": 1}
    assert shop.orders == ["coat"]
    assert network.delivered == 3


def test_only_transports_of_the_two_libraries_are_wrapped():
    with pytest.raises(Misconfigured, match=r"lossy_network.asgi"):
        LossyNetwork().transport(print)
