"""Steps, notes and progress as handlers use them, with both engines and over HTTP (L6, L7)."""

import asyncio
import functools
import inspect
import io
import threading

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from coatcheck import AsyncEngine, DidNotHappen, Happened, Policy, Unknown, current_operation
from coatcheck.core.deferred import DeferredToken, encode_token
from coatcheck.core.describe import story_of
from coatcheck.core.progress import progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING
from coatcheck.core.response import Response, encode_response, encode_value
from coatcheck.errors import (
    ClaimLost,
    KeyBusy,
    Misconfigured,
    OutcomeUnknown,
    ResultUnavailable,
    Resumable,
    StepInDoubt,
    StepsChanged,
)
from coatcheck.server.fastapi import CurrentOperation, IdempotencyMiddleware
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.support.engines import WatchedStore, held_up, wait_for

MANUAL = Policy(recovery="manual")


@pytest.fixture
def store():
    return WatchedStore()


@pytest.fixture
def engine(guards, store):
    return guards.engine(store)


class Shop:
    """A handler with two steps, which fails where it is told to."""

    def __init__(self, is_async, **options):
        self.is_async = is_async
        self.options = options
        self.charges = 0
        self.ships = 0
        self.fails_in = ""
        self.names = ("charge", "ship")

    def charge(self):
        self.charges += 1
        if self.fails_in == "charge":
            raise TimeoutError("no answer")
        return {"charge": self.charges}

    def ship(self):
        self.ships += 1
        if self.fails_in == "ship":
            raise TimeoutError("no answer")
        return b"parcel"

    @property
    def handler(self):
        return self._handle_async if self.is_async else self._handle

    def _handle(self):
        operation = current_operation()
        charged = operation.step(self.names[0], self.charge, **self.options)
        shipped = operation.step(self.names[1], self.ship)
        return [charged, shipped.decode(), operation.attempt]

    async def _handle_async(self):
        operation = current_operation()
        charged = await operation.step(self.names[0], self.charge, **self.options)
        shipped = await operation.step(self.names[1], self.ship)
        return [charged, shipped.decode(), operation.attempt]

    def run(self, guards, engine, **options):
        return guards.done(engine.run("order", self.handler, scope="shop", **options))


@pytest.fixture
def shop(guards):
    return Shop(guards.is_async)


def test_who_is_told_of_a_lost_claim_may_not_be_async(guards, engine):
    """L5: nobody would await it, and it would never be told."""

    async def stop():
        raise AssertionError

    def work():
        current_operation().on_lost(stop)

    with pytest.raises(Misconfigured, match=r"on_lost.*async"):
        guards.run(engine, "k", work)


# --- what is done stays done ------------------------------------------------------------------


def test_a_later_attempt_goes_on_after_the_last_finished_step(guards, engine, shop):
    """L7: it gets the first result, and charges no second time."""
    shop.fails_in = "ship"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    shop.fails_in = ""
    assert shop.run(guards, engine) == [{"charge": 1}, "parcel", 2]
    assert (shop.charges, shop.ships) == (1, 2)
    assert shop.run(guards, engine) == [{"charge": 1}, "parcel", 2]


def test_a_step_that_failed_is_taken_again(guards, engine, shop):
    """L7."""
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    shop.fails_in = ""
    assert shop.run(guards, engine) == [{"charge": 2}, "parcel", 2]


def test_a_renamed_step_fails_loudly_and_runs_nothing(guards, engine, shop):
    """L7: the handler was changed between two attempts."""
    shop.fails_in = "ship"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    shop.fails_in, shop.names = "", ("charge the card", "ship")
    with pytest.raises(StepsChanged, match="charge the card"):
        shop.run(guards, engine)
    assert shop.charges == 1


