"""Sagas whose processes stall, whose steps are interrupted, and whose store is full (E3)."""

import asyncio
import dataclasses
import threading

import pytest

from coatcheck import DidNotHappen, Happened, KeyBusy, OutcomeUnknown, StoreUnavailable
from coatcheck.core.problem import problem
from coatcheck.keyring import KeyRing
from coatcheck.saga import Retry, SagaBlocked, Sagas, SagaUndone
from coatcheck.saga import action as saga_action
from coatcheck.saga import run as saga_run
from tests.support.times import WAIT_S_MAX, eventually

from .conftest import Died
from .test_sagas import BOTH, TRIP, awaited, trip_of

# --- a process that stalls, and returns after another one has taken over -------------------------


@pytest.mark.parametrize("is_undo", [False, True])
def test_a_process_that_lost_its_saga_does_not_repeat_a_call(
    make_sagas, downstream, clock, is_undo
):
    """E3: fencing, also between two calls of one function; the other process may have undone it."""
    first, second = make_sagas(), make_sagas()
    other, mine = trip_of(second, downstream, steps=("flight",)), []

    def stalls(*_args, key):
        mine.append(key)
        clock.pass_lease()
        with pytest.raises(SagaUndone) if is_undo else pytest.MonkeyPatch.context():
            other(TRIP)
        raise TimeoutError

    @first.saga("trip", key=lambda trip: trip["id"], version=1)
    def trip(saga, trip):
        if is_undo:
            saga.step("flight", downstream.function("flight"), trip, undo=stalls)
            raise ValueError
        saga.step("flight", stalls, trip, undo=downstream.function("no flight"))

    second._functions["trip"]._steps = ["version 1"]
    with pytest.raises(SagaUndone) if is_undo else pytest.MonkeyPatch.context():
        trip(TRIP)
    assert mine == ["trip:42:flight:undo" if is_undo else "trip:42:flight"]


# --- what an error leaves open --------------------------------------------------------------------


@pytest.mark.parametrize("first", [Died(), TimeoutError()], ids=repr)
def test_the_answer_to_a_repeated_call_counts(sagas, downstream, clock, first):
    """E3: a service that remembers the key refuses both calls, or neither: nothing is to undo."""
    trip = trip_of(sagas, downstream)
    downstream.errors["hotel"] = [first, ValueError("closed")]
    if isinstance(first, Died):
        with pytest.raises(Died):
            trip(TRIP)
        clock.pass_lease()
    with pytest.raises(SagaUndone, match="'hotel' failed: ValueError"):
        trip(TRIP)
    assert downstream.effects_of("undo") == ["trip:42:flight:undo"]


DOUBTS = [
    SagaBlocked("inner", "AAAA", "charge", "why"),
    OutcomeUnknown(problem("outcome-unknown", id=bytes(16))),
    KeyBusy(problem("in-progress", id=bytes(16))),
    StoreUnavailable("down"),
]


@pytest.mark.parametrize("error", DOUBTS, ids=lambda error: type(error).__name__)
def test_a_guarded_function_that_is_in_doubt_leaves_its_step_in_doubt(sagas, downstream, error):
    """E3: a step may call another saga, or another function that coatcheck guards."""
    trip = trip_of(sagas, downstream)
    downstream.errors["hotel"] = [error] * 3
    with pytest.raises(SagaBlocked, match="'hotel': its outcome is not known"):
        trip(TRIP)
    assert downstream.effects_of("undo") == []


@BOTH
def test_a_function_with_a_time_limit_that_exits_has_an_unknown_outcome(sagas, is_async):
    """E3: as without a time limit, where the process ends."""

    def exits():
        raise SystemExit

    if is_async:

        @sagas.saga("exits", key=str)
        async def start(saga, _number):
            await saga.step("exit", exits, timeout=WAIT_S_MAX)
    else:

        @sagas.saga("exits", key=str)
        def start(saga, _number):
            saga.step("exit", exits, timeout=WAIT_S_MAX)

    with pytest.raises(SagaBlocked, match="'exit': its outcome is not known"):
        asyncio.run(awaited(start(1))) if is_async else start(1)


@BOTH
def test_a_probe_that_fails_is_asked_again(sagas, downstream, clock, is_async):
    """E3: also after a crash; a person is only asked if it keeps failing."""
    answers = [OSError(), Happened(value="room 7"), OSError(), OSError(), OSError()]

    def probe(_trip):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trip = trip_of(sagas, downstream, is_async=is_async, probe=probe)
    downstream.errors["hotel"] = [Died(), TimeoutError()]
    with pytest.raises(Died):
        trip(TRIP)
    clock.pass_lease()
    assert trip(TRIP)[1] == "room 7"
    with pytest.raises(SagaBlocked, match="its probe raised OSError"):
        trip({"id": 43})
    assert answers == []


