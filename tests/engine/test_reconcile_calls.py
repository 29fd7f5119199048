"""Calls of reconcile functions: one that hangs delays nothing for longer than the policy allows."""

import asyncio
import contextvars
import sys
import threading
from contextlib import asynccontextmanager, suppress

import pytest

from coatcheck import AsyncEngine, Engine, Happened, OutcomeUnknown, Policy
from coatcheck.core.record import COMPLETED, IN_DOUBT
from coatcheck.engine import reconcile_calls as asking
from coatcheck.stores.memory import AsyncMemoryStore
from tests.support.engines import LEASE_S, Handler, Killed, held_up, recovery_round
from tests.support.times import WAIT_S_MAX, eventually, wait_for

FOUND = Happened(value="found")


class Silent:
    """An async reconcile function that never answers; *is_stubborn*: not even when cancelled."""

    def __init__(self, *, is_stubborn=False):
        self.is_stubborn = is_stubborn
        self.is_asked = threading.Event()
        self.is_cancelled = threading.Event()
        self.may_end = threading.Event()

    async def __call__(self, _operation):
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            if not self.is_stubborn:
                raise
        while not self.may_end.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.to_thread(wait_for, self.may_end)


def asking_policy(ask, limit="20ms"):
    return Policy(recovery="reconcile", reconcile=ask, reconcile_timeout=limit)


def calls_under_way(engine):
    """How many reconcile functions are being called now."""
    return asking.CALLS_MAX - engine.attempts.reconcile_calls._free._value


def abandoned(guards, engine, clock, *keys, scope="charges", policy=None):
    """Calls whose process died, and whose leases have expired."""
    guards.abandon(engine, *keys, scope=scope, policy=policy)
    clock.advance(LEASE_S)


def abandoned_before(store, clock):
    """The same by a sync engine that is gone."""
    with Engine(store, clock=clock) as first, pytest.raises(Killed):
        first.run("k", Handler(Killed()), scope="charges")
    clock.advance(LEASE_S)


# --- by a retry -------------------------------------------------------------------------------


def test_a_retry_does_not_wait_for_a_function_that_hangs(guards, store, clock, caplog):
    """L5, L6: the key is not stuck, but in doubt where people look; and it is said why."""
    silent, handler = held_up(FOUND), Handler()
    engine = guards.engine(store, asking_policy(silent), clock=clock)
    abandoned(guards, engine, clock)
    retry = guards.beside(engine, "k", handler, scope="charges")
    try:
        with pytest.raises(OutcomeUnknown):
            retry.result(WAIT_S_MAX / 2)
    finally:
        silent.may_end.set()
    assert (store.record.state, engine.attempts.heartbeat.leases, handler.calls) == (
        IN_DOUBT,
        {},
        0,
    )
    assert "the reconcile function did not answer within 0.02 s" in caplog.text


def test_an_answer_that_comes_too_late_changes_nothing(guards, store, clock):
    """L5: its request has gone, and an operator may have decided since."""
    silent = held_up(FOUND)
    engine = guards.engine(store, asking_policy(silent), clock=clock)
    abandoned(guards, engine, clock)
    while not silent.is_running.is_set():  # a busy machine may not come to it in its time
        with pytest.raises(OutcomeUnknown):
            guards.run(engine, "k", Handler(), scope="charges")
    before = store.record
    assert calls_under_way(engine) > 0
    silent.may_end.set()
    eventually(lambda: calls_under_way(engine) == 0)
    assert store.record == before


@pytest.mark.parametrize("is_stubborn", [False, True], ids=["", "stubborn"])
def test_an_async_function_is_cancelled_and_not_waited_for(guards, store, clock, is_stubborn):
    """L6: not even if it does not mind that it is cancelled."""
    silent = Silent(is_stubborn=is_stubborn)
    policy = asking_policy(silent)

    async def use():
        async with AsyncEngine(AsyncMemoryStore(store), policy, clock=clock) as engine:
            with pytest.raises(OutcomeUnknown):
                async with asyncio.timeout(WAIT_S_MAX / 2):
                    await engine.run("k", dict, scope="charges")
            assert store.record.state == IN_DOUBT
            silent.may_end.set()

    first = guards.engine(store, policy, clock=clock)
    abandoned(guards, first, clock)
    if guards.is_async:
        asyncio.run(use())
    else:
        while not silent.is_asked.is_set():  # as above
            with pytest.raises(OutcomeUnknown):
                guards.beside(first, "k", Handler(), scope="charges").result(WAIT_S_MAX / 2)
    wait_for(silent.is_cancelled)
    silent.may_end.set()
    assert store.record.state == IN_DOUBT


