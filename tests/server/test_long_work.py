"""L10: long work. 202 first; the work goes on, and its response is served at the polling address."""

import asyncio
import gc
import importlib.util
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import coatcheck
from coatcheck import AsyncEngine, Engine, Happened, KeyBusy, KeyRejected, Misconfigured, Policy
from coatcheck.core.record import IN_DOUBT, RUNNING
from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.asgi.exchange import RUNNING_EXCHANGES
from coatcheck.server.body import LargeBody
from coatcheck.server.polling import wait_left_s
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.server.laws.api import Api, OpenApi
from tests.server.laws.shop import Call, Gate, Said, Shop, in_turn, raises, says
from tests.support.engines import Guards
from tests.support.http import ORDER, AsgiExchange, Response, environ_of, exchange_wsgi, with_key
from tests.support.times import WAIT_S_MAX, Clock, eventually
from tests.support.web_servers import UVICORN_ALONE, WAITRESS, Kind, Server

ASYNC = [("Prefer", "respond-async")]


@pytest.fixture
def api(open_api: OpenApi) -> Api:
    return open_api(in_flight="202")


@pytest.fixture
def guards(request: pytest.FixtureRequest) -> Iterator[Guards]:
    """Engines of workers, of the same flavour as the adapter."""
    guards = Guards(is_async=request.node.callspec.params["open_api"] == "asgi")
    yield guards
    guards.close()


# Over WSGI a handler cannot go on after its response, so the first client waits for that.
over_asgi = pytest.mark.parametrize("open_api", ["asgi"], indirect=True)
over_wsgi = pytest.mark.parametrize("open_api", ["wsgi"], indirect=True)


class Accepting(Gate):
    """A handler that accepts, and then waits until the test opens it."""

    def __init__(self, handler=None, accept: Callable[[Any], Any] = lambda op: op.accept()) -> None:
        super().__init__(handler)
        self._accept = accept

    def __call__(self, call: Call) -> Said:
        self._accept(call.operation)
        return super().__call__(call)


def accepting(api: Api, handler=None) -> Accepting:
    gate = api.shop.answers["/orders"] = Accepting(handler)
    return gate


def members_of(response: Response) -> dict[str, Any]:
    assert response.header("content-type") == "application/json", response
    members: dict[str, Any] = json.loads(response.body)
    return members


def address_of(response: Response) -> str:
    address = response.header("location")
    assert address is not None, response
    return address


def poll(api: Api, address: str) -> Response:
    """Ask until it is finished, as a client does."""
    eventually(lambda: api.send("GET", address).status != 202)
    return api.send("GET", address)


# --- operation.accept -----------------------------------------------------------------------


@over_asgi
def test_the_first_client_is_answered_at_once_and_the_work_goes_on(api: Api):
    """L10: 202 first; the stored response there and on retries when it has finished."""
    gate = accepting(api, says(201, b"done"))
    first = api.post()
    assert (first.status, first.header("retry-after")) == (202, "1")
    assert members_of(first) == {"status": "running", "reference": first.reference, "attempt": 1}
    assert first.all("preference-applied") == []
    assert api.send("GET", address_of(first)).status == 202
    gate.open()
    polled, retried = poll(api, address_of(first)), api.post()
    assert (polled.status, polled.body) == (retried.status, retried.body) == (201, b"done")
    assert polled.is_replay
    assert retried.is_replay
    assert {polled.reference, retried.reference} == {first.reference}
    assert api.effects() == 1


@over_asgi
def test_the_work_is_started_once_however_often_it_is_asked_for(api: Api):
    """L1, L3, L10: all get the same address."""
    gate = accepting(api)
    answers = [api.start_post() for _ in range(10)]
    told = [answer.result(WAIT_S_MAX) for answer in answers]
    assert {(answer.status, answer.header("location")) for answer in told} == {
        (202, address_of(told[0]))
    }
    gate.open()
    assert poll(api, address_of(told[0])).status == 201
    assert api.effects() == 1


@over_asgi
def test_accepting_twice_changes_nothing(api: Api):
    """L10."""

    def handler(call: Call) -> Said:
        call.operation.accept()
        call.operation.accept()
        return says(201, b"done")(call)

    api.shop.answers["/orders"] = handler
    first = api.post()
    assert first.status == 202
    assert poll(api, address_of(first)).body == b"done"


def test_a_client_that_asks_sees_how_far_it_is(api: Api):
    """L10: and in which attempt."""
    reached = threading.Semaphore(0)
    go_on = threading.Semaphore(0)

    def handler(call: Call) -> Said:
        operation = call.operation
        for fraction, words in ((0.25, "a quarter"), (None, "nearly")):
            operation.progress(fraction, words)
            reached.release()
            assert go_on.acquire(timeout=WAIT_S_MAX)
        return says(201, b"done")(call)

    api.shop.answers["/orders"] = handler
    api.start_post()
    assert reached.acquire(timeout=WAIT_S_MAX)
    reached.release()
    address = address_of(api.post())
    for progress in (
        {"fraction": 0.25, "words": "a quarter"},
        {"fraction": None, "words": "nearly"},
    ):
        assert reached.acquire(timeout=WAIT_S_MAX)
        members = members_of(api.send("GET", address))
        assert (members["progress"], members["attempt"]) == (progress, 1)
        go_on.release()
    assert poll(api, address).body == b"done"