# --- branches that saga.gather does not know -------------------------------------------------------


def test_undoing_waits_for_a_step_that_still_runs(sagas, downstream):
    """E3: asyncio.gather raises the first failure while other branches still run."""
    has_ended, calls = asyncio.Event(), []

    async def slow(*, key):
        await has_ended.wait()
        calls.append(key)

    async def fails():
        raise ValueError

    async def undo(*, key):
        calls.append(key)

    @sagas.saga("both", key=str)
    async def both(saga, _number):
        async def left():
            await saga.step("slow", slow, undo=undo)
            await saga.step("later", slow, undo=undo)

        try:
            await asyncio.gather(left(), saga.step("fails", fails))
        finally:  # the function ends before the slow step does
            asyncio.get_running_loop().call_soon(has_ended.set)

    with pytest.raises(SagaUndone, match="'fails' failed"):
        asyncio.run(awaited(both(1)))
    assert calls == ["both:1:slow", "both:1:slow:undo"]


def test_a_step_that_its_function_cancels_blocks_the_saga(sagas, downstream):
    """E3: its outcome is not known, so nothing is undone yet."""

    async def slow():
        await asyncio.Event().wait()

    @sagas.saga("slow", key=str)
    async def start(saga, _number):
        await saga.step("flight", downstream.function("flight"), undo=downstream.function("no"))
        async with asyncio.timeout(0.01):
            await saga.step("hotel", slow, undo=downstream.function("no"))

    with pytest.raises(SagaBlocked, match=r"'hotel': its function cancelled it.*timeout="):
        asyncio.run(awaited(start(1)))
    assert downstream.effects_of("undo") == []
    sagas.resolve("1", "hotel", Happened(), by="ada", why="it is booked")
    assert asyncio.run(awaited(start(1))) is None


def test_a_task_group_is_undone_after_a_crash(sagas, downstream, clock):
    """E3: it wraps what ends the function."""
    downstream.errors["no flight"] = [Died()]

    @sagas.saga("group", key=str)
    async def start(saga, _number):
        await saga.step(
            "flight", downstream.function("flight"), undo=downstream.function("no flight")
        )
        if len(downstream.calls) == 1:
            raise ValueError
        async with asyncio.TaskGroup() as group:
            group.create_task(saga.step("hotel", downstream.function("hotel")))

    with pytest.raises(Died):
        asyncio.run(awaited(start(1)))
    clock.pass_lease()
    with pytest.raises(SagaUndone):
        asyncio.run(awaited(start(1)))
    assert downstream.effects_of("") == ["group:1:flight", "group:1:flight:undo"]


def test_a_cancelled_saga_continues_later(sagas, downstream, clock):
    """E3: its lease expires, and its steps are called again."""
    is_called = asyncio.Event()

    async def hotel(*, key):
        if not is_called.is_set():
            is_called.set()
            await asyncio.Event().wait()
        return key

    @sagas.saga("trip", key=str)
    async def trip(saga, _number):
        await saga.step("flight", downstream.function("flight"), undo=downstream.function("no"))
        return await saga.gather(saga.step("hotel", hotel, undo=downstream.function("no")))

    async def cancelled():
        task = asyncio.ensure_future(awaited(trip(1)))
        await is_called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert sagas.show("1").state == "running"
    clock.pass_lease()
    assert asyncio.run(awaited(trip(1))) == ["trip:1:hotel"]
    assert downstream.calls == ["trip:1:flight"]


# --- results ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Room:
    number: int


@pytest.mark.parametrize("is_undoing", [False, True])
def test_a_stored_result_that_the_code_cannot_read_blocks(sagas, downstream, clock, is_undoing):
    """E3: a later release changed its type; nothing is undone with a wrong result."""
    undone = []
    downstream.errors["car"] = [Died()]
    downstream.errors["no flight"] = [Died()]

    def old() -> int:
        return 7

    def new() -> Room:
        raise AssertionError

    def undo(*, result):
        undone.append(result)

    versions = [old]

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        saga.step("hotel", versions[-1], undo=undo)
        if is_undoing:
            saga.step(
                "flight", downstream.function("flight"), undo=downstream.function("no flight")
            )
            raise ValueError
        saga.step("car", downstream.function("car"))

    with pytest.raises(Died):
        trip(1)
    clock.pass_lease()
    versions.append(new)
    with pytest.raises(SagaBlocked, match="'hotel': its stored result cannot be read"):
        trip(1)
    assert undone == []
    versions.pop()
    sagas.resume("1", by="ada", why="the old release is back")
    if is_undoing:
        with pytest.raises(SagaUndone):
            trip(1)
        assert undone == [7]
    else:
        trip(1)


