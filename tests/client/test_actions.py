"""Keys and actions: who makes the key, who shares it, and where it is sent."""

import asyncio
import json
import re
import uuid

import httpx2
import pytest

import coatcheck.client.httpx2
from coatcheck.client import PRESETS, ClientSettings, Preset, RetryBudget, RetryPolicy
from coatcheck.client.httpx2 import Client, Transport
from coatcheck.errors import Misconfigured
from tests.client.drivers import CLIENTS, DRIVERS, FakeTime
from tests.support.faulty_server import FaultyServer, later

on_clients = pytest.mark.parametrize("driver", CLIENTS, ids=repr)
on_all = pytest.mark.parametrize("driver", DRIVERS, ids=repr)


@pytest.fixture
def server():
    with FaultyServer() as server:
        yield server


@on_all
def test_two_calls_are_two_actions_even_with_the_same_content(driver, server):
    """K2, C-03: a new deliberate action gets a new key."""
    for _ in range(2):
        assert driver.post(f"{server.url}/charges", json={}).status == 201
    assert len(server.effects) == len(set(server.keys)) == 2


@pytest.mark.parametrize("version", [4, 7])
def test_keys_are_uuids_of_the_version_that_was_asked_for(server, version):
    """K2, C-05: 122 random bits, or the time first on request."""
    with Client(base_url=server.url, key_version=version) as client:
        for _ in range(20):
            client.post("/charges")
    keys = [uuid.UUID(key) for key in server.keys]
    assert {key.version for key in keys} == {version}
    assert {key.variant for key in keys} == {uuid.RFC_4122}
    assert len(set(keys)) == 20
    if version == 7:
        assert [key.int >> 80 for key in keys] == sorted(key.int >> 80 for key in keys)


@on_clients
def test_an_action_tells_its_key_its_attempts_and_whether_it_was_replayed(driver):
    """K2: the key is there before the first attempt."""
    with FaultyServer("lose") as server:
        got = driver.post(f"{server.url}/charges", json={}, action={})
    assert server.keys == [got.action.key] * 2
    assert (got.action.attempts, got.action.was_replayed) == (2, True)
    assert got.action.result is got.result


@on_clients
def test_the_same_reference_is_the_same_key_in_every_process(driver, server):
    """C-06, C-24: also after a crash, and for a second click."""
    for _ in range(2):
        driver.post(f"{server.url}/charges", json={}, action={"reference": "order-17"})
    driver.post(f"{server.url}/charges", json={}, action={"reference": "order-18"})
    assert len(server.effects) == 2
    assert server.keys[:2] == ["51d7dc92-44a9-5441-a2ae-9444bf536ef7"] * 2
    assert "order" not in server.keys[0]


@on_clients
def test_the_application_may_give_the_key(driver, server):
    got = driver.post(f"{server.url}/charges", json={}, action={"key": "k-1"})
    assert (server.keys, got.result.key) == (["k-1"], "k-1")


@on_all
@pytest.mark.parametrize("value", ["k-2", '"k-2"'])
def test_a_header_that_the_application_sets_is_its_key(driver, value):
    with FaultyServer("lose") as server:
        headers = {"idempotency-key": value}
        got = driver.post(f"{server.url}/charges", json={}, headers=headers)
    assert (server.keys, got.result.key) == ([value] * 2, "k-2")


@on_all
@pytest.mark.parametrize("value", ["", '""'])
def test_a_blank_header_is_no_key_and_is_refused_before_anything_is_sent(driver, value, server):
    """C-20: a server that takes it for no key would execute every attempt."""
    with pytest.raises(Misconfigured, match="the key is blank"):
        driver.post(f"{server.url}/charges", json={}, headers={"Idempotency-Key": value})
    assert server.seen == []


@on_clients
def test_an_action_without_a_key_is_sent_once(driver):
    """C-20, C-21: the key can be turned off, and then nothing is repeated."""
    with FaultyServer("lose") as server:
        got = driver.post(f"{server.url}/charges", json={}, action={"send_key": False})
    assert server.keys == [None]
    assert (got.result.outcome, got.result.gave_up) == ("unknown", "no-key")