@pytest.mark.parametrize("status", [500, 503, 429])
@over_asgi
def test_accepted_work_that_fails_can_be_asked_for_again(api: Api, status: int):
    """L4, L10: a poll says to retry, and the retry is the next attempt."""
    gate = accepting(api, in_turn(says(status, b"no"), says(201, b"done")))
    address = address_of(api.post())
    gate.open()
    members = members_of(poll(api, address))
    assert (members["status"], members["retry"]) == ("failed", "same-key")
    again = api.post()
    assert (again.status, members_of(again)["attempt"]) == (202, 2)
    assert poll(api, address).body == b"done"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_work_that_fails_can_be_asked_for_again(api: Api, status: int):
    """L4, L10: also where only a duplicate has the address."""
    gate = Gate(says(status, b"no"))
    api.shop.answers["/orders"] = in_turn(gate, says(201, b"done"))
    first = api.start_post()
    gate.wait_until_entered()
    address = address_of(api.post())
    gate.open()
    assert first.result(WAIT_S_MAX).status == status
    members = members_of(poll(api, address))
    assert (members["status"], members["retry"]) == ("failed", "same-key")
    assert api.post().body == b"done"
    assert poll(api, address).body == b"done"


@over_asgi
def test_work_that_raises_is_logged_and_can_be_asked_for_again(api: Api, caplog):
    """L4, L10: the server, which has answered, does not get the error."""
    gate = accepting(api, in_turn(raises(RuntimeError("a bug")), says(201, b"done")))
    with caplog.at_level(logging.ERROR, "coatcheck"):
        first = api.post()
        assert first.status == 202
        gate.open()
        assert members_of(poll(api, address_of(first)))["status"] == "failed"
        eventually(lambda: "failed after its client had stopped waiting" in caplog.text)
    assert api.post().status == 202
    assert poll(api, address_of(first)).body == b"done"


@pytest.mark.parametrize("status", [200, 303, 403, 404, 415])
@over_asgi
def test_a_refusal_after_the_202_is_kept(api: Api, status: int):
    """L4, L10: its client has been answered, and would never see it."""
    gate = accepting(api, says(status, b"not for you"))
    address = address_of(api.post())
    gate.open()
    assert poll(api, address).body == b"not for you"
    assert (api.post().status, api.effects()) == (status, 1)


def test_a_keep_function_that_fails_keeps_the_response_of_a_worker(api, queue, guards, caplog):
    """L10, L12: nothing runs again because of it."""

    def keep(_response: object) -> bool:
        raise ZeroDivisionError("a bug in keep")

    deferring(api, queue)
    address = address_of(api.post())
    engine = guards.engine(api.store, Policy(keep=keep), clock=api.clock, sweep_every_s=None)
    headers = [("Content-Type", "text/plain")]
    work = guards.flavoured(lambda: Happened(500, headers, b"body"))
    guards.done(engine.run_deferred(queue.take(), work))
    assert (api.send("GET", address).body, api.post().status) == (b"body", 500)
    assert "a bug in keep" in caplog.text


@over_asgi
def test_accepted_work_with_too_large_a_response_has_happened(open_api):
    """L12: the record says that it happened."""
    api = open_api(in_flight="202", response_bytes_max=3)
    gate = accepting(api, says(201, b"too", b" long", b" to keep"))
    address = address_of(api.post())
    gate.open()
    assert poll(api, address).code == "result-unavailable"
    assert api.effects() == 1


@pytest.mark.parametrize(("recovery", "status"), [("retry", 201), ("manual", 409)])
def test_work_of_a_dead_process_is_shown_as_interrupted_and_recovered(
    open_api, clock, recovery, status
):
    """L5, L10: a poll says to retry; the policy decides what the retry gets."""
    api = open_api(in_flight="202", lease="60s", recovery=recovery)
    api.claim("k-1", "/orders")
    address = address_of(api.post())
    clock.advance(60)
    members = members_of(api.send("GET", address))
    assert (members["status"], members["attempt"]) == ("interrupted", 1)
    assert members["retry"] == "same-key"
    assert api.post().status == status


def test_work_that_lives_in_this_process_is_not_shown_as_interrupted(open_api, clock):
    """L5, L10: its renewals did not come through, but the executor is in this process."""
    api = open_api(in_flight="202", lease="60s")
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    api.start_post()
    gate.wait_until_entered()
    address = address_of(api.post())
    api.engine.attempts.heartbeat.stop()
    clock.advance(61)
    assert members_of(api.send("GET", address))["status"] == "running"
    gate.open()
    assert poll(api, address).body == b"done"


# --- where it cannot be ---------------------------------------------------------------------


@over_asgi
def test_a_handler_accepts_whatever_becomes_of_duplicates(open_api):
    """L10: also where they are refused."""
    api = open_api(in_flight="409")
    gate = accepting(api, says(201, b"done"))
    first = api.post()
    assert first.status == 202
    assert api.post().status == 409
    gate.open()
    assert poll(api, address_of(first)).body == b"done"


@over_wsgi
@pytest.mark.parametrize("in_flight", ["202", "409"])
def test_over_wsgi_a_handler_cannot_accept(open_api, in_flight: str):
    """L10: it cannot go on after its response; the error says what to do, and a retry runs."""
    api = open_api(in_flight=in_flight)
    api.shop.answers["/orders"] = in_turn(Accepting(), says(201, b"done"))
    first = api.post()
    assert isinstance(first.error, Misconfigured)
    assert "operation.defer()" in str(first.error)
    assert api.post().body == b"done"