def test_a_skipped_step_has_the_result_none_whatever_its_annotation(sagas):
    """E3."""

    def book() -> Room:
        raise TimeoutError

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        return [saga.step("hotel", book)]

    with pytest.raises(SagaBlocked):
        trip(1)
    sagas.skip("1", "hotel", by="ada", why="they sleep in a tent")
    assert trip(1) == [None]


def test_after_the_pivot_a_result_that_cannot_be_stored_is_left_to_a_person(sagas):
    """E3: the step has happened, and cannot be undone; a person can go on without its result."""

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        saga.pivot()
        return saga.step("mail", object)

    with pytest.raises(SagaBlocked, match="'mail': its result is a object"):
        trip(1)
    sagas.skip("1", "mail", by="ada", why="it is sent")
    assert trip(1) is None


def test_results_of_branches_that_do_not_fit_together_are_undone(tmp_path, clock):
    """E3: each has room, and all of them have not; also after a crash while undoing."""
    waiting, undone = [], []
    # On a store that is written in a thread, so that all results are there before the first write.
    sagas = Sagas(f"sqlite:///{tmp_path}/sagas.db", clock=clock, recover_every_s=None)

    async def large():
        waiting.append(asyncio.get_running_loop().create_future())
        if len(waiting) == 5:
            for future in waiting:
                future.set_result(None)
        await waiting[-1]
        return "x" * 60_000

    def undo(number):
        undone.append(number)
        if len(undone) == 2:
            raise Died

    @sagas.saga("trip", key=str)
    async def trip(saga, _number):
        def branch(number):
            return saga.step(f"s{number}", large, undo=lambda: undo(number))

        await saga.gather(*map(branch, range(5)))

    with pytest.raises(Died):
        asyncio.run(awaited(trip(1)))
    clock.pass_lease()
    with pytest.raises(SagaUndone, match="NotStored: its result has 60003 bytes"):
        asyncio.run(awaited(trip(1)))
    sagas.close()
    assert sorted(set(undone)) == [0, 1, 2, 3, 4]
    assert len(undone) == 6


def test_a_branch_that_ends_its_process_comes_before_the_failure_of_another(sagas, downstream):
    """E3: nothing is undone by a process that ends."""
    downstream.errors.update({"a": [ValueError()], "b": [Died()]})

    @sagas.saga("both", key=str)
    def both(saga, _number):
        saga.gather(
            lambda: saga.step("a", downstream.function("a"), undo=downstream.function("no a")),
            lambda: saga.step("b", downstream.function("b"), undo=downstream.function("no b")),
        )

    with pytest.raises(Died):
        both(1)
    assert sagas.show("1").state == "running"


def test_as_many_steps_as_fit_can_be_undone(sagas):
    """E3: each registered undo has its room, however full the record is."""
    undone = []

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        for number in range(2):
            saga.step(f"large {number}", lambda: "x" * 60_000)
        for number in range(200):
            name = f"{number:03}" + "\N{GRINNING FACE}" * 85
            saga.step(name, lambda: 1, undo=lambda n=number: undone.append(n))

    with pytest.raises(SagaUndone, match=r"Misconfigured: .*can be stored"):
        trip(1)
    assert undone == list(reversed(range(len(undone))))
    assert len(undone) > 10


@BOTH
def test_the_undo_is_in_the_store_before_the_action_is_called(sagas, is_async):
    """E3: so that a process that dies in it leaves nothing that is not undone."""
    seen = []

    def act():
        seen.extend(step.state for step in sagas.show("1").steps)

    if is_async:

        @sagas.saga("trip", key=str)
        async def trip(saga, _number):
            await saga.step("flight", act, undo=print)
    else:

        @sagas.saga("trip", key=str)
        def trip(saga, _number):
            saga.step("flight", act, undo=print)

    asyncio.run(awaited(trip(1))) if is_async else trip(1)
    assert seen == ["begun"]


