"""Sagas on the engine: what happens, what is undone, what is left to a person (E3)."""

import asyncio
import dataclasses
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from coatcheck import (
    DidNotHappen,
    Happened,
    KeyReused,
    Misconfigured,
    NotResolved,
    Policy,
    Uncertain,
    Unknown,
)
from coatcheck.engine import recovery
from coatcheck.saga import Retry, SagaBlocked, SagaUndone, StepFailed
from tests.support.times import WAIT_S_MAX, eventually

from .conftest import Died

NAMES = ("flight", "hotel", "car")


def trip_of(sagas, downstream, *, is_async=False, name="trip", steps=NAMES, **options):
    """A saga of three steps with undos; *options*: of its step "hotel"."""
    do, undo = {}, {}
    for step in steps:
        do[step], undo[step] = downstream.function(step), downstream.function(f"no {step}")

    def of(step):
        return options if step == "hotel" else {}

    if is_async:

        @sagas.saga(name, key=lambda trip: trip["id"])
        async def trip(saga, trip):
            return [await saga.step(s, do[s], trip, undo=undo[s], **of(s)) for s in steps]

    else:

        @sagas.saga(name, key=lambda trip: trip["id"])
        def trip(saga, trip):
            return [saga.step(s, do[s], trip, undo=undo[s], **of(s)) for s in steps]

    def call(given):
        result = trip(given)
        return asyncio.run(awaited(result)) if is_async else result

    return call


async def awaited(awaitable):
    return await awaitable


BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
TRIP = {"id": 42}


@BOTH
def test_each_step_runs_once_with_its_own_key_and_a_retry_gets_the_result(
    sagas, downstream, is_async
):
    """E3: the keys are those of the saga, its key and the step."""
    trip = trip_of(sagas, downstream, is_async=is_async)
    assert trip(TRIP) == trip(TRIP) == ["flight done", "hotel done", "car done"]
    assert downstream.calls == ["trip:42:flight", "trip:42:hotel", "trip:42:car"]


@BOTH
def test_a_failure_undoes_what_was_done_in_reverse_and_every_call_raises_the_same(
    sagas, downstream, is_async
):
    """E3: undos run once, the latest step first, and the step that failed has nothing to undo."""
    trip = trip_of(sagas, downstream, is_async=is_async)
    downstream.errors["car"] = [ValueError("no cars")]
    for _ in range(2):
        with pytest.raises(SagaUndone, match="'car' failed: ValueError: no cars") as caught:
            trip(TRIP)
        assert (caught.value.step, caught.value.error, caught.value.key) == (
            *("car", "ValueError"),
            "42",
        )
    assert downstream.calls[3:] == ["trip:42:hotel:undo", "trip:42:flight:undo"]


def test_a_failure_outside_of_a_step_undoes_everything(sagas, downstream):
    """E3."""

    @sagas.saga("trip", key=str)
    def trip(saga, number):
        saga.step("flight", downstream.function("flight"), undo=downstream.function("no flight"))
        raise KeyError(number)

    with pytest.raises(SagaUndone, match="its function failed: KeyError"):
        trip(7)
    assert downstream.effects_of("undo") == ["trip:7:flight:undo"]


def test_a_function_may_catch_the_failure_of_a_step_and_take_another_way(sagas, downstream):
    """E3: a step that failed had no effect."""
    downstream.errors["card"] = [ValueError("declined")]
    failures = []

    @sagas.saga("pay", key=str)
    def pay(saga, number):
        try:
            return saga.step("card", downstream.function("card"), undo=downstream.function("no"))
        except StepFailed as error:
            failures.append((error.step, error.error, error.text))
            return saga.step("invoice", downstream.function("invoice"))

    assert pay(1) == pay(1) == "invoice done"
    assert failures == [("card", "ValueError", "declined")]