def test_the_same_name_twice_is_a_mistake(guards, engine, shop):
    """L7: the second would silently get the result of the first."""
    shop.names = ("charge", "charge")
    with pytest.raises(Misconfigured, match="a name of its own"):
        shop.run(guards, engine)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [(object(), "neither JSON nor bytes"), ("x" * 70_000, "can be stored")],
)
def test_a_result_that_cannot_be_remembered_is_refused(guards, engine, result, sentence):
    """L7: not forgotten in silence."""

    def handle():
        return current_operation().step("large", lambda: result)

    with pytest.raises(Misconfigured, match=sentence):
        guards.run(engine, "k", handle)


@pytest.mark.parametrize("result", [object(), "x" * 70_000], ids=["object", "large"])
@pytest.mark.parametrize("options", [{}, {"at_most_once": True}], ids=["plain", "once"])
def test_an_effect_is_not_repeated_because_its_result_cannot_be_kept(
    guards, engine, store, result, options
):
    """L7: it is done; the first attempt fails loudly, and later ones are in doubt."""
    runs = []

    def handle():
        return current_operation().step("export", lambda: runs.append(1) or result, **options)

    with pytest.raises(Misconfigured):
        guards.run(engine, "k", handle)
    with pytest.raises(StepInDoubt, match="could not be stored"):
        guards.run(engine, "k", handle)
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "k", handle)
    assert (runs, store.record.state) == ([1], IN_DOUBT)


def test_an_effect_is_not_repeated_because_all_results_together_are_too_many(guards, engine):
    """L7: the fifth of them runs once, like the others; and a sixth does not begin."""
    runs = []

    def export(number):
        runs.append(number)
        return "x" * 60_000

    def handle():
        for number in range(6):
            current_operation().step(f"export-{number}", export, number)

    async def handle_async():
        for number in range(6):
            await current_operation().step(f"export-{number}", export, number)

    handler = handle_async if guards.is_async else handle
    with pytest.raises(Misconfigured, match="262144 can be stored"):
        guards.done(engine.run("k", handler, scope="s"))
    with pytest.raises(StepInDoubt, match="export-3"):
        guards.done(engine.run("k", handler, scope="s"))
    assert runs == [0, 1, 2, 3]


def test_a_probe_gives_the_result_that_was_too_large_to_keep(guards, engine):
    """L7: where it is, for example."""
    runs = []

    def handle():
        return current_operation().step(
            *("export", lambda: runs.append(1) or "x" * 70_000),
            probe=lambda _operation: Happened(value={"file": 7}),
        )

    with pytest.raises(Misconfigured):
        guards.run(engine, "k", handle)
    assert guards.run(engine, "k", handle) == {"file": 7}
    assert runs == [1]


def test_a_handler_may_go_on_without_the_result(guards, engine, store):
    """L7: it knows what it needs; and another person's look finds what was not kept."""

    def handle():
        operation = current_operation()
        assert operation.steps == []
        with pytest.raises(Misconfigured):
            operation.step("export", object)
        assert operation.steps == ["export"]
        return "done"

    async def handle_async():
        with pytest.raises(Misconfigured):
            await current_operation().step("export", object)
        return "done"

    handler = handle_async if guards.is_async else handle
    assert guards.done(engine.run("k", handler, scope="s")) == "done"
    told = dict(story_of(store.record))
    assert told["step"] == "export: done by attempt 1, its result was not stored"


@pytest.mark.parametrize("outcome", ["resolve", "rerun"])
def test_a_person_cannot_have_it_run_again_either(guards, engine, store, outcome):
    """L6, L7: it is known to have happened; a person ends it with the answer that it should have."""
    runs = []

    def handle():
        return current_operation().step("export", lambda: runs.append(1) or object())

    with pytest.raises(Misconfigured):
        guards.run(engine, "k", handle)
    with pytest.raises(StepInDoubt):
        guards.run(engine, "k", handle)
    by_ada = {"by": "ada", "why": "the file is there"}
    if outcome == "resolve":
        guards.done(engine.resolve(store.record.id, DidNotHappen(), **by_ada))
        with pytest.raises(StepInDoubt):
            guards.run(engine, "k", handle)
    else:
        with pytest.raises(StepInDoubt):
            guards.done(engine.rerun(store.record.id, guards.flavoured(handle), **by_ada))
    guards.done(engine.resolve(store.record.id, Happened(value="exported"), **by_ada))
    assert guards.run(engine, "k", handle) == "exported"
    assert runs == [1]