def test_an_async_function_is_cancelled_with_its_request(store, clock):
    """L6: what is async is cancelled with the request that asked."""
    silent = Silent()
    policy = asking_policy(silent, WAIT_S_MAX)

    async def use():
        async with AsyncEngine(AsyncMemoryStore(store), policy, clock=clock) as engine:
            task = asyncio.create_task(engine.run("k", dict, scope="charges"))
            await asyncio.to_thread(wait_for, silent.is_asked)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.attempts.heartbeat.leases == {}

    abandoned_before(store, clock)
    asyncio.run(use())
    assert silent.is_cancelled.is_set()


def test_an_async_function_that_cancels_itself_does_not_answer(store, clock):
    """L6: its request goes on, and gets outcome-unknown."""

    async def ask(_operation):
        raise asyncio.CancelledError

    policy = asking_policy(ask, WAIT_S_MAX)

    async def use():
        async with AsyncEngine(AsyncMemoryStore(store), policy, clock=clock) as engine:
            with pytest.raises(OutcomeUnknown):
                await engine.run("k", dict, scope="charges")

    abandoned_before(store, clock)
    asyncio.run(use())
    assert store.record.state == IN_DOUBT


def gives_up(_operation):
    sys.exit("the provider's helper gives up like this")


async def gives_up_async(_operation):
    sys.exit("the provider's helper gives up like this")


@pytest.mark.parametrize("ask", [gives_up, gives_up_async])
def test_a_reconcile_function_that_exits_does_not_answer(store, clock, caplog, ask):
    """L6: the process of the request goes on."""
    abandoned_before(store, clock)
    with Engine(store, asking_policy(ask, WAIT_S_MAX), clock=clock) as engine:
        with pytest.raises(OutcomeUnknown):
            engine.run("k", Handler(), scope="charges")
        assert (store.record.state, engine.attempts.heartbeat.leases) == (IN_DOUBT, {})
    assert "SystemExit" in caplog.text


def test_a_function_sees_the_context_variables_of_its_request(guards, store, clock):
    """L6: it is asked in another thread, but not as a stranger."""
    tenant = contextvars.ContextVar("tenant", default="")
    asked = []

    def ask(_operation):
        asked.append((tenant.get(), threading.current_thread().name))
        return FOUND

    engine = guards.engine(store, asking_policy(ask, "20s"), clock=clock)
    abandoned(guards, engine, clock)
    context = contextvars.copy_context()
    context.run(tenant.set, "acme")
    assert context.run(guards.run, engine, "k", Handler(), scope="charges") == "found"
    assert asked == [("acme", "coatcheck-reconcile")]


# --- so many at once --------------------------------------------------------------------------


def test_the_number_of_calls_at_once_is_limited(guards, store, clock, monkeypatch):
    """L6: everything has a limit; when they answer again, so does everybody else."""
    monkeypatch.setattr(asking, "CALLS_MAX", 2)
    silent = held_up(FOUND)
    patient = {"scope": "charges", "policy": asking_policy(silent, WAIT_S_MAX)}
    engine = guards.engine(store, asking_policy(silent), clock=clock)
    abandoned(guards, engine, clock, *"abcde")
    hanging = [guards.beside(engine, key, Handler(), **patient) for key in "ab"]
    eventually(lambda: silent.calls == 2)
    for key in "cde":
        with pytest.raises(OutcomeUnknown):
            guards.run(engine, key, Handler(), scope="charges")
    assert (silent.calls, calls_under_way(engine)) == (2, 2)
    silent.may_end.set()
    assert [retry.result(WAIT_S_MAX) for retry in hanging] == ["found", "found"]
    eventually(lambda: calls_under_way(engine) == 0)
    assert silent.calls == 2  # no further call, because no request waits
    assert [guards.run(engine, key, Handler(), **patient) for key in "cde"] == ["found"] * 3


def test_a_call_waits_for_a_free_place(guards, store, clock, monkeypatch):
    """L6: a crowd after a crash is not a fault."""
    monkeypatch.setattr(asking, "CALLS_MAX", 1)
    slow = held_up(FOUND)
    engine = guards.engine(store, asking_policy(slow, WAIT_S_MAX), clock=clock)
    abandoned(guards, engine, clock, *"abcd")
    retries = [guards.beside(engine, key, Handler(), scope="charges") for key in "abcd"]
    eventually(lambda: slow.calls == 1 and attempts(store, "charges") == [2] * 4)
    assert slow.calls == 1
    slow.may_end.set()
    assert [retry.result(WAIT_S_MAX) for retry in retries] == ["found"] * 4


