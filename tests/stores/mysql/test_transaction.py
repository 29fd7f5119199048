"""Transaction mode on MySQL and MariaDB, above all on connections that the store opens itself."""

import asyncio
import signal
import time
from contextlib import closing, contextmanager
from typing import Self

import asyncmy
import pymysql
import pytest

from coatcheck import AsyncEngine, Engine, Policy, ResultUnavailable, current_operation
from coatcheck.errors import StoreUnavailable
from tests.stores.laws.records import LEASE_MS, NOW_MS
from tests.stores.mysql.support import in_every_mode, other_session, packets_of, query
from tests.support.servers import until
from tests.support.servers.mariadb import PLAIN
from tests.support.servers.relay import Relay

HOSTILE = (
    "x\\', null, null, -5), (sleep(9), 1) -- \\\\'; drop table coatcheck_records; -- \" %s %% é"
)


MODES = ("", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES", "EMPTY_STRING_IS_NULL", "MSSQL")


@pytest.mark.parametrize(
    ("mode", "is_given"),
    # In the mode ORACLE `begin` begins no transaction, so the application cannot give us one.
    [*((mode, is_given) for mode in MODES for is_given in (False, True)), ("ORACLE", False)],
)
def test_no_key_is_ever_read_as_sql_whatever_the_sql_mode(own_url, mode, is_given):
    """D1, L9: in both modes, sync and async, on our connections and on the application's."""
    port, _, database = own_url.partition("?")[0].rpartition(":")[2].partition("/")
    place = {"host": "127.0.0.1", "port": int(port), "user": "root", "database": database}
    connect = (
        (lambda: pymysql.connect(**place, **PLAIN), lambda: asyncmy.connect(**place))
        if is_given
        else None
    )
    with other_session(own_url) as root:
        (before,) = query(root, "select @@global.sql_mode")[0]
        query(root, f"set global sql_mode = '{mode}'")
        try:
            for result in (HOSTILE, HOSTILE * 100):
                key = f"{len(result)}{HOSTILE}"
                for _ in range(2):
                    assert in_every_mode(own_url, key, result, connect) == [result] * 4
            with Engine(own_url + "&compact=1") as engine:  # which keeps no key
                for _ in range(2):
                    assert engine.transaction("k", lambda: "", scope="compact") == ""
        finally:
            query(root, f"set global sql_mode = '{before}'")
        keys = {key.decode() for (key,) in query(root, "select `key` from coatcheck_records")}
        assert keys == {"", *(f"{len(HOSTILE * n)}{HOSTILE}" for n in (1, 100))}


@pytest.mark.parametrize("way", ["run", "transaction"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_response_that_does_not_fit_is_not_kept_and_never_runs_twice(
    own_url, way, is_async, caplog
):
    """L12, L1: as with one over `response_bytes_max`: the work is recorded as done."""
    ran = []

    def work():
        ran.append(1)
        return "'" * 2_000_000

    async def awork():
        return work()

    async def on_loop():
        async with AsyncEngine(own_url, clock=lambda: clock[0]) as engine:
            return await getattr(engine, way)("large", awork, scope="s")

    def attempt():
        if is_async:
            return asyncio.run(on_loop())
        with Engine(own_url, clock=lambda: clock[0]) as engine:
            return getattr(engine, way)("large", work, scope="s")

    clock = [NOW_MS]
    with packets_of(own_url, 1_048_576):
        assert len(attempt()) == 2_000_000
        for _ in range(2):
            clock[0] += 10 * LEASE_MS
            with pytest.raises(ResultUnavailable):
                attempt()
    assert len(ran) == 1
    assert "exceeds the server's max_allowed_packet" in caplog.text


# --- a server that stops, on connections of the store's own ---------------------------------------

# Longer than `timeout`, and shorter than `transaction_timeout`.
SLOW = "select sleep(0.5)"
LIMITS = "&timeout=300ms&transaction_timeout=1s"


def test_a_statement_of_the_handler_may_take_longer_than_the_timeout_of_the_store(own_url):
    """D2, L9: it has the limit of `transaction_timeout`, and is an error beyond it."""
    with Engine(own_url + LIMITS) as engine:

        def run(statement):
            return len(query(current_operation().connection, statement))

        assert engine.transaction("a", run, SLOW, scope="s") == 1
        with pytest.raises(pymysql.OperationalError, match="timed out"):
            engine.transaction("b", run, "select sleep(2)", scope="s")
        # The server notices after the statement that the connection is closed; this waits for it.
        assert engine.transaction("b", lambda: "done", scope="s") == "done"


def test_a_statement_of_an_async_handler_has_the_same_limit(own_url):
    """D2, L9."""

    async def run(statement):
        async with current_operation().connection.cursor() as cursor:
            await cursor.execute(statement)
            return len(await cursor.fetchall())

    async def story():
        async with AsyncEngine(own_url + LIMITS) as engine:
            assert await engine.transaction("a", run, SLOW, scope="s") == 1
            with pytest.raises(asyncmy.errors.OperationalError, match="read timeout"):
                await engine.transaction("b", run, "select sleep(2)", scope="s")

    asyncio.run(story())


class LoopEngine:
    """An engine for async code on an event loop of its own, used like one for threads."""

    def __init__(self, url: str, policy: Policy | None = None) -> None:
        self._runner = asyncio.Runner()
        self._engine = AsyncEngine(url, policy) if policy else AsyncEngine(url)

    def __enter__(self) -> Self:
        self._runner.run(self._engine.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._engine.__aexit__(*error))
        self._runner.close()

    def run(self, key, work, scope):
        return self._call(self._engine.run, key, work, scope)

    def transaction(self, key, work, scope):
        return self._call(self._engine.transaction, key, work, scope)

    def _call(self, method, key, work, scope):
        async def handler():
            return work()

        async def call():
            return await method(key, handler, scope=scope)

        return self._runner.run(call())


NO_ANSWER = "timed out|read timeout|no answer in time"


@pytest.fixture(params=[Engine, LoopEngine], ids=["threads", "loop"])
def engine_at(request):
    """Opens an engine for sync or for async code."""
    return request.param


@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_transaction_does_not_wait_for_a_server_that_stops_answering(
    engine_at, own, own_url, is_at_the_end
):
    """D2, L9: neither its claim nor its commit."""
    with engine_at(own_url + LIMITS) as engine:
        engine.transaction("a", lambda: 1, scope="s")
        with stopped(own, own_url) as stop, pytest.raises(StoreUnavailable, match=NO_ANSWER):
            engine.transaction("b", stop if is_at_the_end else stop() or int, scope="s")


def test_a_new_connection_for_a_transaction_has_the_timeout_of_the_store(engine_at, own, own_url):
    """D2: not `transaction_timeout`, which the handler's own statements need."""
    with engine_at(own_url + "&timeout=300ms") as engine:
        engine.run("a", int, scope="s")
        with stopped(own, own_url) as stop, pytest.raises(StoreUnavailable, match=NO_ANSWER):
            engine.transaction("b", stop() or int, scope="s")


@contextmanager
def relay_to(url):
    """A relay to the server of *url*, and the URL that leads through it."""
    port = int(url.partition("?")[0].rpartition(":")[2].partition("/")[0])
    with closing(Relay(port)) as relay:
        started = time.monotonic()
        yield relay, url.replace(f":{port}/", f":{relay.port}/") + LIMITS
        assert time.monotonic() - started < 15


def test_a_commit_without_an_answer_is_an_outage_and_is_replayed(engine_at, own_url):
    """D2, L9: it was applied, and a retry gets its result."""

    def work():
        relay.fall_silent_after(b"COMMIT")
        return "done"

    with relay_to(own_url) as (relay, url), engine_at(url) as engine:
        with pytest.raises(StoreUnavailable, match=NO_ANSWER) as caught:
            engine.transaction("a", work, scope="s")
        assert caught.value.is_ambiguous
    with engine_at(own_url) as engine:
        assert engine.transaction("a", lambda: "again", scope="s") == "done"


def test_a_handler_that_fails_together_with_its_server_ends_in_time(engine_at, own, own_url):
    """D2, L9: the rollback gets no answer, and the caller gets the handler's error."""

    def fail():
        stop()
        raise ZeroDivisionError

    patient = Policy(mode="transaction", wait="30s")  # a rollback does not wait that long
    with engine_at(own_url + LIMITS, patient) as engine:
        with stopped(own, own_url) as stop, pytest.raises(ZeroDivisionError):
            engine.transaction("a", fail, scope="s")
        assert engine.transaction("a", lambda: "done", scope="s") == "done"


@contextmanager
def stopped(server, url):
    """A function that stops *server*, which goes on at the end; that must not take long."""
    started = time.monotonic()
    try:
        yield lambda: server.kill(signal.SIGSTOP)
        assert time.monotonic() - started < 15
    finally:
        server.kill(signal.SIGCONT)
        until(lambda: answers(url))


def answers(url):
    with other_session(url) as root:
        return query(root, "select 1")