def test_a_name_has_a_sensible_length(guards, engine):
    for name in ("", "x" * 101):
        with pytest.raises(Misconfigured, match="1 to 100 characters"):
            guards.run(engine, f"k{len(name)}", lambda name=name: take(name), scope="s")


def take(name):
    return current_operation().step(name, lambda: None)


@pytest.mark.parametrize("trouble", ["down", "deaf"])
def test_a_blink_of_the_store_does_not_lose_what_a_step_did(guards, engine, store, shop, trouble):
    """D2, L7: neither the write nor its answer."""
    store.troubles = ["", trouble, "", trouble]
    assert shop.run(guards, engine) == [{"charge": 1}, "parcel", 1]
    assert [step.name for step in progress_of(store.record).steps] == ["charge", "ship"]


# --- at most once -----------------------------------------------------------------------------


def test_a_step_at_most_once_is_parked_and_not_run_again(guards, engine, store):
    """L6: whatever the route's policy is, which is to retry here."""
    shop = Shop(guards.is_async, at_most_once=True)
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    assert store.record.state == FAILED
    shop.fails_in = ""
    with pytest.raises(StepInDoubt):
        shop.run(guards, engine)
    assert store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        shop.run(guards, engine)
    assert shop.charges == 1


@pytest.mark.parametrize(
    ("told", "charges"), [(Happened(value={"charge": 7}), 1), (DidNotHappen(), 2)]
)
def test_a_probe_is_asked_what_became_of_it(guards, engine, told, charges):
    """L6: it gets the operation, with its notes."""
    asked = []

    def probe(operation):
        asked.append(operation.attempt)
        return told

    shop = Shop(guards.is_async, at_most_once=True, probe=probe)
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    shop.fails_in = ""
    charged, _, attempt = shop.run(guards, engine)
    assert charged == {"charge": 7 if charges == 1 else 2}
    assert (asked, attempt, shop.charges) == ([2], 2, charges)


@pytest.mark.parametrize(("probe", "charges"), [(None, 1), (lambda _: DidNotHappen(), 2)])
def test_a_step_that_raised_is_in_doubt_for_the_same_attempt_as_well(
    guards, engine, store, probe, charges
):
    """L6: a handler that catches the error and takes the step again does not run it again."""
    shop = Shop(guards.is_async, at_most_once=True, probe=probe)
    shop.fails_in = "charge"

    def insist():
        with pytest.raises(TimeoutError):
            current_operation().step("charge", shop.charge, **shop.options)
        shop.fails_in = ""
        return current_operation().step("charge", shop.charge, **shop.options)

    async def insist_async():
        with pytest.raises(TimeoutError):
            await current_operation().step("charge", shop.charge, **shop.options)
        shop.fails_in = ""
        return await current_operation().step("charge", shop.charge, **shop.options)

    handler = insist_async if guards.is_async else insist
    if probe is None:
        with pytest.raises(StepInDoubt):
            guards.done(engine.run("order", handler, scope="shop"))
        assert store.record.state == IN_DOUBT
    else:
        assert guards.done(engine.run("order", handler, scope="shop")) == {"charge": 2}
    assert shop.charges == charges


