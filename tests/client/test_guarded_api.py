"""Our clients, and a client that is not ours, against an API that our middleware guards.

The API runs in a real uvicorn; between it and the client a network loses answers.
"""

import json

import pytest
import stripe

from coatcheck.client import RetryPolicy
from coatcheck.core.policy import Policy
from tests.client.drivers import DRIVERS
from tests.support.guarded_api import Api
from tests.support.lossy_relay import LossyRelay

on_all = pytest.mark.parametrize("driver", DRIVERS, ids=repr)


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
