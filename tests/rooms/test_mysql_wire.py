"""Event loops on MySQL: connections of their own, and all that can become of them."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pymysql
import pytest
import uvloop
from laws.records import ID, claim_of, id_of
from servers import START_S_MAX, until
from servers.mariadb import PLAIN, Mariadb, mariadb

from coatcheck.core.record import Swap, completed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import mysql_flow, open_async_store
from coatcheck.stores.looped import LoopedStore
from coatcheck.stores.mysql_line import Session

MANY = [id_of(number) for number in range(1, 65)]


class Loop:
    """A store on an event loop of its own, which runs while it is asked for something."""

    def __init__(self, url, new_loop=asyncio.new_event_loop):
        self.store = open_async_store(url)
        self.runner = asyncio.Runner(loop_factory=new_loop)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.runner.run(self.store.close())
        self.runner.close()

    def swap(self, *swaps):
        return list(self.runner.run(self._swap(swaps)))

    async def _swap(self, swaps):
        async with asyncio.timeout(START_S_MAX):
            return await self.store.swap(swaps)

    def swap_apart(self, swaps):
        """Each a call of its own, all at once; what became of them."""

        async def calls():
            asked = [self.store.swap([swap]) for swap in swaps]
            async with asyncio.timeout(START_S_MAX):
                return await asyncio.gather(*asked, return_exceptions=True)

        return self.runner.run(calls())

    def get(self, *ids):
        return list(self.runner.run(self.store.get(ids)))

    @property
    def sessions(self):
        (way,) = self.store._ways.values()
        lines = (*way._wire._writers, way._wire._reader)
        return [line._connection for line in lines if line._connection]

    def turn(self):
        """Let the loop look at its sockets."""
        self.runner.run(asyncio.sleep(0))


@pytest.fixture
def url():
    return mariadb().fresh_url()


@pytest.fixture(scope="module")
def own():
    """A server of this module's own, which its tests may stop, kill and freeze."""
    server = Mariadb(**{"innodb-flush-log-at-trx-commit": "1"})
    yield server
    server.remove()


@pytest.fixture
def own_url(own):
    return own.fresh_url()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request):
    return request.param


@pytest.fixture
def loop(url, new_loop):
    with Loop(url, new_loop) as loop:
        yield loop


def claim(id=ID, nonce=1):
    return Swap(id, 0, claim_of(id, nonce=nonce))


def complete(record, response=b"done"):
    return Swap(record.id, record.version, completed(record, response))


@contextmanager
def somebody_else(url):
    """Another session in the database of *url*: what it asks for is answered."""
    port, _, database = url.partition("?")[0].rpartition(":")[2].partition("/")
    place = {"host": "127.0.0.1", "port": int(port), "user": "root", "database": database}
    with closing(pymysql.connect(autocommit=True, **place, **PLAIN)) as connection:

        def ask(statement):
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return cursor.fetchall()

        yield ask


def waiting_for_locks(ask):
    ((_, number),) = ask("show global status like 'innodb_row_lock_current_waits'")
    return int(number) > 0


def sessions_in(ask):
    """Whose they are: the numbers of all others in the same database."""
    listed = "select id from information_schema.processlist where db = database()"
    return [number for (number,) in ask(f"{listed} and id <> connection_id()")]


def test_an_event_loop_reaches_the_server_without_a_thread(loop):
    """L1, L5: grouped, on connections of its own."""
    assert isinstance(loop.store, LoopedStore)
    assert loop.swap_apart([claim(id) for id in MANY]) == [[None]] * len(MANY)
    assert loop.swap(claim(nonce=2), claim(id_of(99))) == [claim_of(), None]
    assert loop.get(*MANY) == [claim_of(id) for id in MANY]
    assert len(loop.sessions) == 3
    assert loop.store._threaded._queue._thread is None
    assert loop.store.blocking._writer._lines[0]._session is None


def test_what_is_larger_than_a_socket_takes_at_once_arrives(loop):
    """L1: there and back; what does not fit is sent when there is room."""
    large = [completed(claim_of(id), bytes(1_000_000)) for id in MANY[:24]]
    assert loop.swap(*(Swap(record.id, 0, record) for record in large)) == [None] * len(large)
    assert loop.get(*(record.id for record in large)) == large