def test_a_renewal_that_is_heard_of_late_does_not_hide_what_was_begun(guards, engine, store):
    """L6: a renewal is written first, and known here when the step has begun on top of that."""
    shop = Shop(guards.is_async, at_most_once=True)
    shop.fails_in = "charge"

    def begin():
        (lease,) = engine.attempts.heartbeat.leases.values()
        return lease, lease.claim

    def insist():
        lease, renewed = begin()
        with pytest.raises(TimeoutError):
            current_operation().step("charge", shop.charge, at_most_once=True)
        lease.renewed(renewed)
        return current_operation().step("charge", shop.charge, at_most_once=True)

    async def insist_async():
        lease, renewed = begin()
        with pytest.raises(TimeoutError):
            await current_operation().step("charge", shop.charge, at_most_once=True)
        lease.renewed(renewed)
        return await current_operation().step("charge", shop.charge, at_most_once=True)

    handler = insist_async if guards.is_async else insist
    with pytest.raises(StepInDoubt):
        guards.done(engine.run("order", handler, scope="shop"))
    assert (store.record.state, shop.charges) == (IN_DOUBT, 1)


def test_a_probe_that_does_not_know_parks_it(guards, engine, store):
    """L6."""
    shop = Shop(guards.is_async, probe=lambda _operation: Unknown())
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    with pytest.raises(StepInDoubt):
        shop.run(guards, engine)
    assert store.record.state == IN_DOUBT


def test_a_probe_that_raises_does_not_know(guards, engine, store, caplog):
    """L6: in doubt, with the probe's own error in the log; nothing runs."""
    asked = []

    def probe(_operation):
        asked.append(1)
        raise ConnectionError("the provider is away")

    shop = Shop(guards.is_async, at_most_once=True, probe=probe)
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    shop.fails_in = ""
    with pytest.raises(StepInDoubt):
        shop.run(guards, engine)
    assert (store.record.state, shop.charges, asked) == (IN_DOUBT, 1, [1])
    (line,) = [record for record in caplog.records if record.exc_info]
    assert "'charge'" in line.getMessage()
    assert isinstance(line.exc_info[1], ConnectionError)


def test_a_probe_that_is_awaited_and_raises_does_not_know(store, caplog):
    """L6."""

    async def probe(_operation):
        raise ConnectionError("the provider is away")

    async def main():
        engine = AsyncEngine(store_of(store))
        shop = Shop(is_async=True, probe=probe)
        shop.fails_in = "charge"
        with pytest.raises(TimeoutError):
            await engine.run("order", shop.handler, scope="shop")
        with pytest.raises(StepInDoubt):
            await engine.run("order", shop.handler, scope="shop")
        await engine.close()
        return shop.charges

    assert asyncio.run(main()) == 1
    assert store.record.state == IN_DOUBT
    assert "ConnectionError" in caplog.text


def test_a_probe_that_learns_that_its_claim_is_lost_says_so(guards, engine, store):
    """L5, L6: that is no doubt about the step; another attempt is at it."""

    def probe(operation):
        record = store.record
        store._records[record.id] = record._replace(nonce=1, attempt=9, version=record.version + 1)
        return operation.note("asking")

    shop = Shop(guards.is_async, probe=probe)
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)
    with pytest.raises(KeyBusy):  # as whoever else asks while that one runs
        shop.run(guards, engine)
    assert (store.record.nonce, store.record.state) == (1, RUNNING)


def test_a_doubt_that_the_handler_swallows_is_still_one(guards, engine, store):
    """L6: its answer does not count."""
    shop = Shop(guards.is_async, at_most_once=True)
    shop.fails_in = "charge"
    with pytest.raises(TimeoutError):
        shop.run(guards, engine)

    def swallow():
        try:
            current_operation().step("charge", shop.charge, at_most_once=True)
        except StepInDoubt:
            raise ValueError("something else") from None

    async def swallow_async():
        try:
            await current_operation().step("charge", shop.charge, at_most_once=True)
        except StepInDoubt:
            raise ValueError("something else") from None

    handler = swallow_async if guards.is_async else swallow
    with pytest.raises(ValueError, match="something else"):
        guards.done(engine.run("order", handler, scope="shop"))
    assert store.record.state == IN_DOUBT


# --- notes and progress -----------------------------------------------------------------------


