"""Recovery: what was abandoned settles even if no client ever comes back."""

import asyncio
import logging
import threading

import pytest

import coatcheck
from coatcheck import (
    AsyncEngine,
    DidNotHappen,
    Engine,
    Happened,
    KeyRing,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    Unknown,
    current_operation,
)
from coatcheck.core.deferred import DeferredToken, encode_token
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    IN_DOUBT,
    RUNNING,
    Record,
    Swap,
    in_doubt,
)
from coatcheck.engine import reconcile_calls, recovery
from coatcheck.engine.recovery import label_of_route
from coatcheck.server import asgi, wsgi
from coatcheck.server.starlette import idempotent
from coatcheck.stores.memory import AsyncMemoryStore
from coatcheck.stores.sqlite.store import SqliteStore
from tests.support.engines import (
    LEASE_S,
    ROUND_S,
    Handler,
    Killed,
    WatchedStore,
    held_up,
    only_record,
    recovery_round,
)
from tests.support.times import WAIT_S_MAX, eventually, wait_for

MANUAL = Policy(recovery="manual")


class Asked:
    """A reconcile function that gives one answer after the other, the last for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.operations = []
        self.threads = []

    def __call__(self, operation):
        self.operations.append(operation)
        self.threads.append(threading.current_thread())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def policy(self) -> Policy:
        return Policy(recovery="reconcile", reconcile=self)


@pytest.fixture(params=["memory", "compact"])
def store(request, tmp_path):
    if request.param == "memory":
        return FindingStore()
    return coatcheck.open_store(f"sqlite:///{tmp_path}/records.db?compact=1")


def key_in(store, key: str) -> str:
    """What is kept of *key*: a compact store drops it, and recovers all the same."""
    return "" if isinstance(store, SqliteStore) else key


class FindingStore(WatchedStore):
    """Counts searches, and fails at them if a test wants that."""

    def __init__(self):
        super().__init__()
        self.finds = []
        self.is_away = False

    def find(self, query):
        self.finds.append(query)
        if self.is_away:
            raise StoreUnavailable("the store is down")
        return super().find(query)


def restarted(guards, store, clock, policy, **options):
    """An engine of another process, which guards the same function and is never called."""
    engine = guards.engine(store, clock=clock, recover_every_s=60, **options)
    engine.guard(key=str, scope="charges", policy=policy)(guards.flavoured(Handler()))
    engine.attempts.heartbeat.tick()
    return engine


def crashed(guards, store, clock, policy, *keys):
    """The engine of another process, after the process of a call has died."""
    guards.abandon(guards.engine(store, clock=clock), *keys, policy=policy, scope="charges")
    return restarted(guards, store, clock, policy)


# --- what becomes of it -----------------------------------------------------------------------

ANSWERS = {
    "happened": (Happened(value={"charge": 7}), COMPLETED),
    "did not happen": (DidNotHappen(), FAILED),
    "unknown": (Unknown(), IN_DOUBT),
    "an error": (ZeroDivisionError(), IN_DOUBT),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_abandoned_operation_settles_though_no_client_comes_back(guards, store, clock, answer):
    """L6: the application is asked, in the background."""
    told, state = ANSWERS[answer]
    ask = Asked(told)
    engine = crashed(guards, store, clock, ask.policy)
    recovery_round(engine, clock)
    (operation,) = ask.operations
    assert operation.key == key_in(store, "k")
    assert (operation.label, operation.attempt) == ("charges", 2)
    assert (only_record(engine).state, only_record(engine).attempt) == (state, 2)
    assert engine.attempts.heartbeat.leases == {}
    handler = Handler("ran")
    if state == COMPLETED:
        assert guards.run(engine, "k", handler, scope="charges") == {"charge": 7}
        assert handler.calls == 0
    elif state == FAILED:
        assert guards.run(engine, "k", handler, scope="charges") == "ran"


def test_a_long_label_is_recovered_by_its_own_policy(guards, store, clock):
    """L6, X2: a record keeps its beginning and a digest, and two that begin alike are two."""
    engine = guards.engine(store, clock=clock, recover_every_s=60)
    asked = {key: Asked(DidNotHappen()) for key in ("one", "other")}
    for key, ask in asked.items():
        guards.abandon(engine, key, policy=ask.policy, scope="s" * 300 + key)
    engine.attempts.heartbeat.tick()
    recovery_round(engine, clock)
    for key, ask in asked.items():
        (operation,) = ask.operations
        assert (operation.key, len(operation.label)) == (key_in(store, key), 200)


def test_under_manual_recovery_it_is_marked_in_doubt(guards, store, clock, caplog):
    """L6, O1: before any retry."""
    engine = crashed(guards, store, clock, MANUAL)
    recovery_round(engine, clock)
    record = only_record(engine)
    assert (record.state, record.attempt) == (IN_DOUBT, 1)
    assert "(charges) is in doubt: attempt 1 never finished" in caplog.text
    with pytest.raises(OutcomeUnknown):
        guards.run(engine, "k", Handler(), scope="charges", policy=MANUAL)


def noting():
    yield current_operation().note("about to charge")
    raise Killed


def test_the_reconcile_function_sees_what_the_attempt_had_noted(guards, store, clock):
    """L7."""
    ask, ring = Asked(DidNotHappen()), KeyRing({"1": b"k" * 32})
    engine = guards.engine(store, clock=clock, keyring=ring)
    with pytest.raises(Killed):
        guards.run(engine, "k", noting, scope="charges", policy=ask.policy)
    recovery_round(restarted(guards, store, clock, ask.policy, keyring=ring), clock)
    (operation,) = ask.operations
    assert [note.what for note in operation.notes] == ["about to charge"]


def test_a_record_that_cannot_be_decrypted_here_is_left_alone(guards, clock, caplog):
    """X1: nothing is written over what cannot be read."""
    store, ask = FindingStore(), Asked(DidNotHappen())
    first = guards.engine(store, clock=clock, keyring=KeyRing({"1": b"k" * 32}))
    with pytest.raises(Killed):
        guards.run(first, "k", noting, scope="charges", policy=ask.policy)
    before = store.record
    engine = restarted(guards, store, clock, ask.policy, keyring=KeyRing({"2": b"q" * 32}))
    recovery_round(engine, clock)
    assert ask.operations == []
    assert store.record == before
    assert "could not be recovered" in caplog.text


def test_a_waiter_is_woken_when_the_operation_is_recovered(guards, clock):
    """L3."""
    store, ask = FindingStore(), Asked(Happened(value="found"))
    engine = guards.engine(store, ask.policy, clock=clock, recover_every_s=60)
    guards.abandon(engine, scope="charges")
    engine.attempts.heartbeat.tick()
    woken = []
    engine.attempts.waiters.join(store.record.id, woken.append, 1)
    recovery_round(engine, clock)
    look, record = woken  # to read the store again, and with the outcome
    assert look is None
    assert record.state == COMPLETED
    assert record == engine.attempts.replay_cache.get(record.id)


# --- what is left alone -----------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "every_s"), [(Policy(), 60), (MANUAL, None)])
def test_the_store_is_not_searched_if_no_policy_needs_it(guards, clock, policy, every_s):
    """L6: nor by an engine without recovery."""
    store = FindingStore()
    engine = guards.engine(store, policy, clock=clock, recover_every_s=every_s)
    guards.abandon(engine)
    for _ in range(3):
        clock.advance(ROUND_S)
        engine.attempts.heartbeat.tick()
    assert (store.finds, store.record.state, engine.recovery._thread) == ([], RUNNING, None)


def test_only_reconcile_policies_search_for_operations_in_doubt(guards, clock):
    store = FindingStore()
    recovery_round(restarted(guards, store, clock, MANUAL), clock)
    assert [query.state for query in store.finds] == [RUNNING]
    recovery_round(restarted(guards, store, clock, Asked(Unknown()).policy), clock)
    assert [query.state for query in store.finds] == [RUNNING, RUNNING, IN_DOUBT]


def test_an_operation_of_another_service_is_not_touched(guards, clock):
    """L6: of another function, of a request, or of a store that does not say."""
    store, ask = FindingStore(), Asked(DidNotHappen())
    guards.abandon(guards.engine(store, clock=clock), scope="orders", policy=ask.policy)
    theirs = [
        store.record,
        store.record._replace(id=b"r" * 16, label="charges", scope="5c0pe"),
        store.record._replace(id=b"s" * 16, label=""),
    ]
    for record in theirs:
        store._records[record.id] = record
    recovery_round(restarted(guards, store, clock, ask.policy), clock)
    assert ask.operations == []
    assert store.records == sorted(theirs)


def test_an_operation_that_still_runs_here_is_not_recovered(guards, clock):
    """L5: its renewals did not come through, but this process knows that it runs."""
    store, ask, handler = FindingStore(), Asked(DidNotHappen()), held_up("done")
    engine = guards.engine(store, ask.policy, clock=clock, recover_every_s=60)
    running = guards.beside(engine, "k", handler)
    wait_for(handler.is_running)
    engine.attempts.heartbeat.tick()
    engine.attempts.heartbeat._renew_now = lambda _now_ms: None
    recovery_round(engine, clock)
    assert ask.operations == []
    handler.may_end.set()
    assert running.result(WAIT_S_MAX) == "done"


# --- when -------------------------------------------------------------------------------------


def test_an_operation_that_stays_unknown_is_asked_about_less_and_less_often(guards, store, clock):
    """L6: and everybody goes by the same time, because the record tells it."""
    ask = Asked(Unknown())
    guards.abandon(guards.engine(store, clock=clock), policy=ask.policy, scope="charges")
    began_ms = clock.now_ms
    engines = [restarted(guards, store, clock, ask.policy) for _ in range(2)]
    asked_after_s = []
    for _ in range(40):
        for engine in engines:
            before = len(ask.operations)
            recovery_round(engine, clock)
            if len(ask.operations) > before:
                asked_after_s.append((clock.now_ms - began_ms) // 1_000)
                began_ms = clock.now_ms
    assert asked_after_s == [90, 180, 270, 540, 990, 1_980]
    assert [operation.attempt for operation in ask.operations] == [2, 3, 4, 5, 6, 7]


def test_a_doubt_that_lasts_is_one_warning(guards, store, clock, caplog):
    """L6, O3: however often the function is asked; the next doubt of the same key is another."""
    ask = Asked(Unknown(), ZeroDivisionError(), Unknown(), Unknown(), DidNotHappen())
    policy = Policy(recovery="reconcile", reconcile=ask, keep="final")
    engine = crashed(guards, store, clock, policy)
    for _ in range(40):
        recovery_round(engine, clock)
    assert len(ask.operations) == 5

    def doubts() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        return [message for message in found if "is in doubt" in message]

    assert len(doubts()) == 1
    assert engine.attempts.telemetry.in_doubt_count == 1
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", Handler(lambda: 1 / 0), scope="charges", policy=policy)
    ask.answers = [Unknown()]
    for _ in range(40):
        recovery_round(engine, clock)
    assert len(doubts()) == 2
    assert "attempt 7 raised ZeroDivisionError" in doubts()[1]


def test_clients_that_retry_do_not_make_it_ask_less_often(guards, store, clock):
    """L6: what a client asks in a hurry is not what this engine has asked in vain for an hour."""
    ask = Asked(Unknown())
    engine = crashed(guards, store, clock, ask.policy)
    clock.advance(LEASE_S)
    for _ in range(8):
        clock.advance(1)
        with pytest.raises(OutcomeUnknown):
            guards.run(engine, "k", Handler(), scope="charges", policy=ask.policy)
    assert len(ask.operations) == 8
    for _ in range(2):  # after 90 and 180 s; it was begun 68 s before the last client came
        recovery_round(engine, clock)
    assert len(ask.operations) == 9


def test_a_doubt_ends_when_the_downstream_can_tell_again(guards, store, clock):
    """L6."""
    ask = Asked(Unknown(), ZeroDivisionError(), Happened(value="found"))
    engine = crashed(guards, store, clock, ask.policy)
    for _ in range(6):
        recovery_round(engine, clock)
    assert len(ask.operations) == 3
    assert guards.run(engine, "k", Handler(), scope="charges") == "found"


def test_a_round_takes_so_many_and_the_next_goes_on(guards, store, clock, monkeypatch):
    """L6: everything has a limit."""
    monkeypatch.setattr(recovery, "RECORDS_MAX", 2)
    first = guards.engine(store, clock=clock)
    for number in range(5):
        guards.abandon(first, f"k{number}", policy=MANUAL, scope="charges")
    engine = restarted(guards, store, clock, MANUAL)
    counts = []
    for _ in range(5):
        recovery_round(engine, clock)
        query = coatcheck.stores.Query(state=IN_DOUBT)
        counts.append(len(engine.attempts._store.find(query).records))
    assert counts[0] == 2
    assert counts[-1] == 5


@pytest.mark.parametrize("is_away", [False, True])
def test_a_store_that_is_slow_to_search_is_searched_less_often(guards, clock, monkeypatch, is_away):
    """T3: finding may mean to read a whole table; also where that is in vain."""
    store = FindingStore()
    store.is_away = is_away
    engine = restarted(guards, store, clock, MANUAL)
    find = store.find

    def find_slowly(query):
        clock.advance(ROUND_S)
        return find(query)

    monkeypatch.setattr(store, "find", find_slowly)
    monkeypatch.setattr(recovery, "local_ms", lambda: clock.now_ms)
    recovery_round(engine, clock)
    clock.advance(recovery.PAUSE_PER_SEARCH * ROUND_S - 1)
    thread = engine.recovery._thread
    engine.attempts.heartbeat.tick()
    assert engine.recovery._thread is thread
    clock.advance(1)
    recovery_round(engine)


@pytest.mark.parametrize("trouble", ["find", "swap", "bug"])
def test_a_round_that_fails_is_repeated(guards, clock, caplog, trouble):
    """D2: an outage, or a bug."""
    store, ask = FindingStore(), Asked(Happened(value="found"))
    engine = crashed(guards, store, clock, ask.policy)
    if trouble == "find":
        store.is_away = True
    elif trouble == "swap":
        store.troubles = ["down"]
    else:
        store.find = lambda _query: 1 / 0
    recovery_round(engine, clock)
    assert "a round of recovery failed" in caplog.text
    store.is_away = False
    vars(store).pop("find", None)
    recovery_round(engine, clock)
    assert store.record.state == COMPLETED


def test_a_lost_acknowledgement_does_no_harm(guards, clock):
    """D2: the same is written again, and meets itself."""
    store, ask = FindingStore(), Asked(Happened(value="found"))
    engine = crashed(guards, store, clock, ask.policy)
    store.troubles = ["deaf", "", "deaf"]
    recovery_round(engine, clock)
    assert (store.record.state, store.record.attempt) == (COMPLETED, 2)
    assert len(ask.operations) == 1


# --- who asks ---------------------------------------------------------------------------------


def test_a_slow_reconcile_function_delays_neither_renewals_nor_ticks(guards, store, clock):
    """L5: it is waited for in a thread of its own, and its claim is renewed meanwhile."""
    slow = held_up(Happened(value="found"))
    policy = Policy(recovery="reconcile", reconcile=slow)
    engine = crashed(guards, store, clock, policy)
    clock.advance(ROUND_S)
    engine.attempts.heartbeat.tick()
    wait_for(slow.is_running)
    thread = engine.recovery._thread
    for _ in range(3):
        clock.advance(LEASE_S)
        engine.attempts.heartbeat.tick()
        assert only_record(engine).lease_until_ms == clock.now_ms + 1_000 * LEASE_S
    assert engine.recovery._thread is thread
    slow.may_end.set()
    thread.join(WAIT_S_MAX)
    assert (slow.calls, only_record(engine).state) == (1, COMPLETED)


def test_an_async_reconcile_function_runs_on_the_loop_of_the_application(clock):
    """L6: its pools and clients belong to that loop."""
    store, loops = FindingStore(), []

    async def ask(_operation):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return Happened(value="found")

    async def use():
        policy = Policy(recovery="reconcile", reconcile=ask)
        async with AsyncEngine(AsyncMemoryStore(store), policy, clock=clock) as engine:
            with pytest.raises(Killed):
                await engine.run("k", dying, scope="charges")
            engine.attempts.heartbeat.tick()
            await asyncio.to_thread(recovery_round, engine, clock)
            return asyncio.get_running_loop()

    assert loops == [asyncio.run(use())]
    assert store.record.state == COMPLETED


async def dying():
    raise Killed


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
def test_an_async_reconcile_function_runs_even_where_no_loop_does(kind, clock):
    """L6: also by an engine for sync code, and on a retry of its own."""
    store = FindingStore()

    async def ask(_operation):
        await asyncio.sleep(0)
        return Happened(value="found")

    policy = Policy(recovery="reconcile", reconcile=ask)
    with Engine(store, policy, clock=clock) as first:
        for key in ("k", "retried"):
            with pytest.raises(Killed):
                first.run(key, Handler(Killed()), scope="charges")
        clock.advance(LEASE_S)
        assert first.run("retried", Handler(), scope="charges") == "found"
    engine = kind(store if kind is Engine else AsyncMemoryStore(store), policy, clock=clock)
    engine.recovery.register_function("charges", policy)
    engine.attempts.heartbeat.tick()
    recovery_round(engine, clock)
    assert {record.state for record in store.records} == {COMPLETED}
    engine.attempts.heartbeat.stop()


@pytest.mark.parametrize("how", ["ended", "stopped"])
def test_an_event_loop_that_does_not_answer_leaves_the_operation_in_doubt(clock, monkeypatch, how):
    """L6: what was asked on a loop that has ended or was stopped is never answered."""
    monkeypatch.setattr(reconcile_calls, "POLL_S", 0.001)
    store, is_asked, loop = FindingStore(), threading.Event(), asyncio.new_event_loop()

    async def ask(_operation):
        is_asked.set()
        await asyncio.Event().wait()

    async def use():
        with pytest.raises(Killed):
            await engine.run("k", dying, scope="charges")
        engine.attempts.heartbeat.tick()
        clock.advance(ROUND_S)
        engine.attempts.heartbeat.tick()
        await asyncio.to_thread(wait_for, is_asked)

    policy = Policy(recovery="reconcile", reconcile=ask)
    engine = AsyncEngine(AsyncMemoryStore(store), policy, clock=clock)
    loop.run_until_complete(use())
    if how == "ended":
        asyncio.runners._cancel_all_tasks(loop)
    engine.recovery._thread.join(WAIT_S_MAX)
    assert store.record.state == IN_DOUBT
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(engine.close())
    loop.close()


def test_closing_waits_for_a_reconcile_function_but_not_for_ever(guards, clock, monkeypatch):
    monkeypatch.setattr(recovery, "CLOSE_S_MAX", 0.01)
    store, slow = FindingStore(), held_up(Happened(value="found"))
    policy = Policy(recovery="reconcile", reconcile=slow)
    engine = crashed(guards, store, clock, policy, "k", "another")
    clock.advance(ROUND_S)
    engine.attempts.heartbeat.tick()
    wait_for(slow.is_running)
    guards.done(engine.close())
    slow.may_end.set()
    engine.recovery._thread.join(WAIT_S_MAX)
    assert slow.calls == 1  # and nothing more is begun
    clock.advance(ROUND_S)
    thread = engine.recovery._thread
    engine.attempts.heartbeat.tick()
    assert engine.recovery._thread is thread


# --- by itself --------------------------------------------------------------------------------


def test_recovery_begins_by_itself_when_an_engine_is_started(guards, tmp_path, caplog):
    """L6: a process that restarts after the crash, and gets no request."""
    caplog.set_level(logging.INFO, "coatcheck")
    url, ask = f"sqlite:///{tmp_path}/records.db", Asked(Happened(value="found"))
    policy = Policy(recovery="reconcile", reconcile=ask, lease="50ms", wait=0)
    guards.abandon(guards.engine(url), policy=policy, scope="charges")
    engine = guards.engine(url, recover_every_s=0.05)
    engine.guard(key=str, scope="charges", policy=policy)(guards.flavoured(Handler()))
    # Decorated when a module is imported, perhaps by a parent.
    assert engine.attempts.heartbeat._thread is None
    guards.done(engine.ensure_started())
    assert engine.attempts.heartbeat._thread.is_alive()

    def has_settled():
        engine.attempts.heartbeat._wake.set()  # sooner than its longest pause
        return only_record(engine).state == COMPLETED

    eventually(has_settled)
    eventually(lambda: "(charges), whose attempt 1 never finished, is now completed" in caplog.text)


def test_many_scopes_that_are_made_at_run_time_are_bounded(guards, clock, monkeypatch):
    """L6: everything has a limit; what was known first is forgotten first."""
    monkeypatch.setattr(recovery, "LABELS_MAX", 2)
    engine = guards.engine("memory://", MANUAL, clock=clock)
    for scope in ("a", "b", "b", "c"):
        guards.run(engine, "k", Handler(), scope=scope)
    assert list(engine.recovery._functions) == ["b", "c"]


# --- requests ---------------------------------------------------------------------------------


def left(store, label, clock):
    """What a request left behind whose process died in the middle."""
    record = Record(
        *(label.encode().ljust(16, b".")[:16], clock.now_ms, RUNNING, 1, b"f" * 16, clock.now_ms),
        *(clock.now_ms + 60_000, clock.now_ms + 86_400_000, clock.now_ms + 90_000_000, 5),
        *(label, "5c0pe5c0pe5c0pe0", "k", None, None),
    )
    store._records[record.id] = record
    return record.id


@pytest.mark.parametrize("service", ["", "shop"])
def test_every_route_is_recovered_by_its_own_policy(clock, service):
    """L6, S3: declared ones by theirs, all others of a named service by the middleware's."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount, Route

    ask, store = Asked(Happened(201, [], b"found")), FindingStore()

    @idempotent(reconcile=ask)
    async def charge(request): ...

    @idempotent(recovery="retry", methods=("PUT", "DELETE"))
    async def store_it(request): ...

    async def order(request): ...

    engine = AsyncEngine(
        *(AsyncMemoryStore(store), MANUAL),
        clock=clock,
        recover_every_s=60,
        service=service,
    )
    app = Starlette(
        routes=[
            Mount("/v1", routes=[Route("/charges/{id:int}", charge, methods=["POST"])]),
            Route("/things/{id}", store_it, methods=["GET", "PUT", "POST"]),
            Route(f"/{'long' * 60}/{{id}}", charge, methods=["POST"]),
            Route("/orders", order, methods=["POST"]),
        ],
        middleware=[Middleware(asgi.IdempotencyMiddleware, engine=engine)],
    )
    asked = left(store, label_of_route("POST /v1/charges/{id}", service), clock)
    asked_too = left(store, label_of_route(f"POST /{'long' * 60}/{{id}}", service), clock)
    rerunnable = left(store, label_of_route("PUT /things/{id}", service), clock)
    undeclared = left(store, label_of_route("POST /orders/17", service), clock)
    not_guarded = left(store, label_of_route("QUERY /orders", service), clock)

    async def use():
        await lifespan(app)
        assert engine.attempts.heartbeat._thread.is_alive()
        engine.attempts.heartbeat.tick()
        await asyncio.to_thread(recovery_round, engine, clock)
        await engine.close()

    asyncio.run(use())
    states = {record.id: record.state for record in store.records}
    assert states == {
        **dict.fromkeys((asked, asked_too), COMPLETED),
        **dict.fromkeys((rerunnable, not_guarded), RUNNING),
        undeclared: IN_DOUBT if service else RUNNING,
    }
    label = "POST /v1/charges/{id} @shop" if service else "POST /v1/charges/{id}"
    assert label in [operation.label for operation in ask.operations]