@pytest.mark.parametrize(("method", "message"), [("accept", "no client"), ("defer", r"defer\(\)")])
def test_a_function_can_neither_accept_nor_defer(api: Api, method: str, message: str):
    """L10: it has no client."""

    def function() -> None:
        getattr(coatcheck.current_operation(), method)()

    with pytest.raises(Misconfigured, match=message):
        api.run("key", function)


def test_in_transaction_mode_there_is_nothing_to_ask_for(tmp_path: Path):
    """L9, L10: nothing is there before it is all there; and what a client prefers is not done."""
    engine = Engine(f"sqlite:///{tmp_path}/t.db", Policy(mode="transaction", in_flight="202"))
    shop = Shop()
    app = WsgiMiddleware(shop.wsgi, engine=engine)
    shop.answers["/orders"] = in_turn(Accepting(), says(201, b"done"))
    headers = with_key("k-1", ASYNC)
    first, second = (
        exchange_wsgi(app, environ_of("POST", "/orders", headers, ORDER)) for _ in range(2)
    )
    assert isinstance(first.error, Misconfigured)
    assert (second.status, second.body) == (201, b"done")
    engine.close()


# --- Prefer ---------------------------------------------------------------------------------


@over_asgi
def test_a_client_that_prefers_it_gets_202_at_once(api: Api):
    """L10: RFC 7240, without a word of the handler's."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.post(headers=ASYNC)
    assert (first.status, first.header("preference-applied")) == (202, "respond-async")
    gate.wait_until_entered()
    second = api.post(headers=ASYNC)
    assert (second.status, second.header("preference-applied")) == (202, "respond-async")
    gate.open()
    assert poll(api, address_of(first)).body == b"done"
    assert api.effects() == 1


@over_wsgi
def test_over_wsgi_only_a_duplicate_gets_202(api: Api):
    """L10: the first client waits for its response, whatever it prefers."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post(headers=ASYNC)
    gate.wait_until_entered()
    second = api.post(headers=ASYNC)
    assert (second.status, second.header("preference-applied")) == (202, "respond-async")
    gate.open()
    response = first.result(WAIT_S_MAX)
    assert (response.status, response.body) == (201, b"done")
    assert response.all("preference-applied") == []
    assert poll(api, address_of(second)).body == b"done"
    assert api.post().is_replay
    assert api.effects() == 1


def test_a_client_that_waits_a_little_gets_the_answer_if_it_is_there_by_then(api: Api):
    """L10."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.start_post(headers=[("Prefer", "respond-async, wait=20")])
    gate.wait_until_entered()
    second = api.start_post(headers=[("Prefer", "respond-async, wait=20")])
    gate.open()
    for answer in (first, second):
        response = answer.result(WAIT_S_MAX)
        assert (response.status, response.body) == (201, b"done")
        assert response.all("preference-applied") == []


@over_asgi
def test_a_client_that_has_waited_as_long_as_it_said_gets_202(api: Api):
    """L10."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    begun = time.monotonic()
    first = api.post(headers=[("Prefer", "respond-async, wait=1")])
    assert first.status == 202
    assert 0.9 < time.monotonic() - begun < WAIT_S_MAX
    gate.open()
    assert poll(api, address_of(first)).body == b"done"


def test_a_duplicate_that_has_waited_as_long_as_it_said_gets_202(api: Api, clock: Clock):
    """L10."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    api.start_post()
    gate.wait_until_entered()
    duplicate = api.start_post(headers=[("Prefer", "respond-async, wait=1")])
    eventually(lambda: api.waiters() == 1)
    assert not duplicate.done()
    clock.advance(1)
    told = duplicate.result(WAIT_S_MAX)
    assert (told.status, told.header("preference-applied")) == (202, "respond-async")
    gate.open()
    assert poll(api, address_of(told)).body == b"done"


@over_asgi
def test_a_client_that_has_waited_as_a_duplicate_does_not_wait_as_long_again(
    api: Api, clock: Clock
):
    """L10: the client's time began when its request came, and not when its turn did."""
    before, after = Gate(says(503, b"not now")), Gate(says(201, b"done"))
    api.shop.answers["/orders"] = in_turn(before, after)
    first = api.start_post()
    before.wait_until_entered()
    second = api.start_post(headers=[("Prefer", "respond-async, wait=50")])
    eventually(lambda: api.waiters() == 1)
    clock.advance(49.9)
    before.open()
    assert first.result(WAIT_S_MAX).status == 503
    told = second.result(WAIT_S_MAX)  # a tenth of a second later, and not another fifty
    assert (told.status, members_of(told)["attempt"]) == (202, 2)
    after.open()
    assert poll(api, address_of(told)).body == b"done"


def test_a_client_waits_no_longer_than_it_said_whatever_the_clock_does():
    """L10, C1."""
    came_ms = 1_800_000_000_000
    for passed_ms, left_s in ((0, 10), (2_500, 7.5), (10_000, 0), (60_000, 0), (-60_000, 10)):
        assert wait_left_s(10, came_ms, came_ms + passed_ms) == left_s
    assert wait_left_s(0, came_ms, came_ms) == 0


@pytest.mark.parametrize("prefer", ["respond-async wait", "return=minimal", "wait=0"])
def test_other_and_malformed_preferences_change_nothing(open_api, prefer: str):
    """L10, F1: nor does one on a route that does not grant it, or before a refusal."""
    api = open_api(in_flight="202")
    assert api.post(headers=[("Prefer", prefer)]).status == 201
    assert api.post(body=b'{"item": 2}', headers=ASYNC).code == "key-reused"
    assert open_api().post("k-2", headers=ASYNC).status == 201