def test_notes_are_there_before_what_they_announce(guards, engine, store):
    """L7: for whoever has to find out later."""
    seen = []

    def handle():
        noted = current_operation().note({"gateway": "acme", "amount": 5})
        return look() if noted is None else after(noted)

    def look():
        seen.extend(note.what for note in progress_of(store.record).notes)
        seen.extend(note.what for note in current_operation().notes)

    async def after(noted):
        await noted
        look()

    guards.run(engine, "k", handle)
    assert seen == [{"gateway": "acme", "amount": 5}] * 2
    assert progress_of(store.record).notes[0].attempt == 1  # and it stays


def test_a_reconciler_sees_the_notes_of_the_attempt_before(guards, store):
    """L6: of one that failed, under a policy that asks."""
    notes = []

    def ask(operation):
        notes.extend(note.what for note in operation.notes)
        return Happened(value="found")

    engine = guards.engine(store, Policy(recovery="reconcile", reconcile=ask))

    def fail():
        noted = current_operation().note("about to charge")
        return failing(noted) if inspect.isawaitable(noted) else failed()

    def failed():
        raise TimeoutError

    async def failing(noted):
        await noted
        raise TimeoutError

    with pytest.raises(TimeoutError):
        guards.run(engine, "k", fail, scope="s")
    assert guards.run(engine, "k", fail, scope="s") == "found"
    assert notes == ["about to charge"]


def test_progress_is_in_the_record_while_it_runs(guards, engine, store):
    """L10."""
    seen = []

    def handle():
        told = current_operation().progress(0.25, "packing")
        return seen.append(progress_of(store.record).report) if told is None else after(told)

    async def after(told):
        await told
        seen.append(progress_of(store.record).report)

    guards.run(engine, "k", handle)
    assert seen == [(0.25, "packing")]


def test_what_is_no_note_and_no_progress_is_refused(guards, engine):
    for number, write in enumerate(
        (
            lambda operation: operation.note(object()),
            lambda operation: operation.note("x" * 5_000),
            lambda operation: operation.progress(1.5),
        )
    ):
        with pytest.raises(Misconfigured):
            guards.run(
                engine, f"k{number}", lambda write=write: write(current_operation()), scope="s"
            )


# --- who has lost its claim -------------------------------------------------------------------


def taken_over(store, **fields):
    """What somebody else makes of the only record, as its second attempt."""
    record = store.record
    taken = {"nonce": 1, "attempt": 2, "version": record.version + 1, **fields}
    store._records[record.id] = record._replace(**taken)


def test_an_attempt_that_was_taken_over_learns_it_at_its_next_step(guards, engine, store):
    """L5: before the step runs, and it is told once; its caller is told to ask again."""
    told, ran = [], []

    def handle():
        operation = current_operation()
        operation.on_lost(lambda: told.append("lost"))
        assert not operation.is_lost
        taken_over(store)
        return operation.step("charge", lambda: ran.append(1), at_most_once=True)

    with pytest.raises(KeyBusy):
        guards.run(engine, "k", handle)
    assert (told, ran) == (["lost"], [])
    assert store.record.nonce == 1


def test_who_learns_it_at_a_step_gets_the_answer_that_stands(guards, store):
    """L5, L7: as over HTTP; and that is what the observers are told."""
    decisions = []
    engine = guards.engine(store, observers=[decisions.append])

    def handle():
        taken_over(store, state=COMPLETED, response=encode_value("survivor"), lease_until_ms=0)
        return current_operation().step(
            "late", lambda: pytest.fail("the step has run"), at_most_once=True
        )

    assert guards.run(engine, "k", handle) == "survivor"
    assert [decision.outcome for decision in decisions] == ["replayed"]
    assert guards.run(engine, "k", handle) == "survivor"


def test_who_learns_it_at_a_step_may_find_an_answer_that_was_not_kept(guards, engine, store):
    """L5: a refusal stands, too."""

    def handle():
        taken_over(store, state=COMPLETED, response=None, lease_until_ms=0)
        return current_operation().step(
            "late", lambda: pytest.fail("the step has run"), at_most_once=True
        )

    with pytest.raises(ResultUnavailable):
        guards.run(engine, "k", handle)


