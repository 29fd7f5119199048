"""Our clients, and a client that is not ours, against an API that our middleware guards.

The API runs in a real uvicorn; between it and the client a network loses answers.
"""

import asyncio
import json
import threading

import pytest
import stripe
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.client import RetryPolicy
from coatcheck.core.policy import Policy
from coatcheck.server.asgi import IdempotencyMiddleware
from tests.client.drivers import DRIVERS
from tests.support.lossy_relay import LossyRelay
from tests.support.times import eventually

on_all = pytest.mark.parametrize("driver", DRIVERS, ids=repr)


class Api:
    """Charges: each run of the handler is a charge."""

    def __init__(self, policy):
        self.charges, self.failures = [], 0
        app = Starlette(
            routes=[
                Route("/charges", self._charge, methods=["POST"]),
                Route("/v1/customers", self._customer, methods=["POST"]),
                Route("/slow", self._slow, methods=["POST"]),
            ]
        )
        app.add_middleware(IdempotencyMiddleware, store="memory://", policy=policy)
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        eventually(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error):
        self._server.should_exit = True
        self._thread.join()

    async def _charge(self, request):
        self.charges.append(await request.body())
        if self.failures > 0:
            self.failures -= 1
            return JSONResponse({}, 503)
        return JSONResponse({"charge": len(self.charges)}, 201)

    async def _customer(self, request):
        self.charges.append(await request.body())
        return JSONResponse({"id": f"cus_{len(self.charges)}", "object": "customer"})

    async def _slow(self, request):
        self.charges.append(await request.body())
        await asyncio.sleep(0)
        return JSONResponse({"report": 1}, 201)


@on_all
@pytest.mark.parametrize("fault", ["lose", "half", "reset"])
def test_a_lost_answer_of_a_guarded_api_is_replayed(driver, fault):
    """C1, C-19: the charge happens once, and the client gets its answer."""
    with Api(Policy(required=True)) as api, LossyRelay(api.port, fault, fault) as network:
        got = driver.post(f"{network.url}/charges", json={"amount": 5})
    assert got.error is None
    assert (got.status, json.loads(got.body)) == (201, {"charge": 1})
    assert (got.result.attempts, got.result.was_replayed) == (3, True)
    assert len(api.charges) == 1


@pytest.mark.parametrize("driver", DRIVERS[:2], ids=repr)
def test_a_failure_that_is_not_kept_runs_again_as_the_next_attempt(driver):
    with Api(Policy()) as api:
        api.failures = 2
        got = driver.post(f"http://127.0.0.1:{api.port}/charges", json={})
    assert (got.status, got.result.attempts, got.result.was_replayed) == (201, 3, False)


@pytest.mark.parametrize("driver", DRIVERS[:2], ids=repr)
def test_another_request_with_the_same_reference_is_refused_as_reused(driver):
    """C-08: a mismatch is a mistake of the program, and not retried."""
    with Api(Policy()) as api:
        url = f"http://127.0.0.1:{api.port}/charges"
        driver.post(url, json={"amount": 5}, action={"reference": "order-17"})
        got = driver.post(url, json={"amount": 6}, action={"reference": "order-17"})
    assert (got.status, got.result.outcome, got.result.code) == (422, "refused", "key-reused")
    assert (got.result.attempts, len(api.charges)) == (1, 1)


@on_all
def test_an_operation_that_is_accepted_is_followed_through_losses(driver):
    with Api(Policy(in_flight="202")) as api, LossyRelay(api.port, "lose", None, "lose") as network:
        got = driver.post(
            f"{network.url}/slow",
            json={},
            headers={"Prefer": "respond-async"},
            retry=RetryPolicy(follow_accepted=True),
        )
    assert got.error is None
    assert (got.status, json.loads(got.body)) == (201, {"report": 1})
    assert len(api.charges) == 1


@pytest.mark.parametrize("fault", ["lose", "reset"])
def test_the_library_of_stripe_retries_into_one_effect(fault, monkeypatch):
    """A client that is not ours sends the same key, and the preset answers as Stripe does."""
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0)
    monkeypatch.setattr(stripe.HTTPClient, "MAX_DELAY", 0)
    policy = Policy.preset("stripe")
    with Api(policy) as api, LossyRelay(api.port, fault, fault) as network:
        http = stripe.RequestsClient()
        client = stripe.StripeClient(
            "sk_test_1",
            base_addresses={"api": network.url},
            max_network_retries=3,
            http_client=http,
        )
        customer = client.v1.customers.create({"name": "Ada"})
        http.close()
    assert customer.id == "cus_1"
    assert len(api.charges) == 1
    assert len(network.requests) == 3
    keys = {
        line
        for sent in network.requests
        for line in sent.lower().split(b"\r\n")
        if line.startswith(b"idempotency-key")
    }
    assert len(keys) == 1
