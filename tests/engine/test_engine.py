"""The engines: functions that run once for each key, sync and async."""

import asyncio
import dataclasses
import functools
import gc
import subprocess
import sys
import threading
import uuid

import pytest

from coatcheck import (
    AsyncEngine,
    DidNotHappen,
    Engine,
    Happened,
    KeyBusy,
    KeyRejected,
    KeyReused,
    Misconfigured,
    OutcomeUnknown,
    Policy,
    ResultUnavailable,
    StoreUnavailable,
    Unknown,
    current_operation,
    open_async_store,
    open_store,
)
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING
from coatcheck.stores.sqlite.store import SqliteStore
from tests.support.engines import LEASE_S, Guards, Handler, WatchedStore, held_up
from tests.support.times import NOW_MS, eventually, wait_for

DAY_S = 86_400


@pytest.fixture
def engine(guards, store, clock):
    return guards.engine(store, clock=clock, sweep_every_s=None)


# --- one key, one execution -------------------------------------------------------------------


def test_a_key_executes_once_and_every_retry_gets_its_result(guards, engine):
    """L1, L2."""
    handler = Handler({"order": 42})
    assert [guards.run(engine, "k", handler) for _ in range(3)] == [{"order": 42}] * 3
    assert handler.calls == 1


@pytest.mark.parametrize(
    "result",
    [None, 0, False, "", {}, [], 0.0, b"", b"\x00\xff", "text", {"a": [1, None]}, 2**70],
    ids=repr,
)
def test_every_value_is_a_result(guards, engine, store, result):
    """L2: nothing, zero, false and empty too; from memory and from the store."""
    handler = Handler(result)
    for node in (engine, engine, guards.engine(store)):
        again = guards.run(node, "k", handler)
        assert (again, type(again)) == (result, type(result))
    assert handler.calls == 1


def test_the_first_caller_gets_what_a_retry_would_get(guards, engine):
    """L2: a tuple is a list in JSON, so it is one from the start."""
    assert [guards.run(engine, "k", Handler((1, 2))) for _ in range(2)] == [[1, 2], [1, 2]]


def test_a_result_over_the_limit_reaches_the_first_caller_only(guards, engine, caplog):
    """L12, X2: no store is given more than the policy allows, whatever a function returns."""
    policy = Policy(response_bytes_max=100)
    handler = Handler("x" * 200)
    assert guards.run(engine, "k", handler, policy=policy) == "x" * 200
    with pytest.raises(ResultUnavailable):
        guards.run(engine, "k", handler, policy=policy)
    assert handler.calls == 1
    assert "over response_bytes_max, which is 100" in caplog.text


def test_an_exception_is_raised_and_the_next_call_runs_again(guards, engine, store):
    """L4."""
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", Handler(ZeroDivisionError()))
    assert (store.record.state, store.record.attempt) == (FAILED, 1)
    assert guards.run(engine, "k", Handler("done")) == "done"
    assert (store.record.state, store.record.attempt) == (COMPLETED, 2)


def test_other_arguments_with_the_same_key_are_refused(guards, engine):
    """F1: also where the answer is in memory."""
    handler = Handler()
    guards.run(engine, "k", handler, 1)
    for _ in range(2):
        with pytest.raises(KeyReused):
            guards.run(engine, "k", handler, 2)
    engine.attempts.replay_cache.__init__()
    with pytest.raises(KeyReused):
        guards.run(engine, "k", handler, 2)
    assert handler.calls == 1


def test_the_same_key_in_another_scope_is_another_operation(guards, engine):
    """S1."""
    handler = Handler()
    for scope in ("orders", "refunds", "orders"):
        guards.run(engine, "k", handler, scope=scope)
    assert handler.calls == 2


def named_place(module, result):
    """A function called `place`, as *module* has it."""
    names = {"__name__": module, "result": result}
    exec("def place(number):\n    return result", names)
    return names["place"]