def test_who_learns_it_at_a_step_and_can_ask_nobody_is_told_that_it_is_lost(guards, store):
    """L5, D2: what stands is not known."""
    engine = guards.engine(store, Policy(patience=0))

    def handle():
        taken_over(store)
        late = functools.partial(pytest.fail, "the step has run")
        try:
            taken = current_operation().step("late", late, at_most_once=True)
        except ClaimLost:
            store.is_down = True
            raise
        return failing(taken)

    async def failing(taken):
        try:
            await taken
        finally:
            store.is_down = True

    with pytest.raises(ClaimLost):
        guards.run(engine, "k", handle)


def test_work_that_was_taken_over_gets_the_response_that_stands(guards, engine, store):
    """L5, L10: the same for whoever takes it from a queue."""
    guards.run(engine, "k", lambda: None, scope="s")
    standing = store.record
    running = standing._replace(
        state=RUNNING, lease_until_ms=standing.created_ms + 60_000, response=None
    )
    store._records[standing.id] = running
    handed = encode_token(
        DeferredToken(running.id, running.created_ms, running.nonce), engine.attempts.secret
    )
    response = encode_response(Response(201, [], b"survivor"))

    def handle():
        taken_over(store, state=COMPLETED, response=response, lease_until_ms=0)
        return current_operation().step(
            "late", lambda: pytest.fail("the step has run"), at_most_once=True
        )

    served = guards.done(engine.run_deferred(handed, guards.flavoured(handle)))
    assert (served.status, served.body) == (201, b"survivor")


def test_an_attempt_that_was_taken_over_learns_it_from_the_heart(guards, engine, store):
    """L5: at the next renewal, in the middle of its work."""
    told = threading.Event()

    def handle():
        operation = current_operation()
        operation.on_lost(told.set)
        taken_over(store)
        (held,) = engine.attempts.heartbeat.leases.values()
        held.lease_ms = 0  # due at once
        held.claim = held.claim._replace(lease_until_ms=0)
        engine.attempts.heartbeat.tick()
        assert operation.is_lost
        return "too late"

    with pytest.raises(KeyBusy):
        guards.run(engine, "k", handle)
    wait_for(told)


def test_an_attempt_that_is_taken_over_in_its_own_process_is_told(guards, engine, store):
    """L5: somebody else had taken over and failed, so the next attempt is here again."""
    zombie, told, seen = held_up("zombie"), threading.Event(), []

    def first():
        seen.append(current_operation())
        current_operation().on_lost(told.set)
        return zombie()

    def second():
        wait_for(told)
        return seen[0].is_lost

    call = guards.beside(engine, "k", first, scope="s")
    wait_for(zombie.is_running)
    taken_over(store, state=FAILED, lease_until_ms=0)
    assert guards.run(engine, "k", second, scope="s") is True
    zombie.may_end.set()
    assert call.result() is True
    assert store.record.attempt == 3


# --- resumable --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises", "declares"])
def test_a_handler_that_knows_better_is_run_again(guards, store, how):
    """L6: under a policy that would park it."""
    engine = guards.engine(store, MANUAL)
    runs = []

    def handle():
        runs.append(1)
        if len(runs) == 2:
            return "done"
        if how == "raises":
            raise Resumable("the card was not touched")
        current_operation().resumable()
        raise ValueError("the card was not touched")

    with pytest.raises((Resumable, ValueError)):
        guards.run(engine, "k", handle)
    assert store.record.state == FAILED
    assert guards.run(engine, "k", handle) == "done"


def test_a_handler_that_does_not_know_is_parked(guards, store):
    """L6: the control."""
    engine = guards.engine(store, MANUAL)
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", lambda: 1 / 0, scope="s")
    assert store.record.state == IN_DOUBT


# --- steps at once ----------------------------------------------------------------------------