@BOTH
def test_an_undo_is_retried_and_then_blocks_the_saga_until_a_person_resumes_it(
    sagas, downstream, is_async
):
    """E3: with what to do, and who decided."""
    trip = trip_of(sagas, downstream, is_async=is_async)
    downstream.errors.update({"car": [ValueError()], "no hotel": [OSError()] * 3})
    for _ in range(2):
        with pytest.raises(SagaBlocked, match="blocked at 'hotel:undo'") as caught:
            trip(TRIP)
    assert downstream.calls.count("trip:42:hotel:undo") == 3
    run = sagas.show(caught.value.reference)
    assert (run.state, run.blocked_at) == ("blocked", "hotel:undo")
    assert "3 times and last raised OSError" in run.blocked_because
    assert "sagas.resume" in run.next
    assert [step.state for step in run.steps] == ["done", "undo failed", "failed"]

    assert sagas.resume("42", by="ada", why="the hotel is back").state == "waiting"
    with pytest.raises(SagaUndone):
        trip(TRIP)
    assert downstream.effects_of("undo") == ["trip:42:hotel:undo", "trip:42:flight:undo"]
    assert "resumed, by ada: the hotel is back" in " ".join(sagas.show("42").history)
    with pytest.raises(NotResolved, match="it is undone"):
        sagas.resume("42", by="ada", why="again")


def test_a_person_can_skip_an_undo(sagas, downstream):
    """E3."""
    trip = trip_of(sagas, downstream)
    downstream.errors.update({"car": [ValueError()], "no hotel": [OSError()] * 9})
    with pytest.raises(SagaBlocked):
        trip(TRIP)
    with pytest.raises(NotResolved, match="'bus:undo' is not open in this saga"):
        sagas.skip("42", "bus:undo", by="ada", why="it does not exist")
    sagas.skip("42", "hotel:undo", by="ada", why="cancelled by telephone")
    with pytest.raises(SagaUndone):
        trip(TRIP)
    assert downstream.effects_of("undo") == ["trip:42:flight:undo"]


# --- unknown outcomes -----------------------------------------------------------------------------


def test_an_unknown_outcome_is_sent_again_with_the_same_key(sagas, downstream):
    """E3: the downstream answers the second call with what the first one did."""
    trip = trip_of(sagas, downstream)
    downstream.errors["hotel"] = [TimeoutError(), ConnectionResetError()]
    assert trip(TRIP)[1] == "hotel done"
    assert downstream.calls.count("trip:42:hotel") == 3


def test_an_outcome_that_stays_unknown_blocks_the_saga_and_a_person_says_what_happened(
    sagas, downstream
):
    """E3: nothing is undone or repeated before that."""
    trip = trip_of(sagas, downstream)
    downstream.errors["hotel"] = [TimeoutError()] * 3
    with pytest.raises(SagaBlocked, match="'hotel': its outcome is not known"):
        trip(TRIP)
    assert downstream.effects_of("undo") == []
    sagas.resolve("42", "hotel", Happened(value="room 7"), by="ada", why="they said so")
    assert trip(TRIP) == ["flight done", "room 7", "car done"]


def test_at_most_once_is_never_sent_again_without_a_decision(sagas, downstream):
    """E3."""
    trip = trip_of(sagas, downstream, at_most_once=True)
    downstream.errors["hotel"] = [Uncertain()]
    with pytest.raises(SagaBlocked, match="called once and last raised Uncertain"):
        trip(TRIP)
    with pytest.raises(Misconfigured, match="not an outcome"):
        sagas.resolve("42", "hotel", Unknown(), by="ada", why="?")
    sagas.resume("42", by="ada", why="try")
    with pytest.raises(SagaBlocked, match="an attempt ended inside it"):
        trip(TRIP)
    sagas.resolve("42", "hotel", DidNotHappen(), by="ada", why="they have nothing")
    assert trip(TRIP)[1] == "hotel done"
    assert downstream.calls.count("trip:42:hotel") == 2