def test_functions_of_one_name_in_two_modules_are_two_operations(engine, guards):
    """S1: without a scope, two functions must not share keys."""
    ordered, refunded = named_place("orders", "ordered"), named_place("refunds", "refunded")
    assert guards.done(engine.run("order-42", ordered, 42)) == "ordered"
    assert guards.done(engine.run("order-42", refunded, 42)) == "refunded"


def test_a_function_without_a_name_needs_a_scope(guards, engine):
    """S1: otherwise all of them would be one operation, and the second would never run."""
    done = []
    with pytest.raises((Misconfigured, ValueError)):
        guards.done(engine.run("order-42", lambda: done.append("charged")))
    assert done == []


JOBS = """
import multiprocessing, sys
from coatcheck import Engine

def place(order):
    return __name__

def work():
    with Engine("sqlite:///jobs.db") as engine:
        return engine.run("k", place, 1)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(work(), pool.apply(work))
"""


def test_a_script_has_one_name_whether_it_is_run_imported_or_spawned(tmp_path):
    """L1: otherwise a worker would repeat what its parent has done."""
    (tmp_path / "jobs.py").write_text(JOBS)
    imported = "import jobs; print(jobs.work(), '__main__')"
    for words in (["jobs.py"], ["-m", "jobs"], ["-c", imported]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.split() == ["__main__", "__main__"]


def test_a_guarded_function_takes_its_key_from_its_arguments(guards, engine):
    """K4."""
    handler = Handler("placed")

    @engine.guard(key=lambda order, **_: order["number"], scope="orders")
    @guards.flavoured
    def place(order, *, scope="", policy=""):
        return [handler(), order, scope, policy]

    for _ in range(2):
        placed = guards.done(place({"number": 7}, scope="their own", policy="theirs"))
        assert placed == ["placed", {"number": 7}, "their own", "theirs"]
    assert handler.calls == 1
    with pytest.raises(KeyReused):
        guards.done(place({"number": 7}, scope="another"))


def test_a_guarded_function_keeps_its_name_and_its_own_policy(guards, engine):
    """K4."""

    def place(number):
        return number

    guard = engine.guard(key=str, policy=Policy(recovery="manual", window="1h"))
    guarded = guard(guards.flavoured(place))
    assert guarded.__qualname__ == place.__qualname__
    guards.done(guarded(5))
    (record,) = engine.attempts._store.records
    assert record.window_until_ms == NOW_MS + 3_600_000
    assert (record.key, record.label) == ("5", f"{guarded.__module__}.{place.__qualname__}")


@pytest.mark.parametrize("wrap", ["partial", "object", "partial of object"])
def test_every_callable_can_be_guarded(guards, engine, wrap):
    """K4: not everything that is called has a name."""
    handler = Handler()
    flavoured = guards.flavoured(handler) if guards.is_async else handler
    named = functools.partial(flavoured, 1) if "partial" in wrap else Callee(flavoured)
    if wrap == "partial of object":
        named = functools.partial(Callee(flavoured))
    for _ in range(2):
        assert guards.done(engine.run("k", named)) == "done"
        assert guards.done(engine.guard(key=lambda: "g")(named)()) == "done"
    assert handler.calls == 2


def test_what_a_partial_holds_is_compared_like_any_argument(guards, engine):
    """F1."""
    bound = functools.partial(guards.flavoured(Handler()), 1, b=2)
    vars(bound)  # from here on Python no longer folds it into others
    guards.done(engine.run("k", functools.partial(bound, 3)))
    guards.done(engine.run("k", bound, 3))
    guards.done(engine.run("k", bound.func, 1, 3, b=2))
    for other in (functools.partial(bound, 4), functools.partial(bound, 3, b=3)):
        with pytest.raises(KeyReused):
            guards.done(engine.run("k", other))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"sweep_every_s": "60s"},
            "sweep_every_s is '60s'; it must be a number of seconds, or None",
        ),
        ({"sweep_every_s": 0}, "sweep_every_s is 0"),
        ({"sweep_every_s": True}, "sweep_every_s is True"),
        ({"recover_every_s": -1}, "recover_every_s is -1"),
        ({"recover_every_s": float("nan")}, "recover_every_s is nan"),
        ({"secret": 5}, "secret is a int; it must be text or bytes"),
        ({"keyring": {}}, "keyring is a dict; it must be a KeyRing"),
        ({"keyring": {"a": b"k" * 32}}, "keyring is a dict; it must be a KeyRing"),
        ({"clock": 5}, "clock= is a int; it must be a function"),
        ({"archive": 5}, "archive= is a int; it must be a function"),
    ],
)
def test_a_nonsensical_setting_stops_a_deployment_and_no_request(guards, settings, sentence):
    with pytest.raises(Misconfigured, match=sentence):
        guards.engine("memory://", **settings)