def test_an_encrypted_connection_can_be_watched_too(tmp_path, new_loop):
    """X3: what TLS keeps to itself for a while is read in the end."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [*command, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    server = Mariadb(**{"ssl-key": str(key), "ssl-cert": str(certificate)})
    try:
        bare, _, _ = server.fresh_url().partition("?")
        with Loop(f"{bare}?ssl_ca={certificate}", new_loop) as loop:
            large = [completed(claim_of(id), bytes(1_000_000)) for id in MANY[:8]]
            assert loop.swap(*(Swap(r.id, 0, r) for r in large)) == [None] * len(large)
            assert loop.get(*(record.id for record in large)) == large
            assert loop.swap_apart([claim(id) for id in MANY[8:]]) == [[None]] * 56
    finally:
        server.remove()


def test_a_connection_that_the_server_ends_while_nobody_waits_is_replaced(loop, url):
    """D2: nobody notices, whether the loop has seen it or not."""
    loop.swap(claim())
    with somebody_else(url) as ask:
        for has_looked in (True, False):
            (session,) = loop.sessions
            for number in sessions_in(ask):
                ask(f"kill connection {number}")
            until(session.is_stale)
            if has_looked:
                until(lambda: loop.turn() or not loop.sessions)
            (stands,) = loop.swap(claim())
            assert stands == claim_of()


def test_a_loop_finds_a_server_that_was_restarted(own, own_url):
    """D2: down is said so, and nothing of ours has to be restarted."""
    with Loop(own_url) as loop:
        assert loop.swap(claim()) == [None]
        own.stop()
        for call in (lambda: loop.swap(complete(claim_of())), lambda: loop.get(ID)):
            with pytest.raises(StoreUnavailable) as caught:
                call()
            assert not caught.value.is_ambiguous
        own.start()
        assert loop.get(ID) == [claim_of()]
        assert loop.swap(complete(claim_of())) == [None]


def test_what_a_loop_was_told_is_there_after_kill_9(own, own_url):
    """D1: and who fails meanwhile is told so, and may try again."""
    acknowledged, failed = [], []

    async def write(store, numbers):
        for number in numbers:
            record = claim_of(id_of(number))
            try:
                await store.swap([Swap(record.id, 0, record)])
                acknowledged.append((number, record))
                await store.swap([complete(record)])
                acknowledged.append((number, completed(record, b"done")))
            except StoreUnavailable as error:
                failed.append((number, error))

    async def writers(store):
        async with asyncio.timeout(START_S_MAX):
            await asyncio.gather(*(write(store, range(n, 6_400, 32)) for n in range(32)))

    with Loop(own_url) as loop, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(loop.runner.run, writers(loop.store))
        until(lambda: len(acknowledged) > 100)
        own.kill()
        writing.result(START_S_MAX)
        own.start()
        told = dict(acknowledged)
        unsure = {number for number, error in failed if error.is_ambiguous}
        standing = loop.get(*map(id_of, told))
        for (number, record), stands in zip(told.items(), standing, strict=True):
            assert stands == record or (number in unsure and stands.version == record.version + 1)
        never = {number for number, _ in failed} - unsure - told.keys()
        assert never
        assert loop.get(*map(id_of, never)) == [None] * len(never)


def test_a_loop_that_was_held_up_does_not_take_its_own_absence_for_the_servers(url, new_loop):
    """D2: a handler that blocks the loop for longer than the server may take is no outage."""

    async def hold_up(store):
        asked = store.swap([claim(MANY[1])])
        threading.Event().wait(1)
        return await asked

    with Loop(f"{url}&timeout=300ms", new_loop) as loop:
        loop.swap(claim())
        assert list(loop.runner.run(hold_up(loop.store))) == [None]


def test_a_loop_waits_for_a_frozen_server_as_long_as_was_said(own, own_url, new_loop):
    """D2: and the write may have been made; a read has done nothing."""
    with Loop(f"{own_url}&timeout=300ms", new_loop) as loop:
        loop.swap(claim())
        loop.get(ID)
        own.kill(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no answer in time") as caught:
                loop.swap(complete(claim_of()))
            assert caught.value.is_ambiguous
            with pytest.raises(StoreUnavailable, match="no answer in time") as caught:
                loop.get(ID)
            assert not caught.value.is_ambiguous
            assert 0.6 <= time.monotonic() - began < 5
        finally:
            own.kill(signal.SIGCONT)
        (lost,) = loop.swap(complete(claim_of()))  # on a new connection
        assert lost is None or lost == completed(claim_of(), b"done")


def test_a_loop_tries_again_after_a_deadlock(loop, url):
    """L1, D2: a real one, and the server undoes ours, because the other has written more."""
    first, second = MANY[:2]
    loop.swap(claim(first), claim(second))
    lock = "select 1 from coatcheck_records where id = x'{}' for update"
    with somebody_else(url) as ask, somebody_else(url) as watch, ThreadPoolExecutor(1) as threads:
        ask("create table heavy (n int) engine = innodb")
        ask("begin")
        ask(f"insert into heavy values {','.join(['(1)'] * 500)}")
        ask(lock.format(second.hex()))
        swaps = [complete(claim_of(second)), complete(claim_of(first)), claim(MANY[2])]
        asked = threads.submit(loop.swap, *swaps)
        until(lambda: waiting_for_locks(watch))
        ask(lock.format(first.hex()))
        ask("commit")
        assert asked.result(START_S_MAX) == [None, None, None]
    done = [completed(claim_of(id), b"done") for id in (first, second)]
    assert loop.get(*MANY[:3]) == [*done, claim_of(MANY[2])]


def test_a_connection_that_the_server_ends_between_two_tries_is_replaced(loop, url, monkeypatch):
    """D2: nothing is on its way then, so that the next try is made on another."""
    loop.swap(claim())
    (way,) = loop.store._ways.values()
    monkeypatch.setattr(mysql_flow, "secrets", SimpleNamespace(randbelow=lambda _: 500))
    with somebody_else(url) as ask, ThreadPoolExecutor(1) as threads:
        collide = "signal sqlstate '40001' set mysql_errno = 1213, message_text = 'a deadlock'"
        ask(f"create trigger t before update on coatcheck_records for each row {collide}")
        asked = threads.submit(loop.swap, complete(claim_of()))
        until(lambda: any(line._pause for line in way._wire._writers))
        ask("drop trigger t")
        for number in sessions_in(ask):
            ask(f"kill connection {number}")
        assert asked.result(START_S_MAX) == [None]
    assert loop.get(ID) == [completed(claim_of(), b"done")]


def test_a_bad_record_of_a_loop_fails_alone(loop):
    """D2: whether we or the server find it bad; and on the same connections."""
    loop.swap(claim(MANY[9]))
    before = loop.sessions
    far = claim_of(MANY[2])._replace(nonce=2**64)
    swaps = [claim(), claim(b"x" * 17), Swap(far.id, 0, far), claim(MANY[1])]
    answers = loop.swap_apart(swaps)
    assert answers[0] == answers[3] == [None]
    for answer in answers[1:3]:
        with pytest.raises(ValueError, match="a record cannot be written"):
            raise answer
    assert loop.sessions[: len(before)] == before


def test_a_refusal_after_a_loop_has_written_something_is_a_doubt(loop, url):
    """L1, D2: the claim of the same batch is there, and who made it is told to look."""
    loop.swap(claim(MANY[0]))
    delete = Swap(MANY[0], claim_of().version, None)
    with somebody_else(url) as ask:
        refuse = "signal sqlstate '45000' set mysql_errno = 1142, message_text = 'no'"
        ask(f"create trigger t before delete on coatcheck_records for each row {refuse}")
    with pytest.raises(StoreUnavailable, match="may not do this") as caught:
        loop.swap(claim(MANY[1]), delete)
    assert caught.value.is_ambiguous
    assert loop.get(*MANY[:2]) == [claim_of(MANY[0]), claim_of(MANY[1])]
    with pytest.raises(StoreUnavailable) as caught:
        loop.swap(delete)
    assert not caught.value.is_ambiguous


def test_a_loop_drops_a_server_that_became_a_replica(own, own_url):
    """D3: it is neither written to nor read from; also by whoever might."""
    with Loop(own_url) as loop, somebody_else(own_url) as ask:
        loop.swap(claim())
        loop.get(ID)
        ask("set global read_only = 1")
        try:
            with pytest.raises(StoreUnavailable, match="it is read-only; is it a replica"):
                loop.get(ID)
            until(lambda: len(sessions_in(ask)) == len(loop.sessions))  # what was dropped is gone
            for session in loop.sessions:
                ask(f"kill connection {sessions_in(ask)[0]}")
                until(session.is_stale)
            with pytest.raises(
                StoreUnavailable, match="it is read-only; is it a replica"
            ) as caught:
                loop.swap(complete(claim_of()))
            assert not caught.value.is_ambiguous
            assert loop.sessions == []
        finally:
            ask("set global read_only = 0")
        assert loop.swap(complete(claim_of())) == [None]


def test_who_waits_when_a_loop_closes_without_patience_is_told(url, new_loop):
    """D2: also who has not been sent yet, on a loop that lives on."""

    async def impatient(store):
        asked = [store.swap([complete(claim_of(id))]) for id in MANY]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.close()
        async with asyncio.timeout(START_S_MAX):
            return await asyncio.gather(*asked, return_exceptions=True)

    with Loop(url, new_loop) as loop, somebody_else(url) as ask:
        loop.swap(*(claim(id) for id in MANY))
        ask("begin")
        ask("select 1 from coatcheck_records for update")
        errors = loop.runner.run(impatient(loop.store))
        assert {type(error) for error in errors} == {StoreUnavailable}
        assert errors[0].is_ambiguous
        assert not errors[-1].is_ambiguous


def test_a_loop_that_ends_leaves_no_connection_behind(url):
    """D4: also where nobody has closed the store."""
    store = open_async_store(url)

    async def use(id):
        assert list(await store.swap([claim(id)])) == [None]

    with somebody_else(url) as ask:
        for id in MANY[:3]:
            asyncio.run(use(id))
        until(lambda: sessions_in(ask) == [])
        asyncio.run(store.close())


def test_what_a_loop_that_was_closed_has_not_written_is_written_by_a_thread(url):
    """L11: a server's loop may end with a write on its way."""
    store = open_async_store(url)
    loop = asyncio.new_event_loop()

    async def leave():
        await store.swap([claim(MANY[0])])
        store.swap([complete(claim_of(MANY[0]))])
        for id in MANY[1:]:
            store.swap([claim(id)])

    loop.run_until_complete(leave())
    loop.close()
    wanted = [completed(claim_of(MANY[0]), b"done"), *map(claim_of, MANY[1:])]

    async def look():
        return list(await store.get(MANY))

    until(lambda: asyncio.run(look()) == wanted)
    asyncio.run(store.close())