@over_asgi
def test_what_a_client_prefers_is_no_part_of_its_request(api: Api):
    """F1: the retry may prefer something else."""
    gate = api.shop.answers["/orders"] = Gate(says(201, b"done"))
    first = api.post(headers=ASYNC)
    assert first.status == 202
    gate.open()
    assert poll(api, address_of(first)).status == 201
    assert api.post().is_replay


# --- defer ----------------------------------------------------------------------------------


class Queue:
    """The tokens of deferred work."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def take(self) -> str:
        eventually(lambda: bool(self.texts))
        return self.texts.pop(0)


def deferring(api: Api, queue: Queue, handler=None, **options: Any) -> None:
    """Let the shop defer every order."""

    def defer_order(call: Call) -> Said:
        queue.texts.append(call.operation.defer(**options))
        return (handler or says(200, b"never seen"))(call)

    api.shop.answers["/orders"] = defer_order


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def resume(api: Api, guards: Guards, clock: Clock):
    """`engine.run_deferred` of another process: a sync or an async engine on the same store."""
    engine = guards.engine(api.store, Policy(in_flight="202"), clock=clock, sweep_every_s=None)
    return lambda text, function, *args, **options: guards.done(
        engine.run_deferred(text, guards.flavoured(function), *args, **options)
    )


def test_deferred_work_is_done_elsewhere(api: Api, queue: Queue, resume, caplog):
    """L10: 202; then what the worker returns, as the response of the request."""
    deferring(api, queue)
    first = api.post()
    assert (first.status, members_of(first)["status"]) == (202, "running")
    address = address_of(first)
    assert (api.send("GET", address).status, api.post().status) == (202, 202)

    def work(item: int) -> Happened:
        operation = coatcheck.current_operation()
        assert (operation.reference, operation.attempt) == (first.reference, 1)
        return Happened(201, [("Content-Type", "text/plain"), ("X-Item", str(item))], b"made")

    served = resume(queue.take(), work, 7)
    assert (served.status, served.body) == (201, b"made")
    assert served.headers == [(b"content-type", b"text/plain"), (b"x-item", b"7")]
    polled, retried = api.send("GET", address), api.post()
    for response in (polled, retried):
        assert (response.status, response.header("x-item"), response.body) == (201, "7", b"made")
        assert response.is_replay
    assert api.effects() == 1
    assert "new generation" not in caplog.text


@pytest.mark.parametrize("result", [None, 0, "", {"n": [1, "ü"]}])
def test_a_json_value_is_an_answer_of_json(api: Api, queue: Queue, resume, result):
    """L10."""
    deferring(api, queue)
    address = address_of(api.post())
    resume(queue.take(), lambda: result)
    polled = api.send("GET", address)
    assert (polled.status, polled.header("content-type")) == (200, "application/json")
    assert json.loads(polled.body) == result


def test_however_often_it_is_delivered_it_is_done_once(api: Api, queue: Queue, guards, clock):
    """L1, L10: at the same time, and later; the second delivery gets the result, or is refused."""
    deferring(api, queue)
    address = address_of(api.post())
    text, calls, go_on = queue.take(), [], threading.Event()

    def work() -> str:
        calls.append(1)
        assert go_on.wait(WAIT_S_MAX)
        return "made"

    def deliver(_number: int) -> object:
        engine = guards.engine(api.store, clock=clock, sweep_every_s=None)
        try:
            return guards.done(engine.run_deferred(text, guards.flavoured(work), policy=waiting))
        except KeyBusy as error:
            return error

    waiting = Policy(in_flight="409")
    with ThreadPoolExecutor(8) as threads:
        deliveries = [threads.submit(deliver, number) for number in range(8)]
        eventually(lambda: sum(delivery.done() for delivery in deliveries) == 7)
        assert all(isinstance(d.result(), KeyBusy) for d in deliveries if d.done())
        go_on.set()
    assert sum(not isinstance(d.result(), KeyBusy) for d in deliveries) == 1
    assert deliver(8).body == b'"made"'
    assert calls == [1]
    assert api.send("GET", address).body == b'"made"'


def test_a_worker_takes_its_own_steps_after_those_of_the_handler(api: Api, queue: Queue, resume):
    """L7, L10: also where a worker has failed between two of them."""
    deferring(api, queue)
    defer_order, fails, taken = api.shop.answers["/orders"], [True], []

    def reserve(call: Call) -> Said:
        call.operation.step("reserve", lambda: taken.append("reserve"))
        return defer_order(call)

    def work() -> str:
        operation = coatcheck.current_operation()
        in_a_thread(lambda: operation.step("charge", lambda: taken.append("charge")))
        if fails.pop():
            raise ZeroDivisionError
        in_a_thread(lambda: operation.step("ship", lambda: taken.append("ship")))
        return "shipped"

    api.shop.answers["/orders"] = reserve
    api.post()
    text = queue.take()
    with pytest.raises(ZeroDivisionError):
        resume(text, work)
    fails.append(False)
    assert resume(text, work).body == b'"shipped"'
    assert taken == ["reserve", "charge", "ship"]


def stepping_worker(*names: str, fails: bool = False, ends: Any = "made", **options: Any):
    """A worker of one release: it takes these steps, and fails in the last if it *fails*."""

    def run(name: str) -> None:
        if fails and name == names[-1]:
            raise ZeroDivisionError

    def work() -> Any:
        operation = coatcheck.current_operation()
        for name in names:
            in_a_thread(lambda name=name: operation.step(name, run, name, **options))
        return ends

    return work


@pytest.mark.parametrize("is_deferred_again", [True, False])
def test_a_step_that_a_worker_has_begun_is_not_forgotten_by_the_next(
    api: Api, queue: Queue, resume, is_deferred_again
):
    """L6, L10: of another release, delivered again or handed over anew by the client's retry."""
    deferring(api, queue)
    address = address_of(api.post())
    text = queue.take()
    with pytest.raises(ZeroDivisionError):
        resume(text, stepping_worker("ship", fails=True, at_most_once=True))
    if is_deferred_again:
        assert api.post().status == 202
        text = queue.take()
    with pytest.raises(coatcheck.StepInDoubt, match="ship"):
        resume(text, stepping_worker())
    assert api.send("GET", address).code == "outcome-unknown"