def test_a_store_of_the_other_flavour_is_refused_with_the_way_out():
    for store in (open_async_store("memory://"), None):
        with pytest.raises(Misconfigured, match=r"needs a blocking store, .*open_store\(url\)"):
            Engine(store)
    for store in (open_store("memory://"), None):
        with pytest.raises(Misconfigured, match=r"needs an async store, .*open_async_store\(url\)"):
            AsyncEngine(store)


@dataclasses.dataclass
class Branch:
    """A shop whose method is guarded."""

    name: str

    def place(self, number):
        return f"{self.name} placed {number}"


def test_the_object_of_a_method_is_compared_like_any_argument(guards, engine):
    """F1: as where the function itself is guarded."""
    for _ in range(2):
        assert guards.done(engine.run("k", Branch("berlin").place, 5)) == "berlin placed 5"
    with pytest.raises(KeyReused):
        guards.done(engine.run("k", Branch("paris").place, 5))


def test_a_call_has_as_long_a_key_as_its_own_policy_allows(guards, engine):
    """K1: not as the engine's does."""
    for key, chars_max in (("k" * 300, 500), ("k" * 50, 50)):
        policy = Policy(key_chars_max=chars_max)
        assert (
            guards.done(engine.run(key, guards.flavoured(lambda: 1), policy=policy, scope="s")) == 1
        )
    with pytest.raises(KeyRejected, match="1 to 50"):
        guards.done(engine.run("k" * 51, guards.flavoured(lambda: 1), policy=policy, scope="s"))


class Callee:
    """Something that can be called and has no name."""

    def __init__(self, function):
        self._function = function

    def __call__(self):
        return self._function()


@pytest.mark.parametrize("key", [42, uuid.UUID(int=7)])
def test_a_number_or_an_id_is_a_key_as_its_text_is(guards, engine, key):
    """K4: given, or found in the arguments."""
    handler = Handler("done")
    assert guards.run(engine, key, handler, scope="s") == "done"
    guarded = engine.guard(key=lambda: key, scope="s")(guards.flavoured(handler))
    assert guards.done(guarded()) == "done"
    assert guards.run(engine, str(key), handler, scope="s") == "done"
    assert handler.calls == 1


def found_later(_order):
    """What looks like any other function."""

    async def find():
        return "key"

    return find()


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (found_later, Misconfigured),
        (lambda _order: object(), Misconfigured),
        (lambda _order: None, KeyRejected),
        (lambda _order: "", KeyRejected),
    ],
)
def test_a_call_that_has_no_key_of_its_own_is_refused(guards, engine, key, error):
    """K3, K4: two orders without a number are two orders, and not one that is called "None"."""
    handler = Handler("done")
    guarded = engine.guard(key=key, scope="s")(guards.flavoured(handler))
    for _ in range(2):
        with pytest.raises(error, match="key"):
            guards.done(guarded("order"))
    assert handler.calls == 0


def test_bytes_are_a_key_as_their_text_is(guards, engine):
    """K4: brokers bring theirs so; and no bytes are no key, not one that all such calls share."""
    handler = Handler("done")
    for key in ("évent-7".encode(), "évent-7"):
        assert guards.run(engine, key, handler, scope="s") == "done"
    assert handler.calls == 1
    assert guards.run(engine, b"\xff", handler, scope="s") == "done"
    with pytest.raises(KeyRejected):
        guards.run(engine, b"", handler, scope="s")
    assert handler.calls == 2


