"""Steps, notes and progress as handlers use them, with both engines and over HTTP (L6, L7)."""

import asyncio
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
from coatcheck.stores.memory import AsyncMemoryStore
from tests.engine.small_api import small_api
from tests.support.engines import held_up
from tests.support.times import Clock, wait_for

MANUAL = Policy(recovery="manual")


@pytest.fixture
def engine(guards, store):
    return guards.engine(store)


class Shop:
    """A handler with two steps, of which one may fail."""

    def __init__(self, **options):
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

    def handle(self):
        operation = current_operation()
        charged = yield operation.step(self.names[0], self.charge, **self.options)
        shipped = yield operation.step(self.names[1], self.ship)
        return [charged, shipped.decode(), operation.attempt]

    def run(self, guards, engine):
        return guards.run(engine, "order", self.handle, scope="shop")

    def run_until_charge_fails(self, guards, engine):
        """An attempt whose first step raises; the next attempt would not."""
        self.fails_in = "charge"
        with pytest.raises(TimeoutError):
            self.run(guards, engine)
        self.fails_in = ""


@pytest.fixture
def shop():
    return Shop()


@pytest.mark.parametrize("register", ["on_lost", "on_renewed"])
def test_a_callback_that_could_never_be_called_is_refused(guards, engine, register):
    """L5: an async one would never be awaited."""

    async def stop():
        raise AssertionError

    def work(callback):
        getattr(current_operation(), register)(callback)

    for key, callback in (("a", stop), ("b", "not a function")):
        with pytest.raises(Misconfigured, match=register):
            guards.run(engine, key, work, callback, scope="s")


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
    shop.run_until_charge_fails(guards, engine)
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
            yield current_operation().step(f"export-{number}", export, number)

    with pytest.raises(Misconfigured, match="262144 can be stored"):
        guards.run(engine, "k", handle)
    with pytest.raises(StepInDoubt, match="export-3"):
        guards.run(engine, "k", handle)
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
    """L7: it knows what it needs; an operator sees that the result was not kept."""

    def handle():
        operation = current_operation()
        assert operation.steps == []
        with pytest.raises(Misconfigured):
            yield operation.step("export", object)
        assert operation.steps == ["export"]
        return "done"

    assert guards.run(engine, "k", handle) == "done"
    story = dict(story_of(store.record))
    assert story["step"] == "export: done by attempt 1, its result was not stored"


@pytest.mark.parametrize("outcome", ["resolve", "rerun"])
def test_an_operator_cannot_run_it_again_either(guards, engine, store, outcome):
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
def test_a_short_outage_does_not_lose_the_result_of_a_step(guards, engine, store, shop, trouble):
    """D2, L7: neither the write nor its answer."""
    store.troubles = ["", trouble, "", trouble]
    assert shop.run(guards, engine) == [{"charge": 1}, "parcel", 1]
    assert [step.name for step in progress_of(store.record).steps] == ["charge", "ship"]


# --- at most once -----------------------------------------------------------------------------


@pytest.mark.parametrize(("hours", "charges"), [(1, 2), (24, 1)])
def test_a_step_whose_key_is_remembered_runs_again_within_that_time(guards, store, hours, charges):
    """L6, L7, E3: and is in doubt after it."""
    clock = Clock()
    engine = guards.engine(store, Policy(window="48h"), clock=clock)
    shop = Shop(remembered_for="24h")
    shop.run_until_charge_fails(guards, engine)
    clock.advance(hours * 3_600)
    if charges == 2:
        assert shop.run(guards, engine)[0] == {"charge": 2}
    else:
        with pytest.raises(StepInDoubt):
            shop.run(guards, engine)
    assert shop.charges == charges