async def lifespan(app):
    """Start *app* and stop it, as a server does."""
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    told = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        told.append(message["type"])

    await app({"type": "lifespan", "state": {}}, receive, send)
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_requests_of_a_wsgi_application_are_recovered(clock):
    """L6."""
    ask, store = Asked(Happened(201, [], b"found")), FindingStore()
    engine = Engine(store, ask.policy, clock=clock, recover_every_s=60, service="shop")
    app = wsgi.IdempotencyMiddleware(lambda environ, start_response: [], engine=engine)
    left(store, "POST /orders/17 @shop", clock)
    app.engine.ensure_started()
    engine.attempts.heartbeat.tick()
    recovery_round(engine, clock)
    assert store.record.state == COMPLETED
    assert coatcheck.core.response.outline_of(store.record.response) == (201, 5)
    engine.close()


@pytest.mark.parametrize("theirs", ["", " @billing", " @not-shop", "@shop"])
@pytest.mark.parametrize("ours", ["", "shop"])
@pytest.mark.parametrize("flavour", [asgi, wsgi])
def test_an_operation_that_another_service_abandoned_is_left_to_it(clock, flavour, ours, theirs):
    """L5, L6, S1: a path does not say whose it is; the name of its service does."""
    store, ask = FindingStore(), Asked(DidNotHappen())
    stored = AsyncMemoryStore(store) if flavour is asgi else store
    kind = AsyncEngine if flavour is asgi else Engine
    for policy in (MANUAL, ask.policy):
        engine = kind(stored, policy, clock=clock, service=ours)
        flavour.IdempotencyMiddleware(lambda *_: None, engine=engine)
        engine.recovery.register_route("POST /charges", policy)
        left(store, f"POST /emails{theirs}", clock)
        before = store.record
        engine.attempts.heartbeat.tick()
        recovery_round(engine, clock)
        assert (store.record, ask.operations) == (before, [])
        engine.attempts.heartbeat.stop()