@pytest.mark.parametrize("is_deferred_again", [True, False])
def test_a_step_that_a_worker_has_finished_is_asked_for_by_the_next(
    api: Api, queue: Queue, resume, is_deferred_again
):
    """L7, L10: or it refuses; the handler's own steps are not the worker's to ask for."""
    deferring(api, queue)
    defer_order = api.shop.answers["/orders"]

    def reserve(call: Call) -> Said:
        call.operation.step("reserve", lambda: None)
        return defer_order(call)

    def delivered(key: str) -> str:
        api.post(key=key)
        text = queue.take()
        with pytest.raises(ZeroDivisionError):
            resume(text, stepping_worker("pack", "ship", fails=True))
        if not is_deferred_again:
            return text
        api.post(key=key)
        return queue.take()

    api.shop.answers["/orders"] = reserve
    assert resume(delivered("same"), stepping_worker("pack", "ship")).body == b'"made"'
    refusal = coatcheck.Happened(422, [], b"sold out")
    assert resume(delivered("refused"), stepping_worker(ends=refusal)).status == 422
    with pytest.raises(coatcheck.StepsChanged, match="pack"):
        resume(delivered("changed"), stepping_worker())


def in_a_thread(call: Callable[[], Any]) -> Any:
    """What *call* returns, where no event loop runs: the async engine is sync there."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result(WAIT_S_MAX)


def test_a_worker_that_fails_lets_the_next_delivery_try_again(api: Api, queue: Queue, resume):
    """L4, L10: the error is the worker's, and the queue's to act on."""
    deferring(api, queue)
    address = address_of(api.post())
    text, attempts = queue.take(), []

    def work() -> str:
        operation = coatcheck.current_operation()
        attempts.append(operation.attempt)
        if len(attempts) == 1:
            raise ZeroDivisionError
        return "made"

    with pytest.raises(ZeroDivisionError):
        resume(text, work)
    assert members_of(api.send("GET", address))["status"] == "failed"
    assert resume(text, work).body == b'"made"'
    assert attempts == [1, 2]


def test_a_result_that_can_be_no_response_is_not_kept(api: Api, queue: Queue, resume, caplog):
    """L12: it happened, and that is known."""
    deferring(api, queue)
    address = address_of(api.post())
    with caplog.at_level(logging.ERROR, "coatcheck"):
        resume(queue.take(), lambda: {1, 2})
    assert "neither JSON nor Happened" in caplog.text
    assert api.send("GET", address).code == "result-unavailable"


def test_a_message_that_is_lost_is_recovered_when_the_lease_is_over(
    api: Api, queue: Queue, resume, clock
):
    """L5, L10: the client's retry goes through the policy; an old message changes nothing."""
    deferring(api, queue, lease="10m")
    address = address_of(api.post())
    lost = queue.take()
    clock.advance(600 - 1)
    assert (api.send("GET", address).status, api.post().status) == (202, 202)
    clock.advance(1)
    assert members_of(api.send("GET", address))["status"] == "interrupted"
    assert members_of(api.post())["attempt"] == 2
    with pytest.raises(KeyBusy):
        resume(lost, raises(AssertionError("twice")))
    assert resume(queue.take(), lambda: "made").body == b'"made"'
    assert resume(lost, raises(AssertionError("twice"))).body == b'"made"'


def test_a_late_message_that_was_not_begun_is_still_good(api: Api, queue: Queue, resume, clock):
    """L10: the lease is over, but no retry has come since."""
    deferring(api, queue)
    address = address_of(api.post())
    clock.advance(3_600)
    assert resume(queue.take(), lambda: "made").body == b'"made"'
    assert api.send("GET", address).body == b'"made"'


def test_where_nothing_may_run_twice_a_dead_worker_leaves_a_doubt(open_api, queue, guards, clock):
    """L6, L10: the first delivery is taken, and then its process dies."""
    api = open_api(in_flight="202", recovery="manual")
    deferring(api, queue)
    address = address_of(api.post())
    text = queue.take()
    (record,) = api.store.find(coatcheck.stores.Query(state=RUNNING)).records
    taken = record._replace(version=record.version + 1, nonce=1)
    assert api.store.swap([coatcheck.core.record.Swap(record.id, record.version, taken)]) == [None]
    clock.advance(61)
    engine = guards.engine(api.store, Policy(recovery="manual"), clock=clock, sweep_every_s=None)
    with pytest.raises(coatcheck.OutcomeUnknown):
        guards.done(engine.run_deferred(text, guards.flavoured(raises(AssertionError("twice")))))
    assert api.store.get([record.id])[0].state == IN_DOUBT
    assert api.send("GET", address).code == "outcome-unknown"