def test_an_action_may_carry_a_key_with_any_unsafe_method(server):
    with Client(base_url=server.url) as client:
        with client.action() as action:
            action.put("/charges/1", json={})
        with client.action() as other:
            other.delete("/charges/1")
        with client.action() as safe:
            safe.get("/charges/1")
        with client.action() as change:
            change.patch("/charges/1")
        client.put("/charges/1", json={})
    assert server.keys == [action.key, other.key, None, change.key, None]


def test_an_action_is_one_request(server):
    with Client(base_url=server.url) as client, client.action() as action:
        assert action.post("/charges", json={}).status_code == 201
        assert not action.was_replayed
        assert action.post("/charges", json={}).status_code == 201
        assert action.was_replayed
        with pytest.raises(Misconfigured, match="begin another action for POST /refunds"):
            action.post("/refunds", json={})
    assert len(server.effects) == 1


def test_an_action_on_an_event_loop_is_written_the_same_way(server):
    async def charge():
        client = coatcheck.client.httpx2.AsyncClient(base_url=server.url)
        async with client, client.action(reference="order-17") as action:
            return await action.post("/charges", json={})

    assert asyncio.run(charge()).status_code == 201


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": "k", "reference": "r"}, "takes one of"),
        ({"key": "k", "send_key": False}, "takes one of"),
        ({"key": ""}, "the key is empty"),
        ({"key": "two words"}, "a space"),
        ({"key": '"k"'}, "leave out the quotes"),
        ({"key": "k" * 256}, "the key has 256 characters"),
        ({"reference": ""}, "reference is empty"),
    ],
)
def test_a_wrong_key_is_refused_before_anything_is_sent(options, words):
    with Client() as client, pytest.raises(Misconfigured, match=words):
        client.action(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "strype"}, "there is no preset 'strype'"),
        ({"key_version": 5}, "key_version is 5"),
        ({"retry": 3}, "retry is a int; it must be a RetryPolicy"),
        ({"budget": 3}, "budget is a int; it must be a RetryBudget"),
        (
            {"preset": "stripe", "retry": RetryPolicy(deadline="25h", server_window="26h")},
            "longer than the 24h for which stripe remembers",
        ),
    ],
)
def test_a_wrong_setting_of_a_client_stops_at_once(options, words):
    with pytest.raises(Misconfigured, match=words):
        Client(**options)


def test_our_client_over_our_transport_retries_once_per_failure():
    """C-15: retries at one layer, not at two."""
    time = FakeTime()
    policy = RetryPolicy(attempts_max=3)
    with (
        FaultyServer(*[later(503, 0)] * 20) as server,
        Client(
            base_url=server.url, retry=policy, clock=time.clock, transport=Transport(retry=policy)
        ) as client,
    ):
        assert client.post("/charges").status_code == 503
    assert len(server.seen) == 3


def test_clients_may_share_one_budget():
    """C-14: the retries of all clients of one server are limited together."""
    time, budget = FakeTime(), RetryBudget(3)
    with FaultyServer(*[later(503, 0)] * 50) as server:
        for _ in range(5):
            with Client(base_url=server.url, budget=budget, clock=time.clock) as client:
                client.post("/charges")
    assert len(server.seen) == 5 + 3


# ------------------------------------------------------------------------------------- redirects


@on_all
def test_a_redirect_within_the_origin_keeps_key_and_body(driver):
    """C-22: a 307 is the same action."""
    with FaultyServer("redirect", "lose") as server:
        got = driver.post(f"{server.url}/charges", json={"a": 1}, follow=True)
    assert (got.status, len(server.effects)) == (201, 1)
    assert [seen.path for seen in server.seen] == ["/charges", "/moved", "/moved"]
    assert len({seen.body for seen in server.seen}) == 1
    if driver.name != "aiohttp-middleware":
        assert len(set(server.keys)) == 1