def test_a_thread_that_cannot_be_started_leaves_it_in_doubt(
    guards, store, clock, monkeypatch, caplog
):
    """L6: the operation stays in doubt, and nothing is left behind."""
    engine = guards.engine(store, asking_policy(lambda _: FOUND, "20s"), clock=clock)
    abandoned(guards, engine, clock)

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asking.threading, "Thread", Refused)
        with pytest.raises(OutcomeUnknown):
            guards.run(engine, "k", Handler(), scope="charges")
    assert "can't start new thread" in caplog.text
    assert guards.run(engine, "k", Handler(), scope="charges") == "found"


# --- in the background ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_recovery_goes_on_although_one_function_hangs(guards, store, clock, kind):
    """L6: it is in doubt, and is asked about again when its time has come."""
    ask = held_up(FOUND) if kind == "sync" else Silent()
    policy = asking_policy(ask)
    engine = guards.engine(store, policy, clock=clock, recover_every_s=60)
    abandoned(guards, engine, clock)
    engine.attempts.heartbeat.tick()
    recovery_round(engine, clock)
    assert (store.record.state, store.record.attempt) == (IN_DOUBT, 2)
    ask.may_end.set()
    engine.recovery.register_function("charges", asking_policy(lambda _: FOUND, "20s"))
    for _ in range(2):
        recovery_round(engine, clock)
    assert store.record.state == COMPLETED


def test_a_function_that_hangs_delays_a_round_only_once(guards, store, clock):
    """L6: whatever else was abandoned is not made to wait for a provider that is away."""
    engine = guards.engine(store, clock=clock, recover_every_s=60)
    found = asking_policy(lambda _: FOUND, WAIT_S_MAX)
    for scope, policy in (("charges", asking_policy(Silent())), ("orders", found)):
        abandoned(guards, engine, clock, *"abc", scope=scope, policy=policy)
    engine.attempts.heartbeat.tick()
    recovery_round(engine, clock)
    assert [r.state for r in store.records if r.label == "orders"] == [COMPLETED] * 3
    assert attempts(store, "charges") == [1, 1, 2]
    recovery_round(engine, clock)
    assert attempts(store, "charges") == [1, 2, 2]


@pytest.mark.parametrize("ask", [gives_up, gives_up_async])
def test_an_exit_in_one_function_does_not_affect_others(guards, store, clock, ask):
    """L6: a round asks for all that was abandoned, whatever one function does."""
    engine = guards.engine(store, clock=clock, recover_every_s=60)
    found = asking_policy(lambda _: FOUND, WAIT_S_MAX)
    for scope, policy in (("charges", asking_policy(ask, WAIT_S_MAX)), ("orders", found)):
        abandoned(guards, engine, clock, *"abc", scope=scope, policy=policy)
    engine.attempts.heartbeat.tick()
    recovery_round(engine, clock)
    assert [r.state for r in store.records if r.label == "orders"] == [COMPLETED] * 3
    assert [r.state for r in store.records if r.label == "charges"] == [IN_DOUBT] * 3


@asynccontextmanager
async def recovering(store, policy, clock):
    """An engine whose background recovers charges, on the running event loop."""
    async with AsyncEngine(
        AsyncMemoryStore(store), policy, clock=clock, recover_every_s=60
    ) as engine:
        engine.recovery.register_function("charges", policy)
        await engine.ensure_started()
        engine.attempts.heartbeat.tick()
        yield engine


def attempts(store, label):
    return sorted(record.attempt for record in store.records if record.label == label)


def test_a_blocked_event_loop_is_not_waited_for(store, clock):
    """L6: the background lives in threads, and an answer from that loop may never come."""
    policy = asking_policy(Silent())

    async def use():
        async with recovering(store, policy, clock) as engine:
            round_ = threading.Thread(target=recovery_round, args=(engine, clock))
            round_.start()
            round_.join(WAIT_S_MAX / 2)  # on the loop, which does not turn meanwhile
            assert not round_.is_alive()
            assert store.record.state == IN_DOUBT

    abandoned_before(store, clock)
    asyncio.run(use())