PROBED = [
    (Happened(value="room 9"), ["flight done", "room 9", "car done"], 1),
    (DidNotHappen(), ["flight done", "hotel done", "car done"], 2),
    (Unknown(), "its probe does not know it either", 1),
    (OSError("no answer"), "its probe raised OSError", 1),
]


@pytest.mark.parametrize("case", PROBED)
@BOTH
def test_an_unknown_outcome_goes_through_the_probe(sagas, downstream, is_async, case):
    """E3: before anything is undone or repeated."""
    answer, expected, calls = case
    asked = []

    def probe(trip, *, key):
        asked.append((trip, key))
        if isinstance(answer, Exception):
            raise answer
        return answer

    trip = trip_of(sagas, downstream, is_async=is_async, probe=probe)
    downstream.errors["hotel"] = [TimeoutError()]
    if isinstance(expected, str):
        with pytest.raises(SagaBlocked, match=expected):
            trip(TRIP)
    else:
        assert trip(TRIP) == expected
    assert asked == [(TRIP, "trip:42:hotel")] * (3 if isinstance(answer, Exception) else 1)
    assert downstream.calls.count("trip:42:hotel") == calls


def test_a_step_whose_probe_says_no_is_not_undone(sagas, downstream):
    """E3: an undo whose action never happened is skipped."""
    trip = trip_of(sagas, downstream, probe=DidNotHappen, retry=1)
    downstream.errors["hotel"] = [TimeoutError()]
    with pytest.raises(SagaUndone, match="'hotel' failed: TimeoutError"):
        trip(TRIP)
    assert downstream.effects_of("undo") == ["trip:42:flight:undo"]


@pytest.mark.parametrize(("hours", "is_sent"), [(23, True), (24, False)])
def test_a_step_is_sent_again_as_long_as_its_downstream_remembers_the_key(
    sagas, downstream, clock, hours, is_sent
):
    """E3: after that time the probe or a person decides."""
    trip = trip_of(sagas, downstream, remembered_for="24h")
    downstream.errors["hotel"] = [Died()]
    with pytest.raises(Died):
        trip(TRIP)
    clock.now_ms += hours * 3_600_000
    if is_sent:
        assert trip(TRIP)[1] == "hotel done"
    else:
        with pytest.raises(SagaBlocked, match="an attempt ended inside it"):
            trip(TRIP)


@BOTH
def test_a_call_that_takes_too_long_has_an_unknown_outcome(make_sagas, is_async):
    """E3."""
    sagas = make_sagas(retry=Retry(tries=2, pause=0.001))

    release = threading.Event()

    def hangs():
        release.wait(WAIT_S_MAX)

    async def hangs_async():
        await asyncio.Event().wait()

    if is_async:

        @sagas.saga("slow", key=str)
        async def slow(saga, _number):
            await saga.step("hang", hangs_async, timeout=0.01)
    else:

        @sagas.saga("slow", key=str)
        def slow(saga, _number):
            saga.step("hang", hangs, timeout=0.01)

    with pytest.raises(SagaBlocked, match="2 times and last raised TimeoutError"):
        asyncio.run(awaited(slow(1))) if is_async else slow(1)
    release.set()


# --- crashes ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", [*NAMES, "no hotel", "no flight"])
def test_a_saga_continues_where_its_process_died(sagas, downstream, clock, name, is_async):
    """E3: each action and each undo takes effect once."""
    fails = name.startswith("no")
    trip = trip_of(sagas, downstream, is_async=is_async)
    downstream.errors[name] = [Died()]
    if fails:
        downstream.errors["car"] = [ValueError("none")]
    with pytest.raises(Died):
        trip(TRIP)
    clock.pass_lease()
    if fails:
        with pytest.raises(SagaUndone, match="ValueError: none"):
            trip(TRIP)
        assert len(downstream.effects_of("undo")) == 2
        assert downstream.calls.count("trip:42:car") == 1
    else:
        assert len(trip(TRIP)) == 3
    assert all(downstream.calls.count(key) <= 2 for key in downstream.calls)
    assert len(downstream.calls) == len(downstream.effects) + 1 + fails


