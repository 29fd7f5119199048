"""What is unusual but happens: redirects with large bodies, damaged answers, requests sent twice."""

import asyncio
import gzip
import pickle

import httpx
import httpx2
import pytest
import requests
import urllib3

import coatcheck.client.aiohttp
import coatcheck.client.httpx
import coatcheck.client.httpx2
import coatcheck.client.requests
from coatcheck.client import RetryPolicy, result_of
from coatcheck.client.httpx2 import AsyncClient, Client, Transport
from coatcheck.client.outbox import Done, Refused
from coatcheck.errors import Misconfigured
from tests.client.drivers import CLIENTS, DRIVERS, FakeTime
from tests.client.test_bodies import LARGE, SMALL, async_pieces, pieces
from tests.support.faulty_server import FaultyServer, later

on_all = pytest.mark.parametrize("driver", DRIVERS, ids=repr)
on_clients = pytest.mark.parametrize("driver", CLIENTS, ids=repr)
TWICE = RetryPolicy(attempts_max=2)
JSON = {"Content-Type": "application/json"}


@on_all
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("script", [["redirect"], ["lose", "redirect", "lose"]], ids=str)
def test_a_redirect_sends_the_whole_body_again(driver, content, script):
    """C2, C-22: a body that can be read only once, and is a file from 1 MiB on."""
    given = async_pieces(content) if driver.is_async else pieces(content)
    with FaultyServer(*script) as server:
        got = driver.post(f"{server.url}/upload", content=given, follow=True)
    assert (got.status, got.error) == (201, None)
    assert [seen.body == content for seen in server.seen] == [True] * (len(script) + 1)
    assert len(server.effects) <= (2 if driver.name == "aiohttp-middleware" else 1)