@pytest.mark.parametrize("handler", [says(503, b"the queue is away"), raises(OSError("away"))])
def test_a_handler_that_fails_after_deferring_takes_it_back(api: Api, queue: Queue, handler):
    """L4, L10: its client gets the error, and its retry runs."""
    deferring(api, queue, handler)
    first = api.post()
    assert first.status in (500, 503)
    deferring(api, queue)
    assert members_of(api.post())["attempt"] == 2


def test_a_handler_that_refuses_after_deferring_ends_it(api: Api, queue: Queue, resume):
    """L2, L10: its response is final, and the worker gets it."""
    deferring(api, queue, says(404, b"no such item"))
    assert api.post().body == b"no such item"
    served = resume(queue.take(), raises(AssertionError("it is over")))
    assert (served.status, served.body) == (404, b"no such item")


def test_a_worker_may_be_quicker_than_the_handler_that_defers(api: Api, queue: Queue, resume):
    """L10: done before the handler has returned; and it cannot take it back any more."""

    def work(status: int) -> Callable[[Call], Said]:
        def done_meanwhile(call: Call) -> Said:
            in_a_thread(lambda: resume(queue.take(), lambda: "made"))
            return says(status, b"too late")(call)

        return done_meanwhile

    deferring(api, queue, work(200))
    first = api.post("k-1")
    assert first.status == 202
    assert api.send("GET", address_of(first)).body == b'"made"'
    deferring(api, queue, work(503))
    assert api.post("k-2").body == b'"made"'


@over_asgi
def test_a_handler_may_accept_and_then_defer(api: Api, queue: Queue, resume):
    """L10: the client is answered once."""

    def handler(call: Call) -> Said:
        call.operation.accept()
        queue.texts.append(call.operation.defer())
        return says(200)(call)

    api.shop.answers["/orders"] = handler
    address = address_of(api.post())
    resume(queue.take(), lambda: "made")
    assert api.send("GET", address).body == b'"made"'


def test_a_route_that_lets_duplicates_wait_can_defer_too(open_api, queue: Queue):
    """L10: over WSGI as well, because its thread need not go on."""
    api = open_api(in_flight="409")
    deferring(api, queue)
    first = api.post()
    assert (first.status, api.post().status) == (202, 409)
    assert api.send("GET", address_of(first)).status == 202


def test_only_tokens_with_the_same_secret_are_resumed(api: Api, queue: Queue, guards):
    """X3: a text is sealed with the deployment's secret."""
    deferring(api, queue)
    api.post()
    other = guards.engine(api.store, secret="another", clock=api.clock)
    with pytest.raises(KeyRejected, match="same secret"):
        guards.done(other.run_deferred(queue.take(), guards.flavoured(print)))


@pytest.mark.parametrize("lease", ["soon", 0, -1])
def test_a_lease_that_is_none_is_refused(api: Api, queue: Queue, lease):
    """L10."""
    deferring(api, queue, lease=lease)
    assert isinstance(api.post().error, Misconfigured)


# --- what is particular to ASGI -------------------------------------------------------------


async def say(send, status: int = 201, body: bytes = b"done", **rest: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [], **rest})
    await send({"type": "http.response.body", "body": body})


def story_of(app, story: Callable[..., Any]) -> None:
    """Run *story* with the guarded *app*, on an event loop of its own."""

    async def told() -> None:
        async with AsyncEngine("memory://", Policy(in_flight="202")) as engine:
            await story(IdempotencyMiddleware(app, engine=engine))

    asyncio.run(asyncio.wait_for(told(), WAIT_S_MAX))


async def post(app, **headers: str) -> Response:
    lines = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return await AsgiExchange("POST", "/orders", with_key("k-1", lines), ORDER).run(app)


async def all_ended() -> None:
    """Wait until no exchange runs any more."""
    await asyncio.to_thread(eventually, lambda: not RUNNING_EXCHANGES)


def test_work_outlives_a_front_that_is_cancelled_after_the_answer():
    """L10, L11: the middleware in front goes on with the 202."""
    go_on, calls = asyncio.Event(), []

    async def app(asgi_scope, receive, send) -> None:
        calls.append(1)
        await asgi_scope["coatcheck.operation"].accept()
        await go_on.wait()
        await say(send)

    async def story(guarded) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            assert (await post(guarded)).status == 202
        assert len(RUNNING_EXCHANGES) == 1
        go_on.set()
        await all_ended()
        assert (await post(guarded)).is_replay

    story_of(app, story)
    assert calls == [1]


def test_a_client_that_hangs_up_while_it_waits_does_not_stop_the_work():
    """L10, L11."""
    is_entered, go_on = asyncio.Event(), asyncio.Event()

    async def app(asgi_scope, receive, send) -> None:
        is_entered.set()
        await go_on.wait()
        await say(send)

    async def story(guarded) -> None:
        request = asyncio.create_task(post(guarded, Prefer="respond-async, wait=20"))
        await is_entered.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        go_on.set()
        await all_ended()
        assert (await post(guarded)).is_replay

    story_of(app, story)


def test_a_client_that_is_gone_at_the_202_does_not_stop_the_work():
    """L10, L11: a server may say so with an OSError."""

    async def app(asgi_scope, receive, send) -> None:
        await asgi_scope["coatcheck.operation"].accept()
        await say(send)

    async def story(guarded) -> None:
        exchange = AsgiExchange("POST", "/orders", with_key("k-1", ()), ORDER)

        async def gone(_message) -> None:
            raise ConnectionResetError

        await guarded(exchange.asgi_scope, exchange.receive, gone)
        await all_ended()
        assert (await post(guarded)).is_replay

    story_of(app, story)