def test_each_step_renews_the_lease_so_that_many_in_a_row_do_not_hold_the_heartbeat_back(
    guards, store
):
    """L5."""
    clock = Clock()
    engine = guards.engine(store, clock=clock)
    leases = []

    def handle():
        operation = current_operation()
        for number in range(3):
            clock.advance(15)
            yield operation.step(f"step {number}", lambda: 1)
            leases.append(operation.claim.lease_until_ms - clock.now_ms)
        return 1

    guards.run(engine, "order", handle, scope="shop", policy=Policy(lease="20s"))
    assert leases == [20_000] * 3


def test_how_long_a_key_is_remembered_is_a_duration(guards, engine):
    for wrong in (0, "soon"):
        with pytest.raises(Misconfigured, match="remembered_for"):
            Shop(remembered_for=wrong).run(guards, engine)


def test_a_step_at_most_once_is_in_doubt_and_not_run_again(guards, engine, store):
    """L6: whatever the route's policy is, which is to retry here."""
    shop = Shop(at_most_once=True)
    shop.run_until_charge_fails(guards, engine)
    assert store.record.state == FAILED
    with pytest.raises(StepInDoubt):
        shop.run(guards, engine)
    assert store.record.state == IN_DOUBT
    with pytest.raises(OutcomeUnknown):
        shop.run(guards, engine)
    assert shop.charges == 1


@pytest.mark.parametrize(
    ("told", "charges"), [(Happened(value={"charge": 7}), 1), (DidNotHappen(), 2)]
)
def test_a_probe_finds_out_whether_it_happened(guards, engine, told, charges):
    """L6: it gets the operation, with its notes."""
    asked = []

    def probe(operation):
        asked.append(operation.attempt)
        return told

    shop = Shop(at_most_once=True, probe=probe)
    shop.run_until_charge_fails(guards, engine)
    charged, _, attempt = shop.run(guards, engine)
    assert charged == {"charge": 7 if charges == 1 else 2}
    assert (asked, attempt, shop.charges) == ([2], 2, charges)


@pytest.mark.parametrize(("probe", "charges"), [(None, 1), (lambda _: DidNotHappen(), 2)])
def test_a_step_that_raised_is_in_doubt_for_the_same_attempt_as_well(
    guards, engine, store, probe, charges
):
    """L6: a handler that catches the error and takes the step again does not run it again."""
    shop = Shop(at_most_once=True, probe=probe)

    def insist():
        shop.fails_in = "charge"
        with pytest.raises(TimeoutError):
            yield current_operation().step("charge", shop.charge, **shop.options)
        shop.fails_in = ""
        return (yield current_operation().step("charge", shop.charge, **shop.options))

    if probe is None:
        with pytest.raises(StepInDoubt):
            guards.run(engine, "order", insist)
        assert store.record.state == IN_DOUBT
    else:
        assert guards.run(engine, "order", insist) == {"charge": 2}
    assert shop.charges == charges


def test_a_renewal_whose_answer_is_late_does_not_hide_a_step_that_was_begun(guards, engine, store):
    """L6: the step was written on top of the renewal before its answer arrived."""
    shop = Shop(at_most_once=True)

    def insist():
        (lease,) = engine.attempts.heartbeat.leases.values()
        renewed, shop.fails_in = lease.claim, "charge"
        with pytest.raises(TimeoutError):
            yield current_operation().step("charge", shop.charge, at_most_once=True)
        lease.renewed(renewed)
        yield current_operation().step("charge", shop.charge, at_most_once=True)

    with pytest.raises(StepInDoubt):
        guards.run(engine, "order", insist)
    assert (store.record.state, shop.charges) == (IN_DOUBT, 1)


def test_a_probe_that_does_not_know_leaves_it_in_doubt(guards, engine, store):
    """L6."""
    shop = Shop(probe=lambda _operation: Unknown())
    shop.run_until_charge_fails(guards, engine)
    with pytest.raises(StepInDoubt):
        shop.run(guards, engine)
    assert store.record.state == IN_DOUBT


def fails(_operation):
    raise ConnectionError("the provider is away")