@on_clients
def test_a_redirect_to_another_origin_gets_no_key_and_is_sent_once(driver):
    """C-20, C-22: the other origin does not know the key."""
    with FaultyServer("lose") as other, FaultyServer("other-origin") as server:
        server.other = other.url
        headers = {"Authorization": "Bearer t"}
        got = driver.post(f"{server.url}/charges", json={}, headers=headers, follow=True)
    assert (other.keys, got.result.outcome, got.result.gave_up) == ([None], "unknown", "no-key")
    assert "Authorization" not in other.seen[0].headers


@on_clients
@pytest.mark.parametrize("body", [{"amount": 5}, {}], ids=str)
def test_a_redirect_to_another_origin_gets_no_key_in_the_body(driver, body):
    """C-20, C-22: the body is as the application wrote it."""
    with FaultyServer("lose") as other, FaultyServer("other-origin") as server:
        server.other = other.url
        got = driver.post(f"{server.url}/payments", json=body, preset="square", follow=True)
    assert "idempotency_key" in json.loads(server.seen[0].body)
    assert [json.loads(seen.body) for seen in other.seen] == [body]
    assert (got.result.outcome, got.result.gave_up) == ("unknown", "no-key")


@on_clients
def test_the_page_after_a_303_is_read_without_a_key(driver):
    with FaultyServer("see-other", "lose") as server:
        got = driver.post(f"{server.url}/charges", json={}, follow=True)
    assert got.status == 201
    assert [(seen.method, seen.key is None) for seen in server.seen] == [
        ("POST", False),
        ("GET", True),
        ("GET", True),
    ]


@on_clients
def test_endless_redirects_end_with_the_error_of_the_library(driver):
    with FaultyServer(*["redirect"] * 50) as server:
        got = driver.post(f"{server.url}/charges", json={}, follow=True)
    assert type(got.error).__name__ == "TooManyRedirects"


def test_history_is_what_the_library_says():
    with FaultyServer("redirect") as server, Client(follow_redirects=True) as client:
        response = client.post(f"{server.url}/charges")
        assert [hop.status_code for hop in response.history] == [307]
        assert str(response.url).endswith("/moved")


# --------------------------------------------------------------------------------------- presets


@on_all
def test_the_ietf_preset_sends_a_quoted_key(driver):
    """C-05: a structured-field string."""
    with FaultyServer("lose") as server:
        got = driver.post(f"{server.url}/charges", json={}, preset="ietf")
    assert server.keys == [f'"{got.result.key}"'] * 2


@on_all
def test_paypal_takes_the_key_in_its_own_header_and_retries_409(driver):
    with FaultyServer((409, {}, {}), "lose", key_header="PayPal-Request-Id") as server:
        got = driver.post(f"{server.url}/orders", json={}, preset="paypal")
    assert server.keys == [got.result.key] * 3
    assert len(server.effects) == 1


@on_all
def test_square_takes_the_key_in_the_body(driver):
    with FaultyServer("lose", key_member="idempotency_key") as server:
        got = driver.post(f"{server.url}/payments", json={"amount": 5}, preset="square")
    assert server.keys == [got.result.key] * 2
    assert (got.status, len(server.effects)) == (201, 1)
    assert json.loads(server.seen[0].body)["amount"] == 5
    assert len({seen.body for seen in server.seen}) == 1


@on_all
@pytest.mark.parametrize("body", [b'{"price": 1.10, "far": 1e400, "name": "\xc3\xa9"}', b" {}"])
def test_the_rest_of_the_body_is_sent_as_the_application_wrote_it(driver, body):
    """C-04: a number that is parsed and written again may be another number."""
    with FaultyServer("lose", key_member="idempotency_key") as server:
        got = driver.post(f"{server.url}/payments", content=body, preset="square")
    assert got.status == 201
    assert body.lstrip()[1:] in server.seen[0].body
    assert {seen.headers["Content-Length"] for seen in server.seen} == {
        str(len(server.seen[0].body))
    }


