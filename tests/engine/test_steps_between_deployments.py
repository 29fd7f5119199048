"""A handler that was changed between two attempts: what was begun or done is not forgotten (L6, L7).

Each test deploys one version of a handler, lets an attempt of it die or fail, and deploys another.
"""

import asyncio
import io
from typing import NamedTuple

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from coatcheck import DidNotHappen, Happened, Policy, current_operation
from coatcheck.core.progress import progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT
from coatcheck.errors import OutcomeUnknown, StepInDoubt, StepsChanged
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from coatcheck.stores.memory import AsyncMemoryStore
from tests.support.engines import Clock, WatchedStore

BY_ADA = {"by": "ada", "why": "asked the bank"}


class Killed(BaseException):
    """Nobody catches it: the attempt has died where this is raised."""


class Release:
    """One version of a handler: the steps it takes, and how it ends."""

    def __init__(self, runs, *steps, ends="done", dies_in="", **options):
        self.runs = runs
        self.steps = steps
        self.options = options
        self.ends = ends
        self.dies_in = dies_in

    def _run(self, name):
        self.runs.append(name)
        if self.dies_in == name:
            raise Killed
        return name

    def _end(self):
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends

    def __call__(self):
        for name in self.steps:
            current_operation().step(name, self._run, name, **self.options)
        return self._end()

    async def awaited(self):
        for name in self.steps:
            await current_operation().step(name, self._run, name, **self.options)
        return self._end()


class Deployed:
    """One engine and one key, for whatever release is deployed."""

    def __init__(self, guards):
        self.guards = guards
        self.clock = Clock()
        self.store = WatchedStore()
        self.engine = guards.engine(
            self.store, Policy(lease="60s"), clock=self.clock, sweep_every_s=None
        )

    def run(self, release):
        call = release.awaited if self.guards.is_async else release
        return self.guards.done(self.engine.run("order", call, scope="shop"))

    def rerun(self, release):
        call = release.awaited if self.guards.is_async else release
        return self.guards.done(self.engine.rerun(self.store.record.id, call, **BY_ADA))

    def die(self, release):
        """An attempt of *release* dies, and its lease runs out."""
        with pytest.raises(Killed):
            self.run(release)
        self.clock.pass_s(61)


@pytest.fixture
def deployed(guards):
    return Deployed(guards)


@pytest.fixture
def runs():
    return []


# --- a step that was begun --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"at_most_once": True}, {"probe": lambda _operation: DidNotHappen()}]
)
def test_a_step_that_was_begun_is_not_run_again_by_a_release_that_calls_it_plain(
    deployed, runs, options
):
    """L6: what was declared when it began counts, and not what is declared now."""
    deployed.die(Release(runs, "charge", dies_in="charge", **options))
    with pytest.raises(StepInDoubt):
        deployed.run(Release(runs, "charge"))
    assert deployed.store.record.state == IN_DOUBT
    assert runs == ["charge"]


def test_a_release_may_bring_the_probe_that_knows(deployed, runs):
    """L6: then there is no doubt."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))
    later = Release(runs, "charge", probe=lambda _operation: Happened(value="found"))
    assert deployed.run(later) == "done"
    assert runs == ["charge"]


def test_a_step_that_was_begun_and_is_gone_leaves_a_doubt(deployed, runs):
    """L6: whatever else the next release does, nobody has found out what became of the charge."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))
    with pytest.raises(StepInDoubt, match="charge"):
        deployed.run(Release(runs))
    assert deployed.store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        deployed.run(Release(runs))


def test_a_step_that_was_begun_stays_for_the_attempt_after_one_that_fails(deployed, runs):
    """L6: an error ends nothing, so it hides nothing."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))
    with pytest.raises(ValueError, match="early"):
        deployed.run(Release(runs, ends=ValueError("early")))
    assert deployed.store.record.state == FAILED
    with pytest.raises(StepInDoubt):
        deployed.run(Release(runs))


def test_a_step_that_this_attempt_has_seen_fail_is_its_own_matter(guards, deployed):
    """L7: a declined card is an answer, and the handler may go on after it."""

    def declined():
        raise ValueError("declined")

    def handle():
        with pytest.raises(ValueError, match="declined"):
            current_operation().step("charge", declined, at_most_once=True)
        return current_operation().step("notify", lambda: "told")

    async def handle_async():
        with pytest.raises(ValueError, match="declined"):
            await current_operation().step("charge", declined, at_most_once=True)
        return await current_operation().step("notify", lambda: "told")

    handler = handle_async if guards.is_async else handle
    assert guards.done(deployed.engine.run("order", handler, scope="shop")) == "told"
    assert deployed.store.record.state == COMPLETED


def test_a_doubt_that_a_function_swallows_and_returns_after_is_still_one(guards, deployed, runs):
    """L6: its result does not count."""
    deployed.die(Release(runs, "charge", dies_in="charge", at_most_once=True))

    def swallow():
        with pytest.raises(StepInDoubt):
            current_operation().step("charge", runs.append, "again", at_most_once=True)
        return "all is well"

    async def swallow_async():
        with pytest.raises(StepInDoubt):
            await current_operation().step("charge", runs.append, "again", at_most_once=True)
        return "all is well"

    handler = swallow_async if guards.is_async else swallow
    with pytest.raises(StepInDoubt):
        guards.done(deployed.engine.run("order", handler, scope="shop"))
    assert (deployed.store.record.state, runs) == (IN_DOUBT, ["charge"])


# --- a step that is done ----------------------------------------------------------------------


def test_a_step_that_is_done_and_gone_fails_loudly(deployed, runs):
    """L7: the attempt has answered without knowing what was done, and runs no second time."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(StepsChanged, match="'charge'"):
        deployed.run(Release(runs))
    assert deployed.store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        deployed.run(Release(runs))
    assert runs == ["charge", "ship"]