async def fails_async(_operation):
    raise ConnectionError("the provider is away")


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_probe_that_raises_does_not_know(guards, engine, store, caplog, is_awaited):
    """L6: in doubt, with the probe's own error in the log; nothing runs."""
    is_async = is_awaited and guards.is_async
    shop = Shop(at_most_once=True, probe=fails_async if is_async else fails)
    shop.run_until_charge_fails(guards, engine)
    with pytest.raises(StepInDoubt):
        shop.run(guards, engine)
    assert (store.record.state, shop.charges) == (IN_DOUBT, 1)
    (line,) = [record for record in caplog.records if record.exc_info]
    assert "'charge'" in line.getMessage()
    assert isinstance(line.exc_info[1], ConnectionError)


def test_a_probe_that_finds_its_claim_lost_is_no_doubt(guards, engine, store):
    """L5, L6: that is no doubt about the step; another attempt is at it."""

    def probe(operation):
        record = store.record
        store._records[record.id] = record._replace(nonce=1, attempt=9, version=record.version + 1)
        return operation.note("asking")

    shop = Shop(probe=probe)
    shop.run_until_charge_fails(guards, engine)
    with pytest.raises(KeyBusy):  # as for any request while that one runs
        shop.run(guards, engine)
    assert (store.record.nonce, store.record.state) == (1, RUNNING)


def test_a_doubt_that_the_handler_swallows_is_still_one(guards, engine, store):
    """L6: its own error or result does not count."""
    shop = Shop(at_most_once=True)
    shop.run_until_charge_fails(guards, engine)

    def swallow():
        try:
            yield current_operation().step("charge", shop.charge, at_most_once=True)
        except StepInDoubt:
            raise ValueError("something else") from None

    with pytest.raises(ValueError, match="something else"):
        guards.run(engine, "order", swallow, scope="shop")
    assert store.record.state == IN_DOUBT


# --- notes and progress -----------------------------------------------------------------------


def test_notes_are_there_before_what_they_announce(guards, engine, store):
    """L7: for the process that has to find out later."""
    seen = []

    def handle():
        yield current_operation().note({"gateway": "acme", "amount": 5})
        seen.extend(note.what for note in progress_of(store.record).notes)
        seen.extend(note.what for note in current_operation().notes)

    guards.run(engine, "k", handle)
    assert seen == [{"gateway": "acme", "amount": 5}] * 2
    assert progress_of(store.record).notes[0].attempt == 1  # and it stays


def test_a_reconcile_function_sees_the_notes_of_the_attempt_before(guards, store):
    """L6: of one that failed."""
    notes = []

    def ask(operation):
        notes.extend(note.what for note in operation.notes)
        return Happened(value="found")

    engine = guards.engine(store, Policy(recovery="reconcile", reconcile=ask))

    def fail():
        yield current_operation().note("about to charge")
        raise TimeoutError

    with pytest.raises(TimeoutError):
        guards.run(engine, "k", fail, scope="s")
    assert guards.run(engine, "k", fail, scope="s") == "found"
    assert notes == ["about to charge"]


def test_progress_is_in_the_record_while_it_runs(guards, engine, store):
    """L10."""
    seen = []

    def handle():
        yield current_operation().progress(0.25, "packing")
        seen.append(progress_of(store.record).report)

    guards.run(engine, "k", handle)
    assert seen == [(0.25, "packing")]


def test_wrong_notes_and_wrong_progress_are_refused(guards, engine):
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


# --- lost claims ------------------------------------------------------------------------------


def taken_over(store, **fields):
    """Have another process take over the only record, as its second attempt."""
    record = store.record
    taken = {"nonce": 1, "attempt": 2, "version": record.version + 1, **fields}
    store._records[record.id] = record._replace(**taken)


def taking_a_late_step(store, **fields):
    """A handler that takes a step after another process has taken over."""

    def handle():
        taken_over(store, **fields)
        return current_operation().step("late", pytest.fail, "it has run", at_most_once=True)

    return handle