@on_all
def test_a_key_that_the_body_has_already_is_kept(driver):
    with FaultyServer("lose", key_member="idempotency_key") as server:
        body = {"idempotency_key": "k-3"}
        got = driver.post(f"{server.url}/payments", json=body, preset="square")
    assert (server.keys, got.result.key) == (["k-3"] * 2, "k-3")


@on_all
@pytest.mark.parametrize("member", [None, "", "  ", 17])
def test_a_member_that_is_no_key_is_refused_before_anything_is_sent(driver, member, server):
    """C-20: a server that takes it for no key would execute every attempt."""
    body = {"idempotency_key": member}
    with pytest.raises(Misconfigured, match="'idempotency_key' in the JSON body"):
        driver.post(f"{server.url}/payments", json=body, preset="square")
    assert server.seen == []


@on_clients
def test_an_expired_key_in_the_body_is_renewed_on_request(driver):
    expired = (400, {}, {"code": "key-expired"})
    with FaultyServer(expired, key_member="idempotency_key") as server:
        retry = RetryPolicy(renew_expired=True)
        got = driver.post(f"{server.url}/payments", json={"a": 1}, preset="square", retry=retry)
    assert got.status == 201
    assert len(set(server.keys)) == 2


@on_all
@pytest.mark.parametrize("content", [b"text", b"[1]", b""])
def test_a_body_that_cannot_take_the_key_is_refused(driver, content, server):
    with pytest.raises(Misconfigured, match="not a JSON object"):
        driver.post(f"{server.url}/payments", content=content, preset="square")
    assert server.seen == []


def test_adyen_retries_only_what_its_header_allows():
    time = FakeTime()
    script = [(500, {"transient-error": "true"}, {}), (500, {}, {})]
    with (
        FaultyServer(*script) as server,
        Client(base_url=server.url, preset="adyen", clock=time.clock) as client,
    ):
        assert client.post("/payments").status_code == 500
    assert len(server.seen) == 2


@pytest.mark.parametrize(("hint", "attempts"), [("true", 2), ("false", 1)])
def test_the_header_of_stripe_decides(hint, attempts):
    """C-16: also against the status."""
    time = FakeTime()
    status = 402 if hint == "true" else 500
    with (
        FaultyServer((status, {"Stripe-Should-Retry": hint}, {})) as server,
        Client(base_url=server.url, preset="stripe", clock=time.clock) as client,
    ):
        client.post("/charges")
    assert len(server.seen) == attempts


def test_an_api_of_your_own_is_a_preset():
    preset = Preset(name="own", key_header="X-Request-Id", methods={"PUT"}, key_chars_max=36)
    with FaultyServer(key_header="X-Request-Id") as server, Client(preset=preset) as client:
        client.put(f"{server.url}/a")
        client.post(f"{server.url}/a")
    assert [key is None for key in server.keys] == [False, True]


def test_every_preset_makes_keys_that_its_api_takes():
    lengths = {name: preset.key_chars_max for name, preset in PRESETS.items()}
    assert min(lengths.values()) >= 36
    assert lengths["paypal"] == 38
    assert set(PRESETS) == {"default", "ietf", "stripe", "paypal", "adyen", "square"}


def test_the_options_of_our_client_are_those_of_the_library():
    """R5: a misspelt option is a type error, and a new option of the library is found here."""
    import inspect

    import httpx

    from coatcheck.client.httpx_family import ClientOptions

    for library in (httpx, httpx2):
        taken = set(inspect.signature(library.Client).parameters)
        assert set(ClientOptions.__annotations__) - set(ClientSettings.__annotations__) == taken


def test_the_key_is_never_in_the_note_of_an_error():
    with FaultyServer("lose", "lose") as server, pytest.raises(httpx2.HTTPError) as raised:
        Client(clock=FakeTime().clock, retry=RetryPolicy(attempts_max=2)).post(server.url)
    note = raised.value.__notes__[0]
    assert re.search(r"after 2 attempts: all attempts are used\. The outcome is unknown", note)
    assert server.keys[0] not in note