FORKED = """
import asyncio, os, sys
from coatcheck import AsyncEngine

engine = AsyncEngine(sys.argv[1])

async def place():
    return os.getpid()

def use(key):
    return asyncio.run(engine.run(key, place))

kept = asyncio.new_event_loop()
assert kept.run_until_complete(engine.run("before", place)) == os.getpid()
child = os.fork()
if child == 0:
    assert use("child") == os.getpid()
    assert use("before") == os.getppid()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kept.run_until_complete(engine.run("parent", place)) == os.getpid()
assert kept.run_until_complete(engine.run("child", place)) == child
kept.run_until_complete(engine.close())
kept.close()
"""


def test_a_forked_child_leaves_the_connections_of_its_parents_loop_alone(url):
    """L1, D4: both work on."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, url]
    done = subprocess.run(command, timeout=START_S_MAX, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_whoever_closes_while_a_connection_is_opened_leaves_none_behind(url, monkeypatch):
    """D4: who waits for it is told, and it is closed when it is there."""
    gate, opened = threading.Event(), []
    agreed = Session._agreed

    def slowly(session, *args):
        opened.append(session)
        assert gate.wait(START_S_MAX)
        return agreed(session, *args)

    async def impatient(store):
        asked = store.swap([claim()])
        await asyncio.to_thread(until, lambda: opened)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await store.close()
        with pytest.raises(StoreUnavailable) as caught:
            await asked
        assert not caught.value.is_ambiguous
        gate.set()
        await asyncio.to_thread(until, lambda: opened[0]._connection.open is False)

    with Loop(url) as loop, somebody_else(url) as ask:
        monkeypatch.setattr(Session, "_agreed", slowly)
        loop.runner.run(impatient(loop.store))
        until(lambda: sessions_in(ask) == [])