def test_a_key_that_is_no_function_of_the_arguments_is_refused_where_it_is_written(guards, engine):
    """K4."""
    with pytest.raises(Misconfigured, match="key= is a str; it must be a function"):
        engine.guard(key="number", scope="s")


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_of_no_sensible_length_is_refused(guards, engine, key):
    """K3, X2."""
    handler = Handler()
    with pytest.raises(KeyRejected, match="1 to 255 characters"):
        guards.run(engine, key, handler)
    assert handler.calls == 0


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_of_many_simultaneous_calls_one_executes(guards, kind, tmp_path):
    """L1: in one engine and in several, every call gets the one result."""
    store = WatchedStore() if kind == "memory" else SqliteStore(tmp_path / "keys.db")
    engines = [guards.engine(store, Policy(wait="20s")) for _ in range(2)]
    handler = Handler("done")
    calls = [guards.beside(engines[n % 2], "k", handler) for n in range(16)]
    assert [call.result() for call in calls] == ["done"] * 16
    assert handler.calls == 1


# --- what a handler sees ----------------------------------------------------------------------


def test_only_the_handler_sees_its_operation(guards, engine):
    """K5."""
    seen = []

    def handler():
        seen.append(current_operation())
        return seen[-1].reference

    reference = guards.run(engine, "k", handler, scope="orders")
    assert current_operation() is None
    assert (seen[0].reference, seen[0].key, seen[0].label) == (reference, "k", "orders")
    assert seen[0].attempt == 1


def test_a_derived_key_is_the_same_in_every_attempt(guards, engine):
    """L8."""
    seen = []

    def handler():
        operation = current_operation()
        seen.append((operation.attempt, operation.fence, operation.derive("charge")))
        if len(seen) == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", handler)
    guards.run(engine, "k", handler)
    (first, second) = seen
    assert (first[0], second[0]) == (1, 2)
    assert first[1] < second[1]
    assert first[2] == second[2]


def test_an_operation_within_an_operation_gives_way_to_the_outer_one(guards, engine):
    """L8: what a handler derives belongs to the innermost call that it is part of."""
    seen = []

    def inner():
        seen.append(current_operation().label)

    def outer():
        yield engine.run("i", inner, scope="inner")
        seen.append(current_operation().label)

    guards.run(engine, "o", outer, scope="outer")
    assert seen == ["inner", "outer"]


# --- crashes and recovery ---------------------------------------------------------------------


def test_a_crash_leaves_a_lease_and_the_next_call_takes_over_when_it_is_over(
    guards, engine, store, clock
):
    """L5."""
    guards.abandon(engine)
    assert store.record.state == RUNNING
    handler = Handler("done")
    impatient = Policy(in_flight="409")
    clock.advance(LEASE_S - 1)
    with pytest.raises(KeyBusy):
        guards.run(engine, "k", handler, policy=impatient)
    clock.advance(1)
    assert guards.run(engine, "k", handler, policy=impatient) == "done"
    assert store.record.attempt == 2


def test_an_unknown_outcome_waits_for_an_operator_under_manual_recovery(guards, store, clock):
    """L6."""
    engine = guards.engine(store, "payments", clock=clock)
    guards.abandon(engine)
    clock.advance(LEASE_S)
    handler = Handler()
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "k", handler)
    assert store.record.state == IN_DOUBT
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "other", Handler(ZeroDivisionError()))
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "other", handler)
    assert handler.calls == 0


RECONCILED = {
    "happened": (lambda _: Happened(value={"found": 1}), {"found": 1}, 0),
    "did not happen": (lambda _: DidNotHappen(), "done", 1),
    "unknown": (lambda _: Unknown(), OutcomeUnknown, 0),
    "nonsense": (lambda _: True, OutcomeUnknown, 0),
    "an error": (lambda _: 1 / 0, OutcomeUnknown, 0),
    "happened, but cannot be said": (lambda _: Happened(value=object()), ResultUnavailable, 0),
}