def test_the_background_continues_what_died_and_what_was_resumed(make_sagas, downstream, clock):
    """E3: on any node that has the saga, without a caller."""
    first, second = make_sagas(), make_sagas()
    trip, _ = trip_of(first, downstream), trip_of(second, downstream)
    downstream.errors["hotel"] = [Died()]
    with pytest.raises(Died):
        trip(TRIP)
    second.engine.recovery.round()
    assert second.show("42").state == "running"
    clock.pass_lease()
    second.engine.recovery.round()
    assert second.show("42").state == "completed"

    downstream.errors["hotel"] = [ValueError()]
    downstream.errors["no flight"] = [OSError()] * 3
    with pytest.raises(SagaBlocked):
        trip({"id": 43})
    second.engine.recovery.round()
    assert second.show("43").state == "blocked"
    first.resume("43", by="ada", why="try again")
    second.engine.recovery.round()
    assert second.show("43").state == "undone"


def test_a_saga_that_hangs_does_not_keep_the_background_from_the_others(
    make_sagas, downstream, clock, monkeypatch
):
    """E3: each runs in a thread of its own, and a round does not wait for ever."""
    monkeypatch.setattr(recovery, "RUNS_S_MAX", 0.5)
    sagas, release, seen = make_sagas(), threading.Event(), []

    @sagas.saga("slow", key=str)
    def slow(saga, number):
        seen.append(number)
        if seen.count(number) == 1:
            raise Died
        return saga.step("hang", lambda: release.wait(WAIT_S_MAX) if number == 0 else True)

    for number in range(3):
        with pytest.raises(Died):
            slow(number)
    clock.pass_lease()
    sagas.engine.recovery.round()
    assert {sagas.show("1").state, sagas.show("2").state} == {"completed"}
    sagas.engine.recovery.round()
    assert seen.count(0) == 2
    release.set()
    eventually(lambda: sagas.show("0").state == "completed")


def test_async_sagas_continue_on_the_loop_that_started_them(make_sagas, clock):
    """E3: what they use may belong to it."""
    sagas, loops = make_sagas(), []

    @sagas.saga("which", key=str)
    async def which(saga, _number):
        loops.append(asyncio.get_running_loop())
        if len(loops) == 1:
            raise Died
        return await saga.step("one", lambda: 1)

    async def main():
        sagas.start()
        with pytest.raises(Died):
            await which(1)
        clock.pass_lease()
        await asyncio.to_thread(sagas.async_engine.recovery.round)
        assert await which(1) == 1
        await sagas.async_engine.close()

    asyncio.run(main())
    assert len(loops) == 2
    assert loops[0] is loops[1]


def test_the_background_leaves_a_saga_alone_whose_window_is_over(make_sagas, downstream, clock):
    """E3: it would begin anew, with the same keys."""
    sagas = make_sagas()
    trip = trip_of(sagas, downstream)
    downstream.errors["hotel"] = [Died()]
    with pytest.raises(Died):
        trip(TRIP)
    clock.now_ms += 31 * 86_400_000
    calls = len(downstream.calls)
    sagas.engine.recovery.round()
    assert len(downstream.calls) == calls


def test_a_process_that_lost_its_saga_takes_no_further_step(make_sagas, downstream, clock):
    """E3: fencing."""
    first, second = make_sagas(), make_sagas()
    other = trip_of(second, downstream)

    def loses(*_args, key):
        clock.pass_lease()
        other(TRIP)
        return key

    do = downstream.function("car")

    @first.saga("trip", key=lambda trip: trip["id"], version=1)
    def trip(saga, trip):
        saga.step("flight", loses, trip, undo=downstream.function("no flight"))
        saga.step("hotel", do, trip)

    second_steps = second._functions["trip"]
    second_steps._steps = ["version 1"]
    assert trip(TRIP) == ["flight done", "hotel done", "car done"]
    assert downstream.calls == ["trip:42:flight", "trip:42:hotel", "trip:42:car"]