def test_steps_may_be_taken_at_the_same_time(store):
    """L7: one attempt dies when one of two is done; the next one takes only the other."""
    runs = []

    async def main():
        engine = AsyncEngine(store_of(store))

        async def handle():
            operation = current_operation()
            gate = asyncio.Event()

            async def slow():
                runs.append("slow")
                await gate.wait()
                if len(runs) == 2:
                    raise TimeoutError
                return "slow"

            async def quick():
                runs.append("quick")
                return "quick"

            async def take_quick():
                result = await operation.step("quick", quick)
                gate.set()
                return result

            return await asyncio.gather(operation.step("slow", slow), take_quick())

        with pytest.raises(TimeoutError):
            await engine.run("k", handle)
        result = await engine.run("k", handle)
        await engine.close()
        return result

    assert asyncio.run(main()) == ["slow", "quick"]
    assert runs == ["slow", "quick", "slow"]


def store_of(store):
    from coatcheck.stores.memory import AsyncMemoryStore

    return AsyncMemoryStore(store)


# --- over HTTP --------------------------------------------------------------------------------


def test_a_route_in_a_thread_takes_steps_without_awaiting(tmp_path):
    """L7: a plain function of FastAPI's, on the async engine."""
    runs = []
    app = FastAPI()
    engine = AsyncEngine(f"sqlite:///{tmp_path}/keys.db")
    app.add_middleware(IdempotencyMiddleware, engine=engine)

    @app.post("/orders")
    def place(operation: CurrentOperation):
        operation.note("about to charge")
        charged = operation.step("charge", lambda: runs.append(1) or "charged")
        return JSONResponse({"charged": charged}, status_code=503 if len(answers) == 0 else 201)

    answers = []

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answers.append(await client.post("/orders", headers={"Idempotency-Key": "k"}))
            answers.append(await client.post("/orders", headers={"Idempotency-Key": "k"}))
        await engine.close()

    asyncio.run(main())
    assert [answer.status_code for answer in answers] == [503, 201]
    assert answers[1].json() == {"charged": "charged"}
    assert runs == [1]


@pytest.mark.parametrize("swallows", [False, True])
def test_a_step_in_doubt_is_told_to_the_client_at_once_over_asgi(swallows):
    """L6: 409 with the reference, whatever the handler makes of it, and for every retry."""
    runs = []
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, store="memory://")

    def charge():
        runs.append(1)
        raise TimeoutError

    @app.post("/orders")
    async def place(operation: CurrentOperation):
        try:
            await operation.step("charge", charge, at_most_once=True)
        except (StepInDoubt, TimeoutError):
            if not swallows:
                raise
        return JSONResponse({}, status_code=500 if len(runs) == 1 and not told else 201)

    told = []

    async def main():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            told.append(await client.post("/orders", headers={"Idempotency-Key": "k"}))
            told.append(await client.post("/orders", headers={"Idempotency-Key": "k"}))
            told.append(await client.post("/orders", headers={"Idempotency-Key": "k"}))

    asyncio.run(main())
    assert [answer.status_code for answer in told] == [500, 409, 409]
    assert [answer.json()["code"] for answer in told[1:]] == ["outcome-unknown"] * 2
    assert runs == [1]


@pytest.mark.parametrize("swallows", [False, True])
def test_a_step_in_doubt_is_told_to_the_client_at_once_over_wsgi(swallows):
    """L6."""
    runs, started = [], []

    def charge():
        runs.append(1)
        raise TimeoutError

    def application(environ, start_response):
        try:
            environ["coatcheck.operation"].step("charge", charge, at_most_once=True)
        except (StepInDoubt, TimeoutError):
            if not swallows and len(started) > 0:
                raise
        start_response("503 Oh no", [])
        return [b""]

    guarded = WsgiMiddleware(application, store="memory://")
    for _ in range(3):
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/orders",
            "QUERY_STRING": "",
            "HTTP_IDEMPOTENCY_KEY": "k",
            "wsgi.input": io.BytesIO(b""),
        }
        list(guarded(environ, lambda status, *_: started.append(status)))
    assert [status[:3] for status in started] == ["503", "409", "409"]
    assert runs == [1]