@pytest.mark.parametrize("answer", RECONCILED)
def test_the_reconcile_function_is_called_before_anything_runs_again(guards, store, clock, answer):
    """L6: it happened, with this result; it did not; or it is unknown, and an operator decides."""
    reconcile, expected, calls = RECONCILED[answer]
    asked = []

    def ask(operation):
        asked.append(operation)
        return reconcile(operation)

    policy = Policy(recovery="reconcile", reconcile=ask)
    engine = guards.engine(store, policy, clock=clock)
    guards.abandon(engine)
    clock.advance(LEASE_S)
    handler = Handler("done")
    if isinstance(expected, type):
        with pytest.raises(expected):
            guards.run(engine, "k", handler)
    else:
        assert guards.run(engine, "k", handler) == expected
    assert handler.calls == calls
    (operation,) = asked
    assert (operation.key, operation.attempt) == ("k", 2)


def test_the_result_of_a_reconcile_function_is_not_logged(guards, store, clock, caplog):
    """L6, O3: a wrong return value may contain card numbers."""
    charge = {"card": "4242 4242 4242 4242"}
    policy = Policy(recovery="reconcile", reconcile=lambda _: charge)
    engine = guards.engine(store, policy, clock=clock)
    guards.abandon(engine)
    clock.advance(LEASE_S)
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "k", Handler())
    assert "reconcile function returned a value of type dict, not Happened" in caplog.text
    assert "4242" not in caplog.text


def test_an_async_reconcile_function_is_awaited(guards, store, clock):
    """L6."""

    async def ask(_operation):
        await asyncio.sleep(0)
        return Happened(value="found")

    policy = Policy(recovery="reconcile", reconcile=ask)
    engine = guards.engine(store, policy, clock=clock)
    guards.abandon(engine)
    clock.advance(LEASE_S)
    assert guards.run(engine, "k", Handler()) == "found"


def overtaken(guards, store, clock, result, *, by):
    """What a handler's caller gets whose lease ran out while another engine did its work."""
    slow, quick = (guards.engine(store, clock=clock, sweep_every_s=None) for _ in range(2))
    handler = held_up(result)
    call = guards.beside(slow, "k", handler)
    wait_for(handler.is_running)
    slow.attempts.heartbeat.leases.clear()  # it is suspended: not even its leases are renewed
    clock.advance(LEASE_S)
    by(quick)
    handler.may_end.set()
    return call


@pytest.mark.parametrize("result", ["mine", object()], ids=["kept", "not kept"])
def test_a_zombie_gets_the_surviving_result(guards, store, clock, result):
    """L5: never two different final answers, not even where its own could not be kept."""

    def completes(engine):
        assert guards.run(engine, "k", Handler("theirs")) == "theirs"

    call = overtaken(guards, store, clock, result, by=completes)
    assert call.result() == "theirs"


def test_a_zombie_whose_successor_failed_is_busy(guards, store, clock):
    """L5."""

    def fails(engine):
        with pytest.raises(ZeroDivisionError):
            guards.run(engine, "k", Handler(ZeroDivisionError()))

    call = overtaken(guards, store, clock, "mine", by=fails)
    with pytest.raises(KeyBusy):
        call.result()
    assert store.record.state == FAILED


def test_an_executor_that_was_marked_in_doubt_but_lives_completes(guards, store, clock):
    """L5, L6: a slow execution knows what it did."""

    def is_refused(engine):
        with pytest.raises(OutcomeUnknown):
            guards.run(engine, "k", Handler(), policy=Policy(recovery="manual"))
        assert store.record.state == IN_DOUBT

    call = overtaken(guards, store, clock, "mine", by=is_refused)
    assert call.result() == "mine"
    assert store.record.state == COMPLETED


# --- time -------------------------------------------------------------------------------------


def test_a_refusal_of_late_retries_is_not_remembered(guards, store, clock):
    """T2: another engine's policy may have begun a new life meanwhile, and its answer stands."""
    strict = guards.engine(store, Policy(on_expired="refuse", window="1h"), clock=clock)
    lenient = guards.engine(store, Policy(window="1h"), clock=clock)
    guards.run(strict, "k", Handler("old"))
    clock.advance(3_600)
    guards.run(lenient, "k", Handler("new"))
    assert guards.run(strict, "k", Handler()) == "new"