# --- the pivot ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [False, True])
def test_after_the_pivot_nothing_is_undone(sagas, downstream, clock, dies):
    """E3: it goes forward only, and is blocked if it cannot."""
    downstream.errors["mail"] = [*([Died()] if dies else []), *[ValueError("no")] * 3]

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        saga.step("flight", downstream.function("flight"), undo=downstream.function("no flight"))
        saga.pivot()
        return saga.step("mail", downstream.function("mail"), undo=downstream.function("no mail"))

    if dies:
        with pytest.raises(Died):
            trip(1)
        clock.pass_lease()
    with pytest.raises(SagaBlocked, match="'mail': it was called 3 times"):
        trip(1)
    assert sagas.show("1").is_past_pivot
    assert downstream.effects_of("undo") == []
    sagas.resume("1", by="ada", why="try again")
    assert trip(1) == "mail done"


def test_a_failure_between_steps_after_the_pivot_blocks(sagas, downstream):
    """E3: also in an attempt that fails before it comes to the pivot again."""
    fails = []

    @sagas.saga("trip", key=str)
    async def trip(saga, _number):
        if len(fails) == 1:
            fails.append(1)
            raise OSError
        await saga.step("flight", downstream.function("flight"), undo=downstream.function("no"))
        await saga.pivot()
        await saga.step("mail", downstream.function("mail"))
        if not fails:
            fails.append(1)
            raise ValueError
        return "sent"

    for error in ("ValueError", "OSError"):
        with pytest.raises(SagaBlocked, match=f"after its pivot it raised {error}"):
            asyncio.run(awaited(trip(1)))
        sagas.resume("1", by="ada", why="a bug is fixed")
    assert asyncio.run(awaited(trip(1))) == "sent"
    assert downstream.effects_of("undo") == []


# --- branches -------------------------------------------------------------------------------------


def branches_of(sagas, downstream, *, is_async):
    do, undo = downstream.function, lambda name: downstream.function(f"no {name}")
    if is_async:

        @sagas.saga("both", key=str)
        async def both(saga, number):
            async def left():
                await saga.step("a1", do("a1"), undo=undo("a1"))
                return await saga.step("a2", do("a2"), undo=undo("a2"))

            await saga.step("first", do("first"), undo=undo("first"))
            return await saga.gather(left(), saga.step("b1", do("b1"), undo=undo("b1")))

        return lambda number: asyncio.run(awaited(both(number)))

    @sagas.saga("both", key=str)
    def both(saga, number):
        def left():
            saga.step("a1", do("a1"), undo=undo("a1"))
            return saga.step("a2", do("a2"), undo=undo("a2"))

        saga.step("first", do("first"), undo=undo("first"))
        return saga.gather(left, lambda: saga.step("b1", do("b1"), undo=undo("b1")))

    return both


@BOTH
def test_branches_run_and_are_undone_together(sagas, downstream, is_async):
    """E3: the failure of one waits for the others."""
    both = branches_of(sagas, downstream, is_async=is_async)
    assert both(1) == ["a2 done", "b1 done"]
    downstream.errors["b1"] = [ValueError("b1 fails")]
    with pytest.raises(SagaUndone, match="'b1' failed: ValueError"):
        both(2)
    undone = [key for key in downstream.effects_of(":2:") if key.endswith("undo")]
    assert undone == ["both:2:a2:undo", "both:2:a1:undo", "both:2:first:undo"]