@on_all
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_redirect_sends_a_whole_file_again(driver, content, tmp_path):
    """C2, C-22."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with path.open("rb") as file, FaultyServer("redirect", "lose") as server:
        if driver.is_aiohttp or driver.is_requests:
            got = driver.post(f"{server.url}/upload", data=file, follow=True)
        else:
            got = driver.post(f"{server.url}/upload", files={"file": file}, follow=True)
    assert (got.status, got.error) == (201, None)
    assert [content in seen.body for seen in server.seen] == [True] * 3
    assert len({seen.body for seen in server.seen}) == 1


@on_clients
def test_the_deadline_covers_all_addresses_of_a_redirect(driver):
    """C-13, C-17: each address would otherwise have a deadline of its own."""
    with FaultyServer(later(503, 4), "redirect", later(503, 4), "redirect") as server:
        retry = RetryPolicy(deadline="6s")
        got = driver.post(f"{server.url}/charges", json={}, follow=True, retry=retry)
    assert (got.status, got.result.gave_up, got.result.outcome) == (503, "deadline", "unknown")
    assert [seen.path for seen in server.seen] == ["/charges", "/charges", "/moved"]


@on_clients
def test_a_redirect_is_not_followed_after_the_deadline(driver):
    """C-13, C-18: no attempt begins then; after a 503 it may have happened."""
    with FaultyServer(later(503, 1), "redirect") as server:
        time = FakeTime()
        server.before_answer = lambda: time.sleep(3)
        retry = RetryPolicy(deadline="6s")
        got = driver.post(f"{server.url}/charges", json={}, follow=True, retry=retry, time=time)
    assert isinstance(got.error, driver.errors)
    assert (got.result.gave_up, got.result.outcome) == ("deadline", "unknown")
    assert [seen.path for seen in server.seen] == ["/charges", "/charges"]


@on_clients
def test_a_lost_answer_before_a_redirect_is_not_forgotten(driver):
    """C-18: the other address refuses before it looks for the key."""
    with FaultyServer("lose", "redirect", (401, {}, {})) as server:
        got = driver.post(f"{server.url}/charges", json={}, follow=True)
    assert (got.status, got.result.outcome) == (401, "unknown")


@on_clients
@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_that_is_not_followed_did_not_do_it(driver, status):
    """C-18: it is not done; after a lost answer nothing is known."""
    moved = (status, {"Location": "/moved"}, b"")
    with FaultyServer(moved) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.status, got.result.outcome) == (status, "refused")
    with FaultyServer("lose", moved) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.status, got.result.outcome) == (status, "unknown")


@on_clients
@pytest.mark.parametrize("status", [302, 303])
def test_a_redirect_to_the_result_did_it(driver, status):
    with FaultyServer((status, {"Location": "/charges/1"}, b"")) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.status, got.result.outcome) == (status, "done")


@on_clients
def test_an_answer_that_cannot_be_decoded_is_sent_for_again(driver):
    """C-18: the effect has happened, and the client has no answer yet."""
    damaged = gzip.compress(b'{"charge": 1}')[:-9]
    broken = (201, {**JSON, "Content-Encoding": "gzip"}, b"no gzip" + damaged)
    with FaultyServer(broken) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.status, len(server.seen), len(set(server.keys))) == (201, 2, 1)
    with FaultyServer(*[broken] * 9) as server:
        got = driver.post(f"{server.url}/charges", json={}, retry=TWICE)
    assert isinstance(got.error, driver.errors)
    assert (got.result.outcome, got.result.gave_up) == ("unknown", "attempts")


@on_all
def test_the_type_of_a_problem_may_be_in_capitals(driver):
    """C-27: media types have no case."""
    problem = (409, {"Content-Type": "Application/Problem+JSON"}, {"code": "in-progress"})
    with FaultyServer(problem) as server:
        got = driver.post(f"{server.url}/charges", json={})
    assert (got.status, len(server.seen)) == (201, 2)


@pytest.mark.parametrize("ours", [coatcheck.client.httpx, coatcheck.client.httpx2])
def test_a_request_that_is_sent_twice_is_two_actions(ours):
    """C-03: a client does not keep the key of the first in the request."""
    with FaultyServer() as server, ours.Client() as client:
        request = client.build_request("POST", f"{server.url}/charges", json={})
        client.send(request)
        client.send(request)
        own = client.build_request("POST", server.url, headers={"Idempotency-Key": "k-1"})
        client.send(own)
        client.send(own)
    first, second, *rest = server.keys
    assert first != second
    assert rest == ["k-1"] * 2


def test_a_prepared_request_of_requests_is_two_actions_too():
    with FaultyServer() as server, coatcheck.client.requests.Session() as session:
        request = session.prepare_request(requests.Request("POST", server.url))
        session.send(request)
        session.send(request)
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize(
    "timeout", [(1, 2), (None, 2), 3, None, urllib3.Timeout(connect=1, read=2)], ids=str
)
def test_requests_takes_a_timeout_in_every_form(timeout):
    with FaultyServer() as server, coatcheck.client.requests.Session() as session:
        assert session.post(server.url, timeout=timeout).status_code == 201


def test_the_policy_of_an_action_may_not_outlast_the_memory_of_the_api():
    """C-17."""
    late = RetryPolicy(deadline="25h", server_window="26h")
    with Client(preset="stripe") as client, pytest.raises(Misconfigured, match="for which stripe"):
        client.action(retry=late)


@pytest.mark.parametrize("buffer", [True, False])
def test_an_accepted_response_that_is_streamed_returns_its_connection(buffer):
    """C1: otherwise each followed operation would take one from the pool."""
    done = (201, {"Idempotent-Replayed": "true"}, {"report": 1})
    policy = RetryPolicy(follow_accepted=True)
    limits = httpx2.Limits(max_connections=1)
    time = FakeTime()
    with FaultyServer(*["accept", done] * 3) as server:
        transport = Transport(
            httpx2.HTTPTransport(limits=limits), retry=policy, clock=time.clock, buffer=buffer
        )
        with httpx2.Client(transport=transport, timeout=2) as client:
            for _ in range(3):
                assert client.post(server.url).json() == {"report": 1}
    with (
        FaultyServer(*["accept", done] * 3) as server,
        Client(retry=policy, limits=limits, timeout=2, clock=time.clock) as client,
    ):
        for _ in range(3):
            with client.stream("POST", server.url) as response:
                assert response.read() == b'{"report": 1}'


def test_a_cancelled_call_keeps_its_key_and_the_client_goes_on():
    """C-18: the same action can be sent again, and happens once."""

    async def work(server):
        async with AsyncClient(base_url=server.url) as client:
            action = client.action()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await action.post("/charges", json={})
            assert action.attempts == 1
            assert action.result is None
            response = await action.post("/charges", json={})
            assert (response.status_code, action.was_replayed) == (201, True)
            assert (await client.post("/charges", json={})).status_code == 201

    with FaultyServer("hang") as server:
        asyncio.run(work(server))
    assert len(server.effects) == 2
    assert server.keys[0] == server.keys[1] != server.keys[2]


@on_clients
def test_every_attempt_goes_to_the_same_address_with_the_same_credential(driver):
    """C-23: there is no failover with the same key."""
    headers = {"Authorization": "Bearer t", "Cookie": "session=1"}
    refused = (503, {"Set-Cookie": "session=2"}, {})
    with FaultyServer("lose", refused, "reset") as server:
        got = driver.post(f"{server.url}/charges?region=eu", json={}, headers=headers)
    assert got.status == 201
    same = {
        (seen.path, seen.headers["Host"], seen.headers["Authorization"], seen.headers["Cookie"])
        for seen in server.seen
    }
    host = server.url.removeprefix("http://")
    assert same == {("/charges?region=eu", host, "Bearer t", "session=1")}


@on_clients
def test_an_answer_with_the_present_state_instead_of_the_first_one_is_a_success(driver):
    """C-26: PayPal answers a duplicate with the resource as it is now, and marks nothing."""
    latest = (200, JSON, {"id": "O-1", "status": "COMPLETED"})
    with FaultyServer("lose", latest, key_header="PayPal-Request-Id") as server:
        got = driver.post(f"{server.url}/orders", json={}, preset="paypal")
    assert (got.status, got.result.outcome, len(set(server.keys))) == (200, "done", 1)


@pytest.mark.parametrize("kind", ["httpx2", "httpx", "requests"])
@pytest.mark.parametrize("name", ["Zoë", "Зоя"])
def test_the_headers_of_an_answer_may_have_any_characters(make, kind, name):
    """C3: an answer that cannot be stored would be sent for again and again."""
    with FaultyServer((201, {"X-Name": name.encode().decode("latin-1")}, b"1")) as server:
        outbox = make(kind)
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
        outcome = ticket.result()
    assert isinstance(outcome, Done)
    assert (b"x-name", name.encode()) in outcome.response.headers


def test_an_outbox_is_not_content_with_a_redirect(make):
    """C3: a 307 that the client does not follow is not done."""
    with FaultyServer("redirect") as server:
        outbox = make()
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
    assert isinstance(ticket.result(), Refused)


def test_an_error_after_the_last_attempt_is_the_error_of_that_attempt():
    with FaultyServer("reset", (503, {}, {})) as server, Client(retry=TWICE) as client:
        response = client.post(server.url)
    assert (response.status_code, result_of(response).attempts) == (503, 2)
    with FaultyServer((503, {}, {}), "lose") as server, pytest.raises(httpx.HTTPError) as raised:
        coatcheck.client.httpx.Client(retry=TWICE).post(server.url)
    assert result_of(raised.value).attempts == 2


@pytest.mark.parametrize("kind", ["httpx2", "httpx", "requests"])
def test_the_error_of_a_status_has_the_result_of_its_response(kind):
    """C-18: `raise_for_status()` does not hide what is known."""
    ours = {"httpx2": coatcheck.client.httpx2.Client, "httpx": coatcheck.client.httpx.Client}
    with (
        FaultyServer((422, {}, {"code": "key-reused"})) as server,
        ours.get(kind, coatcheck.client.requests.Session)() as client,
    ):
        response = client.post(server.url)
        with pytest.raises((httpx2.HTTPError, httpx.HTTPError, requests.HTTPError)) as raised:
            response.raise_for_status()
    assert result_of(raised.value) is result_of(response)
    assert result_of(response).code == "key-reused"


def test_a_session_of_requests_can_be_pickled_with_its_settings():
    """As one of requests itself: for processes that get it as an argument."""
    session = coatcheck.client.requests.Session(preset="ietf", retry=TWICE)
    session.headers["X-Shop"] = "7"
    with FaultyServer("lose") as server, pickle.loads(pickle.dumps(session)) as copy:
        got = copy.post(server.url)
    assert (got.status_code, result_of(got).attempts) == (201, 2)
    assert server.keys == [f'"{result_of(got).key}"'] * 2
    assert server.seen[0].headers["X-Shop"] == "7"