@pytest.mark.parametrize("dies_in", ["a worker", "an operator"])
def test_an_operation_stays_with_its_service_whatever_continued_it(guards, store, clock, dies_in):
    """L6: also if the process of a worker or an operator, with another policy, has died."""
    ask = Asked(Happened(201, [], b"found"))
    first = guards.engine(store, clock=clock)
    id = left_in(first, "POST /orders/17 @shop", clock, is_in_doubt=dies_in != "a worker")
    dying = guards.flavoured(Handler(Killed()))
    record = only_record(first)
    if dies_in == "a worker":
        token = encode_token(
            DeferredToken(id, record.created_ms, record.nonce), first.attempts.secret
        )
        again = lambda: first.run_deferred(token, dying)  # noqa: E731
    else:
        again = lambda: first.rerun(id, dying, by="ada", why="who knows")  # noqa: E731
    with pytest.raises(Killed):
        guards.done(again())
    engine = guards.engine(store, ask.policy, clock=clock, recover_every_s=60, service="shop")
    engine.recovery.register_requests(ask.policy)
    engine.attempts.heartbeat.tick()
    for _ in range(2):
        recovery_round(engine, clock)
    assert [operation.label for operation in ask.operations] == ["POST /orders/17 @shop"]
    assert only_record(engine).state == COMPLETED


def left_in(engine, label, clock, *, is_in_doubt):
    """The same in any store."""
    memory = FindingStore()
    id = left(memory, label, clock)
    record = memory.record
    assert engine.attempts._store.swap((Swap(id, 0, record),)) == [None]
    if is_in_doubt:
        assert engine.attempts._store.swap((Swap(id, record.version, in_doubt(record)),)) == [None]
    return id