# --- the store's troubles ---------------------------------------------------------------------


def test_nothing_runs_while_the_store_is_down(guards, engine, store):
    """D2."""
    handler = Handler()
    store.troubles = ["down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler)
    assert handler.calls == 0
    assert guards.run(engine, "k", handler) == "done"


def test_a_compact_store_recognises_its_own_writes_too(guards, tmp_path):
    """L5: it keeps neither scope nor key, and still the claim is ours."""

    class Deaf(SqliteStore):
        troubles = 2

        def swap(self, swaps):
            lost = super().swap(swaps)
            if self.troubles and lost == [None]:
                self.troubles -= 1
                raise StoreUnavailable("the answer was lost", is_ambiguous=True)
            return lost

    handler = Handler()
    engine = guards.engine(Deaf(tmp_path / "keys.db", compact=True), Policy(in_flight="409"))
    assert guards.run(engine, "k", handler) == "done"
    assert handler.calls == 1


def test_an_engine_that_gets_no_answer_twice_does_not_execute(guards, engine, store):
    """D2, L5: the claim may stand, so the handler does not run and the lease decides."""
    handler = Handler()
    store.troubles = ["deaf", "down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", handler)
    assert handler.calls == 0
    assert store.record.state == RUNNING


def test_the_handlers_own_error_matters_more_than_the_stores(guards, store, clock):
    """L4: if it cannot be written down, the lease runs out instead."""
    engine = guards.engine(store, Policy(patience=0), clock=clock)

    def fail():
        store.is_down = True
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", fail)
    assert store.record.state == RUNNING


def test_a_result_that_cannot_be_recorded_is_not_returned(guards, store, clock):
    """D2: the response leaves only after the record is safe."""
    engine = guards.engine(store, Policy(patience=0), clock=clock)

    def unplug():
        store.is_down = True

    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", unplug)
    (lease,) = engine.attempts.heartbeat.leases.values()  # until its completion is written
    assert lease.pending.record.state == COMPLETED
    store.is_down = False
    eventually(lambda: engine.attempts.heartbeat.leases == {})
    assert store.record.state == COMPLETED


# --- the wrong kind of function ---------------------------------------------------------------


def test_a_sync_engine_refuses_an_async_function_and_uses_up_no_key():
    """L1, L4: a sync engine that is given an async function says so, and uses up no key."""
    ran: list[str] = []

    async def charge() -> None:
        ran.append("charged")

    with Engine("memory://") as engine:
        with pytest.raises((Misconfigured, TypeError)):
            engine.run("k", charge, scope="s")
        assert engine.run("k", lambda: ran.append("charged"), scope="s") is None
    assert ran == ["charged"]


def test_a_generator_is_refused_because_nothing_of_it_has_run():
    """L1, L4: nothing of a generator has run when it is returned."""

    def charge():
        yield "charged"

    with Engine("memory://") as engine, pytest.raises((Misconfigured, TypeError)):
        engine.run("k", charge, scope="s")


def test_a_coroutine_that_a_sync_engine_refuses_leaves_nothing_in_doubt():
    """L6: it has not run, so that it may run under every recovery policy."""

    async def charge() -> str:
        return "charged"

    policy = Policy(recovery="manual")
    with Engine("memory://", policy) as engine:
        with pytest.raises(Misconfigured, match="has not run yet"):
            engine.run("k", charge, scope="s")
        assert engine.run("k", lambda: "charged", scope="s") == "charged"


def test_an_async_engine_takes_a_plain_function():
    """L1: what it returned is its result."""

    async def retry() -> list[int]:
        engine = AsyncEngine("memory://")
        results = [await engine.run("k", len, "four", scope="s") for _ in range(2)]
        await engine.close()
        return results

    assert asyncio.run(retry()) == [4, 4]


@pytest.mark.parametrize("policy", [{}, 3600, object()])
def test_an_object_that_is_no_policy_is_refused(policy):
    with pytest.raises(Misconfigured, match="is not a policy"):
        Engine("memory://", policy)


# --- making and closing -----------------------------------------------------------------------


def test_an_engine_that_makes_no_sense_is_refused_when_it_is_made(guards):
    for store, policy, sentence in (
        ("ftp://x", None, "no store is known for 'ftp'"),
        ("memory://", "paypal", "there is no preset 'paypal'"),
        ("memory://", Policy(mode="transaction"), "mode='transaction' needs"),
    ):
        with pytest.raises(Misconfigured, match=sentence):
            guards.engine(store, policy)


def test_a_policy_that_makes_no_sense_for_one_call_runs_nothing(guards, engine):
    handler = Handler()
    with pytest.raises(Misconfigured):
        guards.run(engine, "k", handler, policy=Policy(mode="transaction"))
    assert handler.calls == 0


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_closing_twice_is_closing_once(guards, kind, tmp_path):
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path}/keys.db"
    engine = guards.engine(url)
    assert guards.run(engine, "k", Handler()) == "done"
    guards.done(engine.close())
    guards.done(engine.close())
    assert not [t for t in threading.enumerate() if t is engine.attempts.heartbeat._thread]