def completed_with(response):
    return {"state": COMPLETED, "response": response, "lease_until_ms": 0}


def test_an_attempt_that_was_taken_over_fails_at_its_next_step(guards, engine, store):
    """L5: before the step runs; the callback is called once, and its caller gets KeyBusy."""
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


def test_a_lost_attempt_that_takes_a_step_gets_the_current_result(guards, store):
    """L5, L7: as over HTTP; the observers get one decision, a replay."""
    decisions = []
    engine = guards.engine(store, observers=[decisions.append])
    handle = taking_a_late_step(store, **completed_with(encode_value("survivor")))
    assert guards.run(engine, "k", handle) == "survivor"
    assert [decision.outcome for decision in decisions] == ["replayed"]
    assert guards.run(engine, "k", handle) == "survivor"
    with pytest.raises(ResultUnavailable):
        guards.run(engine, "l", unkept_elsewhere(store, "l"))


def unkept_elsewhere(store, key):
    """The same where the response of the other attempt was not kept."""

    def handle():
        (record,) = [record for record in store.records if record.key == key]
        taken = record._replace(nonce=1, version=record.version + 1, **completed_with(None))
        store._records[record.id] = taken
        return current_operation().step("late", pytest.fail, "it has run", at_most_once=True)

    return handle


def test_a_lost_attempt_that_cannot_read_the_store_raises_claim_lost(guards, store):
    """L5, D2: the current record is not known."""
    engine = guards.engine(store, Policy(patience=0))

    def handle():
        taken_over(store)
        try:
            yield current_operation().step("late", pytest.fail, "it has run", at_most_once=True)
        finally:
            store.is_down = True

    with pytest.raises(ClaimLost):
        guards.run(engine, "k", handle)


def test_deferred_work_that_was_taken_over_gets_the_current_response(guards, engine, store):
    """L5, L10: the same for a worker."""
    guards.run(engine, "k", lambda: None, scope="s")
    done = store.record
    running = done._replace(state=RUNNING, lease_until_ms=done.created_ms + 60_000, response=None)
    store._records[done.id] = running
    token = DeferredToken(running.id, running.created_ms, running.nonce)
    response = encode_response(Response(201, [], b"survivor"))
    handle = guards.flavoured(taking_a_late_step(store, **completed_with(response)))
    served = guards.done(engine.run_deferred(encode_token(token, engine.attempts.secret), handle))
    assert (served.status, served.body) == (201, b"survivor")


def test_an_attempt_that_was_taken_over_is_notified_by_the_heartbeat(guards, engine, store):
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


def test_an_attempt_that_is_taken_over_in_its_own_process_is_notified(guards, engine, store):
    """L5: another process had taken over and failed, so the next attempt is here again."""
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
def test_a_resumable_handler_is_run_again(guards, store, how):
    """L6: under manual recovery."""
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


# --- steps at once ----------------------------------------------------------------------------


def test_steps_may_be_taken_at_the_same_time(store):
    """L7: one attempt dies when one of two is done; the next one takes only the other."""
    runs = []

    async def main():
        engine = AsyncEngine(AsyncMemoryStore(store))

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
def test_a_step_in_doubt_is_a_409_at_once(guards, swallows):
    """L6: with the reference, whatever the handler makes of it, and for every retry."""
    runs, requests = [], []

    def charge():
        runs.append(1)
        raise TimeoutError

    def place(operation):
        requests.append(1)
        try:
            yield operation.step("charge", charge, at_most_once=True)
        except (StepInDoubt, TimeoutError):
            if not swallows and len(requests) > 1:
                raise
        return 503 if len(requests) == 1 else 201

    post = small_api(guards, place)
    answers = [post() for _ in range(3)]
    assert [answer.status for answer in answers] == [503, 409, 409]
    assert [answer.code for answer in answers[1:]] == ["outcome-unknown"] * 2
    assert runs == [1]