def test_an_attempt_that_raises_need_not_have_asked_for_what_is_done(deployed, runs):
    """L7: its own error is told, the claim is given back, and the next one goes on."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(ValueError, match="sold out"):
        deployed.run(Release(runs, ends=ValueError("sold out")))
    assert deployed.store.record.state == FAILED
    assert deployed.run(Release(runs, "charge", "ship")) == "done"
    assert runs == ["charge", "ship", "ship"]


def test_a_person_may_run_what_takes_no_steps(deployed, runs):
    """L6: whoever has looked, and says what to run, knows what is done."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(StepsChanged):
        deployed.run(Release(runs))
    assert deployed.rerun(Release(runs, ends="by hand")) == "by hand"
    assert deployed.store.record.state == COMPLETED


def test_a_person_who_runs_the_release_that_began_it_goes_on(deployed, runs):
    """L6, L7: what is done stays done."""
    deployed.die(Release(runs, "charge", "ship", dies_in="ship"))
    with pytest.raises(StepsChanged):
        deployed.run(Release(runs))
    assert deployed.rerun(Release(runs, "charge", "ship")) == "done"
    assert runs == ["charge", "ship", "ship"]


# --- over HTTP --------------------------------------------------------------------------------


class Case(NamedTuple):
    """What the first release leaves, and what the second answers; what is told, and how it ends."""

    leaves: str
    answers: int
    told: int
    state: int


ANSWERS = pytest.mark.parametrize(
    "case",
    [
        Case("begun", 201, 409, IN_DOUBT),  # the doubt would vanish
        Case("begun", 422, 409, IN_DOUBT),  # and the money is gone, perhaps
        Case("begun", 503, 503, FAILED),  # nothing is final, so nothing is lost
        Case("done", 201, 409, IN_DOUBT),  # it says "done", and does not know what was
        Case("done", 422, 422, COMPLETED),  # it refuses, which is for the handler to decide
        Case("done", 503, 503, FAILED),
        Case("done", 401, 401, FAILED),
    ],
)


class Shop:
    """A route whose first release takes a step, and whose second takes none."""

    def __init__(self, case):
        self.case = case
        self.store = WatchedStore()
        self.requests = 0

    def take(self, operation):
        """What the first release does; to be awaited where that has to be."""
        call = self._fail if self.case.leaves == "begun" else (lambda: "charged")
        return operation.step("charge", call, at_most_once=self.case.leaves == "begun")

    def _fail(self):
        raise TimeoutError("no answer")

    def check(self, caplog):
        """It was answered so, and the record says so; a doubt is in the log with its reason."""
        assert self.store.record.state == self.case.state
        assert progress_of(self.store.record).step("charge") is not None
        is_loud = any("'charge'" in message for message in caplog.messages)
        assert is_loud == (self.case.told == 409)


@ANSWERS
def test_an_answer_without_the_step_over_asgi(case, caplog):
    """L6, L7."""
    shop = Shop(case)
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store=AsyncMemoryStore(shop.store))

    @app.post("/orders")
    async def place(operation: CurrentOperation):
        shop.requests += 1
        if shop.requests > 1:
            return JSONResponse({}, status_code=case.answers)
        await shop.take(operation)
        return JSONResponse({}, status_code=503)

    async def main():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            await client.post("/orders", headers={"Idempotency-Key": "k"})
            return await client.post("/orders", headers={"Idempotency-Key": "k"})

    assert asyncio.run(main()).status_code == case.told
    shop.check(caplog)


@pytest.mark.parametrize("in_flight", ["409", "202"])
@ANSWERS
def test_an_answer_without_the_step_over_wsgi(case, caplog, in_flight):
    """L6, L7: in the server's thread, and in one of its own."""
    shop = Shop(case)
    started = []

    def application(environ, start_response):
        shop.requests += 1
        if shop.requests > 1:
            start_response(f"{case.answers} So", [])
        else:
            shop.take(environ["coatcheck.operation"])
            start_response("503 Oh no", [])
        return [b""]

    guarded = WsgiMiddleware(application, store=shop.store, policy=Policy(in_flight=in_flight))

    def post():
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/orders",
            "QUERY_STRING": "",
            "HTTP_IDEMPOTENCY_KEY": "k",
            "wsgi.input": io.BytesIO(b""),
        }
        list(guarded(environ, lambda status, *_: started.append(status)))

    if case.leaves == "begun":
        with pytest.raises(TimeoutError):
            post()
    else:
        post()
    post()
    assert started[-1][:3] == str(case.told)
    shop.check(caplog)