def test_a_closed_engine_on_a_file_runs_nothing(guards, tmp_path):
    """D2."""
    engine = guards.engine(f"sqlite:///{tmp_path}/keys.db")
    guards.done(engine.close())
    handler = Handler()
    with pytest.raises(StoreUnavailable, match="closed"):
        guards.run(engine, "k", handler)
    assert handler.calls == 0


def test_an_async_engine_on_a_file_that_is_forgotten_ends_its_threads(tmp_path):
    """A server that is reloaded in place must not gather threads and open files."""
    before = set(threading.enumerate())
    engine = AsyncEngine(f"sqlite:///{tmp_path}/keys.db")

    async def use(engine):
        assert await engine.run("k", Handler(), scope="s") == "done"
        return [t for t in set(threading.enumerate()) - before if "coatcheck" in t.name]

    mine = asyncio.run(use(engine))
    assert 2 <= len(mine) <= 3  # the heartbeat, and one or two threads of the store's pool
    wake = engine.attempts.heartbeat._wake
    del engine
    gc.collect()
    wake.set()  # sooner than its longest pause
    eventually(lambda: not any(thread.is_alive() for thread in mine))


def test_engines_are_context_managers(guards, tmp_path):
    url = f"sqlite:///{tmp_path}/keys.db"

    async def use():
        async with AsyncEngine(url) as engine:
            return engine, await engine.run("k", str, scope="str")

    if guards.is_async:
        engine, result = asyncio.run(use())
    else:
        with Engine(url) as engine:
            result = engine.run("k", str, scope="str")
    assert result == ""
    with pytest.raises(StoreUnavailable, match="closed"):
        guards.run(engine, "k2", Handler())


def test_the_default_store_is_a_file_in_the_current_directory(guards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = Guards.engine(guards, "sqlite:///coatcheck.db")
    default = (AsyncEngine if guards.is_async else Engine)()
    guards.run(engine, "k", Handler("first"))
    assert guards.run(default, "k", Handler("second")) == "first"
    guards.done(default.close())


def test_one_async_engine_serves_several_event_loops_at_once(tmp_path):
    """L1: duplicates meet, whichever loop they are on."""
    engine = AsyncEngine(f"sqlite:///{tmp_path}/keys.db", Policy(wait="20s"))
    barrier = threading.Barrier(3, timeout=20)
    calls = []

    async def handler():
        calls.append(threading.get_ident())
        await asyncio.sleep(0)
        return "done"

    async def several(prefix):
        both = [engine.run("shared", handler), *(engine.run(f"{prefix}{n}", handler) for n in "ab")]
        return await asyncio.gather(*both)

    results = {}

    def loop(name):
        barrier.wait()
        results[name] = asyncio.run(several(name))

    threads = [threading.Thread(target=loop, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == dict.fromkeys("xyz", ["done"] * 3)
    assert len(calls) == 1 + 3 * 2
    asyncio.run(engine.close())
