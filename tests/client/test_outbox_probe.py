"""Actions whose outcome is unknown: a probe finds out, or a person does."""

import asyncio

import pytest

import coatcheck.client.httpx2
from coatcheck import Response
from coatcheck.client import RetryPolicy
from coatcheck.client.outbox import AsyncOutbox, Done, Refused, SendAgain, Unknown
from tests.support.faulty_server import FaultyServer

UNKNOWN = (409, {}, {"code": "outcome-unknown", "retry": "never"})
EXPIRED = (409, {}, {"code": "key-expired", "retry": "never"})
FOUND = Response(200, [], b"found")


@pytest.mark.parametrize(
    "found", [Done(FOUND), Refused(FOUND, "no stock"), Refused(None, "no stock")], ids=str
)
def test_what_a_probe_finds_is_the_outcome_and_the_lane_continues(make, found):
    """C3: it is called with the whole action."""
    asked = []

    def probe(action):
        asked.append(action)
        return found

    with FaultyServer(UNKNOWN) as server:
        outbox = make(probe=probe, workers=1)
        first = outbox.submit("POST", server.url, json={"n": 1}, lane="a")
        second = outbox.submit("POST", server.url, lane="a")
        outbox.drain()
    assert first.result() == found
    assert isinstance(second.result(), Done)
    (action,) = asked
    assert (action.key, action.body, action.reason) == (first.key, b'{"n": 1}', "outcome-unknown")
    assert (action.method, action.url, action.answer.status) == ("POST", server.url, 409)


def test_what_did_not_happen_is_sent_again_with_the_same_key(make, time):
    """C3, C5: also when it is older than the window of the server."""
    with FaultyServer("lose", "lose") as server:
        outbox = make(server_window="2h", probe=lambda _: SendAgain())
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
        time.advance(2 * 3_600)
        outbox.drain()  # it is too old, so it is looked for
        time.advance(60)
        outbox.drain()
    assert isinstance(ticket.result(), Done)
    assert server.keys == [ticket.key] * 3


def test_a_new_key_is_sent_only_if_the_probe_says_so(make, time):
    """C5: a server that does not know what came of the first key answers so for ever."""
    with FaultyServer(UNKNOWN, "lose", "lose") as server:
        outbox = make(probe=lambda _: SendAgain(new_key=True))
        ticket = outbox.submit("POST", server.url)
        for _ in range(3):
            outbox.drain()
            time.advance(60)
        assert isinstance(ticket.result(), Done)
    first, *rest = server.keys
    assert first == ticket.key
    assert len(set(rest)) == 1  # and that key is kept
    assert rest[0] != ticket.key
    assert len(server.effects) == 1


@pytest.mark.parametrize("found", ["none", "error", "nonsense"])
def test_what_a_probe_cannot_find_out_waits_for_a_person(make, time, caplog, found):
    """C3: it is asked again later, less and less often."""
    asked = []

    def probe(action):
        asked.append(time.now_s)
        if found == "error":
            raise OSError("the ledger is down")
        return None if found == "none" else "maybe"

    with FaultyServer(UNKNOWN) as server:
        outbox = make(probe=probe)
        ticket = outbox.submit("POST", server.url)
        for _ in range(20):
            outbox.drain()
            time.advance(1)
        outcome = ticket.result()
        assert isinstance(outcome, Unknown)
        assert (outcome.reason, outcome.response.status) == ("outcome-unknown", 409)
        assert 3 <= len(asked) <= 6
        if found != "none":
            assert ("the probe failed" in caplog.text) is (found == "error")
            assert ticket.key[:8] in caplog.text
        assert outbox.retry(ticket.key)
        outbox.drain()
    assert isinstance(ticket.result(), Done)


@pytest.mark.parametrize("new_key", [False, True])
def test_a_person_says_that_it_did_not_happen(make, time, new_key):
    """C3, C5: `retry` alone does not send a key that the server may have forgotten."""
    with FaultyServer("lose", "lose") as server:
        outbox = make(server_window="2h")
        ticket = outbox.submit("POST", server.url)
        outbox.drain()
        time.advance(2 * 3_600)
        for _ in range(2):
            outbox.drain()
            assert isinstance(ticket.result(), Unknown)
            outbox.retry(ticket.key)
        outbox.drain()
        assert len(server.seen) == 2
        assert outbox.retry(ticket.key, did_not_happen=not new_key, new_key=new_key)
        outbox.drain()
        assert isinstance(ticket.result(), Done)
    assert (server.keys[-1] == ticket.key) is not new_key


def test_a_renewed_key_is_stored_before_it_is_sent(make, time):
    """C5: a lost answer to the new key is sent for with that key, not with a third one."""
    retry = RetryPolicy(attempts_max=1, renew_expired=True)
    with FaultyServer(EXPIRED, "lose", EXPIRED) as server:
        outbox = make(retry=retry)
        ticket = outbox.submit("POST", server.url)
        for _ in range(3):
            outbox.drain()
            time.advance(60)
        first, *rest = server.keys
        assert (first, len(set(rest)), len(rest)) == (ticket.key, 1, 2)
        assert len(server.effects) == 1
        assert isinstance(ticket.result(), Unknown)  # it is renewed once, not again and again


def test_an_outbox_on_an_event_loop_takes_both_kinds_of_probe(url, time):
    """C3."""

    async def probe_async(_):
        await asyncio.sleep(0)
        return Done(FOUND)

    async def work(api, probe):
        async with coatcheck.client.httpx2.AsyncClient(clock=time.clock) as client:
            outbox = AsyncOutbox(url, client=client, probe=probe)
            ticket = await outbox.submit("POST", api)
            await outbox.drain()
            outbox.close()
            return await ticket.result()

    for probe in (probe_async, lambda _: Done(FOUND)):
        with FaultyServer(UNKNOWN) as server:
            assert asyncio.run(work(server.url, probe)) == Done(FOUND)