@BOTH
@pytest.mark.parametrize("name", ["a1", "a2", "b1", "no a1", "no first"])
def test_branches_continue_where_their_process_died(sagas, downstream, clock, name, is_async):
    """E3: also if another branch was further."""
    both = branches_of(sagas, downstream, is_async=is_async)
    downstream.errors[name] = [Died()]
    if name.startswith("no"):
        downstream.errors["b1"] = [ValueError("b1 fails")]
    with pytest.raises(Died):
        both(1)
    clock.pass_lease()
    if name.startswith("no"):
        with pytest.raises(SagaUndone):
            both(1)
        assert len(downstream.effects_of("undo")) == 3
    else:
        assert both(1) == ["a2 done", "b1 done"]


def test_a_sync_branch_is_a_function(sagas):
    @sagas.saga("both", key=str)
    def both(saga, _number):
        saga.gather(saga.step("a", lambda: 1))

    with pytest.raises(SagaUndone, match="are functions"):
        both(1)


def test_no_branches_have_no_results(sagas):
    @sagas.saga("none", key=str)
    async def none(saga, _number):
        return await saga.gather()

    assert asyncio.run(awaited(none(1))) == []


# --- definitions ------------------------------------------------------------------------------------


def test_a_changed_definition_is_blocked_for_a_person(make_sagas, downstream, clock):
    """E3: it is not run half in each."""
    first, second = make_sagas(), make_sagas()

    @first.saga("trip", key=str)
    def trip(saga, _number):
        saga.step("flight", downstream.function("flight"), undo=downstream.function("no flight"))
        saga.step("car", downstream.function("car"))

    downstream.errors["car"] = [Died()]
    with pytest.raises(Died):
        trip(1)
    clock.pass_lease()

    @second.saga("trip", key=str)
    def changed(saga, _number):
        saga.step("flight", downstream.function("flight"), undo=downstream.function("no flight"))
        saga.step("bus", downstream.function("bus"))

    with pytest.raises(SagaBlocked, match="has changed since it began: car gone; bus new"):
        changed(1)
    second.resume("1", by="ada", why="look again")
    with pytest.raises(SagaBlocked, match="car gone"):
        changed(1)
    second.resume("1", by="ada", why="the bus will do", accept_change=True)
    assert changed(1) is None
    assert "resumed with its new definition" in " ".join(second.show("1").history)
    assert downstream.effects_of("bus") == ["trip:1:bus"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_is_gone_from_the_code_blocks(make_sagas, downstream, clock, fails):
    """E3: also a step that the outline does not show; nothing is undone half."""
    names = ["flight", "hotel"]
    downstream.errors["car"] = [Died()]
    sagas = make_sagas()

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        for name in names:
            saga.step(name, downstream.function(name), undo=downstream.function(f"no {name}"))
        if fails and len(names) == 1:
            raise ValueError
        return saga.step("car", downstream.function("car")) if len(names) == 2 else None

    with pytest.raises(Died):
        trip(1)
    clock.pass_lease()
    names.pop()
    with pytest.raises(SagaBlocked, match="did not ask"):
        trip(1)
    assert downstream.effects_of("undo") == []


# --- inputs, results and mistakes -------------------------------------------------------------------


@dataclasses.dataclass
class Order:
    id: int
    lines: list[str]


class Place(NamedTuple):
    id: int


@pytest.mark.parametrize(
    "given", [Order(1, ["tea"]), Place(1), SimpleNamespace(id=1)], ids=lambda g: type(g).__name__
)
def test_the_function_gets_its_argument_again_after_a_crash(make_sagas, clock, given):
    """E3: also without an annotation."""
    seen, sagas = [], make_sagas()

    @sagas.saga("checkout", key=lambda order: order.id)
    def checkout(saga, order):
        seen.append(order)
        if len(seen) == 1:
            raise Died
        return saga.step("number", lambda: order.id)

    with pytest.raises(Died):
        checkout(given)
    clock.pass_lease()
    sagas.engine.recovery.round()
    assert seen == [given, given]
    assert checkout(given) == 1


def test_annotated_arguments_and_results_come_back_as_they_were(sagas):
    """E3."""

    @sagas.saga("checkout", key=lambda order, *, place=None: order.id)
    def checkout(saga, order: Order, *, place: Place | None = None) -> Order:
        return saga.step("order", made, order)

    def made(order: Order) -> Order:
        return dataclasses.replace(order, lines=["milk"])

    assert checkout(Order(1, ["tea"]), place=Place(7)) == Order(1, ["milk"])
    with pytest.raises(KeyReused):
        checkout(Order(1, ["coffee"]), place=Place(7))


def test_a_result_that_cannot_be_stored_undoes_its_step(sagas, downstream):
    """E3: it has happened, and a later attempt could not continue."""
    undone = []

    @sagas.saga("trip", key=str)
    def trip(saga, size):
        saga.step("large", lambda: "x" * size, undo=lambda *, result: undone.append(result))

    assert trip(1000) is None
    with pytest.raises(SagaUndone, match="'large' failed: NotStored: its result has"):
        trip(100_000)
    assert undone == [None]


def test_many_large_results_leave_room_for_the_undos(sagas, downstream):
    """E3: progress has a limit."""
    undone = []

    @sagas.saga("trip", key=str)
    def trip(saga, _number):
        for number in range(5):
            saga.step(f"s{number}", lambda: "x" * 60_000, undo=lambda n=number: undone.append(n))

    with pytest.raises(SagaUndone, match="NotStored"):
        trip(1)
    assert undone == [2, 1, 0]


def takes_other(_one, _two, _three):
    raise AssertionError


async def is_async(_number):
    raise AssertionError


MISTAKES = [
    ({"undo": takes_other}, "takes_other does not take the arguments"),
    ({"probe": takes_other}, "takes_other does not take the arguments"),
    ({"undo": is_async}, "the undo of the step 'flight' is async"),
    ({"retry": 0}, "tries is 0"),
    ({"retry": "often"}, "tries is 'often'"),
    ({"timeout": "soon"}, "timeout"),
    ({"remembered_for": -1}, "remembered_for is -1"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_in_a_step_is_found_before_it_runs(sagas, downstream, options, words):
    @sagas.saga("trip", key=str)
    def trip(saga, number):
        saga.step("flight", downstream.function("flight"), number, **options)

    with pytest.raises(SagaUndone, match=words):
        trip(1)
    assert downstream.calls == []


@pytest.mark.parametrize("name", ["", "a:b", "undo", 7, "x" * 91])
def test_a_name_has_no_colon(sagas, name):
    with pytest.raises(Misconfigured, match="the name of a saga"):
        sagas.saga(name, key=str)


def test_a_mistake_in_a_definition_is_found_at_once(sagas):
    with pytest.raises(Misconfigured, match="key="):
        sagas.saga("trip", key="id")
    with pytest.raises(Misconfigured, match=r"\*args"):
        sagas.saga("trip", key=str)(lambda saga, *numbers: None)
    with pytest.raises(Misconfigured, match="first argument"):
        sagas.saga("trip", key=str)(lambda: None)
    with pytest.raises(Misconfigured, match="on_outage='refuse'"):
        sagas.saga("trip", key=str, policy=Policy(on_outage="execute"))(lambda saga: None)
    sagas.saga("trip", key=str)(lambda saga: None)
    with pytest.raises(Misconfigured, match="two sagas"):
        sagas.saga("trip", key=str)(lambda saga: None)


def test_a_function_that_is_given_its_own_key_keeps_it(sagas):
    seen = []

    def pay(*, key):
        seen.append(key)

    def unpay(*, key, action_key):
        seen.append((key, action_key))

    @sagas.saga("pay", key=str)
    def start(saga, number):
        saga.step("pay", pay, undo=unpay, key="mine")
        raise ValueError

    with pytest.raises(SagaUndone):
        start(1)
    assert seen == ["mine", ("pay:1:pay:undo", "pay:1:pay")]