def test_work_that_ends_while_its_202_is_sent_does_not_cut_it_off():
    """L10: a server takes a response for incomplete that is not sent when the application ends."""
    is_sending, is_said = asyncio.Event(), asyncio.Event()

    async def app(asgi_scope, receive, send) -> None:
        await is_sending.wait()
        await say(send)
        is_said.set()

    class Slow(AsgiExchange):
        async def send(self, message) -> None:
            is_sending.set()
            await is_said.wait()
            for _ in range(10):  # so that everything else goes on as far as it can
                await asyncio.sleep(0)
            await super().send(message)

    async def story(guarded) -> None:
        headers = with_key("k-1", [("Prefer", "respond-async, wait=1")])
        assert (await Slow("POST", "/orders", headers, ORDER).run(guarded)).status == 202
        await all_ended()
        assert (await post(guarded)).is_replay

    story_of(app, story)


def test_an_endless_stream_after_the_202_is_ended():
    """L10, L12: the application gets the disconnect of its client."""
    ended = asyncio.Event()

    async def app(asgi_scope, receive, send) -> None:
        await asgi_scope["coatcheck.operation"].accept()
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async def story(guarded) -> None:
        assert (await post(guarded)).status == 202
        await ended.wait()
        await all_ended()
        assert (await post(guarded)).code == "result-unavailable"

    story_of(app, story)


def test_an_application_that_closes_down_waits_for_the_work_that_was_accepted():
    """L10: so that nothing is closed under its hands."""
    go_on, order = asyncio.Event(), []

    async def app(asgi_scope, receive, send) -> None:
        if asgi_scope["type"] == "lifespan":
            await receive()
            await receive()
            order.append("closed")
            return
        await asgi_scope["coatcheck.operation"].accept()
        await go_on.wait()
        order.append("finished")
        await say(send)

    async def story(guarded) -> None:
        messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        lifespan = asyncio.create_task(guarded({"type": "lifespan"}, messages.get, None))
        messages.put_nowait({"type": "lifespan.startup"})
        assert (await post(guarded)).status == 202
        messages.put_nowait({"type": "lifespan.shutdown"})
        await asyncio.sleep(0)
        go_on.set()
        await lifespan

    story_of(app, story)
    assert order == ["finished", "closed"]


def test_an_accepted_request_is_freed_when_it_ends():
    """X2: no reference cycle is left, with a timer or without."""

    class Lease:
        """Something of the request that can be watched."""

    async def app(asgi_scope, receive, send) -> None:
        await asgi_scope["coatcheck.operation"].accept()
        await say(send)

    async def story(guarded) -> None:
        held = Lease()
        watched = weakref.ref(held)
        headers = with_key("k-1", [("Prefer", "respond-async, wait=20")])
        exchange = AsgiExchange("POST", "/orders", headers, ORDER)
        exchange.asgi_scope["held"] = held
        del held
        assert (await exchange.run(guarded)).status == 202
        await all_ended()
        del exchange
        await asyncio.sleep(0)
        assert watched() is None

    gc.collect()
    gc.disable()
    try:
        story_of(app, story)
    finally:
        gc.enable()


def test_a_large_request_is_still_there_when_its_client_has_been_answered():
    """L10: it is in a file, which is closed when the work has ended."""
    sizes, go_on, body = [], asyncio.Event(), b"x" * 3_000_000

    async def app(asgi_scope, receive, send) -> None:
        await asgi_scope["coatcheck.operation"].accept()
        await go_on.wait()
        more_body, size = True, 0
        while more_body:
            message = await receive()
            size, more_body = size + len(message["body"]), message["more_body"]
        sizes.append(size)
        await say(send)

    async def story(guarded) -> None:
        exchange = AsgiExchange("POST", "/orders", with_key("k-1"), body)
        assert (await exchange.run(guarded)).status == 202
        (running,) = RUNNING_EXCHANGES
        kept = running._request.body
        assert isinstance(kept, LargeBody)  # not in memory
        go_on.set()
        await all_ended()
        assert kept._file.closed

    story_of(app, story)
    assert sizes == [len(body)]


def test_a_handler_may_accept_from_an_event_loop_of_its_own():
    """L10: in a thread that runs one."""

    async def app(asgi_scope, receive, send) -> None:
        operation = asgi_scope["coatcheck.operation"]

        async def elsewhere() -> None:
            await operation.accept()

        await asyncio.to_thread(asyncio.run, elsewhere())
        await say(send)

    async def story(guarded) -> None:
        assert (await post(guarded)).status == 202
        await all_ended()
        assert (await post(guarded)).is_replay

    story_of(app, story)


# --- what is particular to WSGI -------------------------------------------------------------


def test_the_application_runs_and_is_closed_in_the_thread_of_the_server():
    """L10: connections that belong to a thread are returned there."""
    threads: list[int] = []

    class Closing(list):
        def close(self) -> None:
            threads.append(threading.get_ident())

    def app(_environ, start_response):
        threads.append(threading.get_ident())
        start_response("201 Created", [("Content-Type", "text/plain")])
        return Closing([b"done"])

    with Engine("memory://", Policy(in_flight="202")) as engine:
        environ = environ_of("POST", "/orders", with_key("k-1"), ORDER)
        guarded = WsgiMiddleware(app, engine=engine)
        assert exchange_wsgi(guarded, environ).body == b"done"
    assert threads == [threading.get_ident()] * 2


# --- in real servers ------------------------------------------------------------------------

APP = "tests.server.long_work_app"
HALF = {"fraction": 0.5, "words": "half of it"}