def test_a_step_with_a_retry_calls_its_function_so_often(sagas, downstream):
    """E3: also after errors that leave nothing open."""
    trip = trip_of(sagas, downstream, retry=Retry(tries=3, pause=0))
    downstream.errors["hotel"] = [ValueError(), ValueError()]
    assert trip(TRIP)[1] == "hotel done"
    downstream.errors["hotel"] = [ValueError()] * 3
    with pytest.raises(SagaUndone, match="'hotel' failed"):
        trip({"id": 43})
    assert downstream.calls.count("trip:43:hotel") == 3


def test_the_time_limit_of_a_step_is_also_that_of_its_undo(sagas):
    """E3: an undo that hangs blocks its saga."""
    release = threading.Event()

    @sagas.saga("slow", key=str)
    def slow(saga, _number):
        saga.step("hang", lambda: 1, undo=lambda: release.wait(WAIT_S_MAX), timeout=0.05)
        raise ValueError

    with pytest.raises(SagaBlocked, match=r"'hang:undo': .*'hang:undo' did not end within"):
        slow(1)
    release.set()


def test_the_background_continues_an_encrypted_saga_and_a_person_decides_about_it(
    make_sagas, downstream, clock
):
    """E3: with the key ring; nothing of its steps can be read without it."""
    ring = KeyRing({"1": b"k" * 32})
    sagas = make_sagas(keyring=ring)
    trip = trip_of(sagas, downstream)
    downstream.errors["hotel"] = [Died(), *[TimeoutError()] * 3]
    with pytest.raises(Died):
        trip(TRIP)
    clock.pass_lease()
    sagas.engine.recovery.round()
    assert (sagas.show("42").state, sagas.show("42").blocked_at) == ("blocked", "hotel")
    sagas.resolve("42", "hotel", Happened(value="room 7"), by="ada", why="they said so")
    sagas.engine.recovery.round()
    assert trip(TRIP) == ["flight done", "room 7", "car done"]


def test_two_steps_with_one_name_are_a_mistake_and_the_first_is_undone_once(sagas, downstream):
    """E3: they would have the same key."""

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        for _ in range(2):
            saga.step("flight", downstream.function("flight"), undo=downstream.function("no"))

    with pytest.raises(SagaUndone, match="'flight' is taken twice"):
        trip(1)
    assert downstream.calls == ["trip:1:flight", "trip:1:flight:undo"]


def test_a_saga_whose_record_is_full_is_blocked_and_not_tried_for_ever(sagas, monkeypatch):
    """E3: here no room was reserved for its undos."""
    monkeypatch.setattr(saga_run, "RESERVED_BYTES", 0)
    monkeypatch.setattr(saga_action, "ENTRY_BYTES", -1_000)

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        for number in range(3):
            saga.step(f"large {number}", lambda: "x" * 60_000)
        for number in range(100):
            saga.step(f"{number:03}" + "\N{GRINNING FACE}" * 85, lambda: 1, undo=lambda: None)

    with pytest.raises(SagaBlocked, match="it cannot be undone: the steps and notes"):
        trip(1)


def test_an_action_that_was_only_registered_never_happened_and_its_undo_does_nothing(
    sagas, downstream, clock, monkeypatch
):
    """E3: the process dies between the two; the next one calls the action first."""
    trip = trip_of(sagas, downstream, probe=DidNotHappen)
    downstream.errors["hotel"] = [Died()]
    with pytest.raises(Died):
        trip(TRIP)
    assert sagas.show("42").steps[-1].state == "begun"
    downstream.errors["hotel"] = [ValueError("full")]
    clock.pass_lease()
    with pytest.raises(SagaUndone):
        trip(TRIP)
    assert downstream.effects_of("undo") == ["trip:42:flight:undo"]


def test_the_background_does_not_take_over_what_runs(make_sagas, downstream, clock):
    """E3: two coordinators; the lease of one that lives is renewed."""
    first, second = make_sagas(), make_sagas()
    release, is_called = threading.Event(), threading.Event()

    def slow(*_args, key):
        downstream.calls.append(key)
        is_called.set()
        release.wait(WAIT_S_MAX)

    for sagas in (first, second):

        @sagas.saga("trip", key=str)
        def trip(saga, _number):
            saga.step("flight", slow, undo=downstream.function("no"))

    thread = threading.Thread(target=trip, args=(1,))
    thread.start()
    assert is_called.wait(WAIT_S_MAX)
    first.engine.recovery.round()
    release.set()
    thread.join(WAIT_S_MAX)
    eventually(lambda: first.show("1").state == "completed")
    assert downstream.calls == ["trip:1:flight"]