@pytest.fixture(scope="module", params=[UVICORN_ALONE, WAITRESS], ids=lambda kind: kind.name)
def server(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Server]:
    server = Server(request.param, tmp_path_factory.mktemp("work"), APP)
    yield server
    server.close()


def release(server: Server, key: str) -> None:
    (server.directory / f"release-{key}").touch()


def polled(server: Server, first: Response, is_over: Callable[[Response], bool]) -> Response:
    """Ask at the address in *first* until *is_over*."""
    answers: list[Response] = []

    def ask() -> bool:
        answers.append(server.exchange("GET", address_of(first)))
        return is_over(answers[-1])

    eventually(ask)
    return answers[-1]


def result(server: Server, first: Response) -> Response:
    return polled(server, first, lambda response: response.status != 202)


def progress(server: Server, first: Response) -> object:
    """What the work has reported, as soon as it has."""
    response = polled(server, first, lambda response: "progress" in json.loads(response.body))
    return json.loads(response.body)["progress"]


@pytest.mark.parametrize("path", ["/jobs", "/jobs/sync"])
def test_a_real_server_answers_first_and_the_work_goes_on(server: Server, path: str):
    """L10: also for more work than it has threads, and in a handler that is no coroutine."""
    keys = [f"{path[1:]}-{number}".replace("/", "-") for number in range(10)]
    firsts = [server.post(key, path) for key in keys]
    assert {first.status for first in firsts} == {202}
    assert progress(server, firsts[0]) == HALF
    for key in keys:
        release(server, key)
    for key, first in zip(keys, firsts, strict=True):
        final = result(server, first)
        assert (final.status, json.loads(final.body)) == (201, {"done": key})
        assert server.post(key, path).is_replay
        assert server.lines_of("effects").count(f"{key} 1") == 1


def test_work_that_fails_after_the_answer_leaves_the_connection_in_order(server: Server):
    """L4, L10: and is logged."""
    first = server.post("broken", "/broken")
    assert first.status == 202
    assert members_of(result(server, first))["status"] == "failed"
    assert server.exchange("GET", "/pid").status == 200
    eventually(lambda: "after the client has been answered" in server.log())


@pytest.mark.parametrize(
    ("kind", "recovery"),
    [(UVICORN_ALONE, "reconcile"), (UVICORN_ALONE, "manual"), (WAITRESS, "retry")],
)
def test_a_process_that_is_killed_in_accepted_work_leaves_it_to_the_policy(
    tmp_path: Path, kind: Kind, recovery: str
):
    """L5, L6, L10: kill -9; a poll finds it interrupted, and a retry goes by the policy."""
    server = Server(kind, tmp_path, APP, WORK_LEASE="1s", WORK_RECOVERY=recovery)
    first = server.post("k-1", "/jobs")
    assert (first.status, progress(server, first)) == (202, HALF)
    server.kill()
    server.begin()
    interrupted = result(server, first)
    if interrupted.status == 200:  # unless it has been recovered already
        members = members_of(interrupted)
        assert (members["status"], members["retry"]) == ("interrupted", "same-key")
        assert members["progress"] == HALF
    retried = server.post("k-1", "/jobs")
    if recovery == "manual":
        assert (retried.status, retried.code) == (409, "outcome-unknown")
    elif recovery == "reconcile":
        assert (retried.status, json.loads(retried.body)) == (201, {"asked about": "k-1"})
        assert result(server, first).body == retried.body
    else:
        assert (retried.status, members_of(retried)["attempt"]) == (202, 2)
        release(server, "k-1")
        assert json.loads(result(server, first).body) == {"done": "k-1"}
    attempts = ["k-1 1", "k-1 2"] if recovery == "retry" else ["k-1 1"]
    assert server.lines_of("effects") == attempts
    server.close()


# --- the example ----------------------------------------------------------------------------


def test_the_example_answers_first_and_works_on(monkeypatch, tmp_path: Path):
    """L10: in its own process, and through a queue that delivers twice."""
    monkeypatch.chdir(tmp_path)
    path = Path(__file__).resolve().parents[2] / "examples" / "long_work.py"
    spec = importlib.util.spec_from_file_location("long_work", path)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "long_work", example)
    spec.loader.exec_module(example)

    async def story() -> None:
        transport = httpx.ASGITransport(example.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:

            async def send(path: str) -> httpx.Response:
                headers = {"Idempotency-Key": "k"}
                return await client.post(path, json={"title": "T", "pages": 3}, headers=headers)

            async def finished(address: str) -> httpx.Response:
                deadline = asyncio.get_running_loop().time() + WAIT_S_MAX
                while (response := await client.get(address)).status_code == 202:
                    assert asyncio.get_running_loop().time() < deadline
                    await asyncio.sleep(0.005)
                return response

            report = await send("/reports")
            assert report.status_code == 202
            assert (await finished(report.headers["Location"])).json() == {"report": "T"}
            assert (await send("/reports")).status_code == 201
            film = await send("/films")
            assert film.status_code == 202
            example.queue.put_nowait(await delivered_twice(example))
            assert (await example.work_off_one()).body == b"T, cut"
            assert (await finished(film.headers["Location"])).text == "T, cut"
        await example.engine.close()

    asyncio.run(asyncio.wait_for(story(), WAIT_S_MAX))


async def delivered_twice(example) -> Any:
    """What was in the queue; it has been worked off once, and comes again."""
    message = await example.queue.get()
    example.queue.put_nowait(message)
    assert (await example.work_off_one()).status == 201
    return message
