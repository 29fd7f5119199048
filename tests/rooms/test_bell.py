"""The bell: who waits on another node is woken at once, and nobody depends on it."""

import asyncio
import gc
import itertools
import logging
import socket
import subprocess
import sys
import textwrap
from contextlib import closing
from importlib import import_module

import pytest
from engines import WAIT_S_MAX, Guards, Handler, WatchedStore, eventually, held_up, wait_for
from servers.pgbouncer import Pgbouncer
from servers.postgres import Postgres, postgres
from servers.redis import Cluster, Redis, SentinelSet, redis_server

from coatcheck import AsyncEngine, Engine, KeyRing, Policy, StoreUnavailable
from coatcheck.core.record import GONE
from coatcheck.engine import bell as engine_bell
from coatcheck.engine.bell import Doorbell
from coatcheck.engine.waiting import AsyncWaiter, Line, Waiter
from coatcheck.stores import ThreadedStore, open_store
from coatcheck.stores.at_rest import AtRest
from coatcheck.stores.contract import bell_of
from coatcheck.stores.declared import DECLARED
from coatcheck.stores.memory import MemoryStore
from coatcheck.stores.postgres_bell import PostgresBell
from coatcheck.stores.redis_bell import RedisBell

# 50 s: longer than any test waits for a result, so that who gets one was woken.
PATIENT = Policy(wait="50s", lease="90s")
BELLS = {"postgres": PostgresBell, "redis": RedisBell}
SERVERS = {"postgres": Postgres, "redis": Redis}


@pytest.fixture(params=["postgres", "redis"])
def kind(request):
    return request.param


@pytest.fixture
def url(kind):
    return {"postgres": postgres, "redis": redis_server}[kind]().fresh_url()


@pytest.fixture
def rarely(monkeypatch):
    """Nobody looks by itself: only a bell can tell it to."""
    monkeypatch.setattr(engine_bell, "poll_pauses_s", lambda: itertools.repeat(3_600.0))
    monkeypatch.setattr(engine_bell, "POLL_PROMISED_S", 3_600.0)


@pytest.fixture
def rung(monkeypatch):
    """All that is said, by anybody."""
    said = []
    for bell in BELLS.values():

        def ring(self, words, ring=bell.ring):
            said.append(words)
            ring(self, words)

        monkeypatch.setattr(bell, "ring", ring)
    return said


def is_promised(engine):
    line = engine.desk.line
    return any(map(line.is_promised, line.ids()))


def hears(*engines):
    """Until all *engines* listen."""
    for engine in engines:
        engine.desk.doorbell.listen()
    eventually(lambda: all(engine.desk.doorbell.is_open for engine in engines))


class Contest:
    """Somebody executes *there*, and somebody else waits *here* for the same key."""

    def __init__(self, guards, here, there, handler=None, key="k", *, others=None):
        self.handler = handler or held_up("done")
        self.first = (others or guards).beside(there, key, self.handler, scope="s")
        wait_for(self.handler.is_running)
        self.waiting = guards.beside(here, key, self.handler, scope="s")
        eventually(here.desk.line.ids)

    def ends(self):
        self.handler.may_end.set()
        return [call.result(WAIT_S_MAX) for call in (self.first, self.waiting)]


# --- who waits is woken -----------------------------------------------------------------------


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize("waits", ["sync", "async"])
@pytest.mark.parametrize("executes", ["sync", "async"])
def test_who_waits_on_another_node_is_woken_by_the_bell(url, waits, executes):
    """L3: at once, and by nothing else: nobody here looks by itself."""
    guards, others = Guards(is_async=waits == "async"), Guards(is_async=executes == "async")
    with closing(others), closing(guards):
        here, there = guards.engine(url, PATIENT), others.engine(url, PATIENT)
        hears(here, there)
        contest = Contest(guards, here, there, others=others)
        eventually(lambda: is_promised(here))
        assert not contest.waiting.done()
        assert contest.ends() == ["done", "done"]
        assert contest.handler.calls == 1


@pytest.mark.usefixtures("rarely")
def test_all_who_wait_are_woken_and_one_takes_over_from_who_failed(guards, url, monkeypatch):
    """L4: a release is rung for like a completion."""
    joined, join = [], Line.join
    monkeypatch.setattr(Line, "join", lambda *args: join(*args) and not joined.append(args))
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    failing, handler = held_up(ZeroDivisionError()), held_up("done")
    first = guards.beside(there, "k", failing, scope="s")
    wait_for(failing.is_running)
    waiting = [guards.beside(here, "k", handler, scope="s") for _ in range(5)]
    eventually(lambda: len(joined) == 5 and is_promised(here))
    failing.may_end.set()
    with pytest.raises(ZeroDivisionError):
        first.result(WAIT_S_MAX)
    wait_for(handler.is_running)
    # Who has lost waits for who has won; or still waits, where one had looked before it rang.
    eventually(lambda: [len(line) for line in here.desk.line.waiting.values()] == [4])
    handler.may_end.set()
    assert [call.result(WAIT_S_MAX) for call in waiting] == ["done"] * 5
    assert handler.calls == 1
    assert here.desk.line._promised == set()


@pytest.mark.usefixtures("rarely")
def test_an_end_that_was_written_while_its_ring_was_promised_is_seen(guards, url, monkeypatch):
    """L3: nothing falls between: who hears the promise looks at the store."""
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    handler = held_up("done")
    first = guards.beside(there, "k", handler, scope="s")
    wait_for(handler.is_running)
    want = Line.want

    def too_late(line, id, ring):
        handler.may_end.set()
        first.result(WAIT_S_MAX)
        return want(line, id, ring)

    monkeypatch.setattr(Line, "want", too_late)
    assert guards.beside(here, "k", handler, scope="s").result(WAIT_S_MAX) == "done"
    assert handler.calls == 1
    assert there.desk.line._wanted  # nobody rang for it
    there.desk.line.forget_wanted(there.heart.held.__contains__)
    assert not there.desk.line._wanted


@pytest.mark.usefixtures("rarely")
def test_what_is_sealed_at_rest_is_rung_for_as_well(guards, url):
    """X1: the bell of the store beneath; it carries no records."""
    ring = KeyRing({"one": b"1" * 32})
    here, there = (guards.engine(url, PATIENT, keyring=ring) for _ in range(2))
    hears(here, there)
    contest = Contest(guards, here, there)
    eventually(lambda: is_promised(here))
    assert contest.ends() == ["done", "done"]


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize("shape", [SentinelSet, Cluster])
def test_the_bell_rings_in_every_shape_of_redis(shape):
    """L3: with Sentinels at the master; in a cluster from any node to any other."""
    servers, guards = shape(), Guards(is_async=False)
    with closing(guards):
        here, there = guards.engine(servers.url, PATIENT), guards.engine(servers.url, PATIENT)
        hears(here, there)
        contest = Contest(guards, here, there)
        eventually(lambda: is_promised(here))
        assert contest.ends() == ["done", "done"]
    servers.remove()


EXECUTOR = """
import asyncio, sys
from coatcheck import AsyncEngine, Engine, Policy

def handler():
    print("running", flush=True)
    sys.stdin.readline()
    return "done"

async def handler_async():
    return handler()

if sys.argv[2] == "sync":
    with Engine(sys.argv[1]) as engine:
        engine.run("k", handler, scope="s")
else:
    async def main():
        async with AsyncEngine(sys.argv[1]) as engine:
            await engine.run("k", handler_async, scope="s")
    asyncio.run(main())
"""


def test_who_waits_is_woken_by_another_process(guards, url, monkeypatch):
    """L3: whose event loop may be blocked by its handler, too."""
    monkeypatch.setattr(engine_bell, "POLL_PROMISED_S", 3_600.0)
    here = guards.engine(url, PATIENT)
    flavour = "async" if guards.is_async else "sync"
    command = [sys.executable, "-c", EXECUTOR, url, flavour]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as executor:
        assert executor.stdout.readline() == "running\n"
        waiting = guards.beside(here, "k", Handler("another"), scope="s")
        eventually(lambda: is_promised(here))
        executor.communicate("end\n", timeout=WAIT_S_MAX)
    assert executor.returncode == 0
    assert waiting.result(WAIT_S_MAX) == "done"


# --- nobody depends on it ---------------------------------------------------------------------


def test_operations_that_nobody_waits_for_elsewhere_ring_nothing(guards, url, rung):
    """L3: neither new keys nor replays nor failures, nor duplicates in the same process."""
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    for number in range(20):
        for engine in (here, there):
            assert guards.run(engine, f"k{number}", Handler(number), scope="s") == number
    with pytest.raises(ZeroDivisionError):
        guards.run(here, "failing", Handler(ZeroDivisionError()), scope="s")
    assert Contest(guards, here, here).ends() == ["done", "done"]
    assert rung == []
    assert not here.desk.line._wanted


def test_a_contest_is_a_handful_of_words_however_many_wait(guards, url, rung, monkeypatch):
    """L3: and once it is promised, hardly anybody looks."""
    monkeypatch.setattr(engine_bell, "POLL_PROMISED_S", 3_600.0)
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    contest = Contest(guards, here, there)
    eventually(lambda: is_promised(here))
    more = [guards.beside(here, "k", contest.handler, scope="s") for _ in range(8)]
    (id,) = there.heart.held
    eventually(lambda: here.desk.line.length(id) == 9)
    assert contest.ends() == ["done", "done"]
    assert [call.result(WAIT_S_MAX) for call in more] == ["done"] * 8
    words = [word for words in rung for word in words.split()]
    assert {word[1:] for word in words} == {id.hex()}
    assert [word[0] for word in words].count("e") == 1
    assert [word[0] for word in words].count("w") <= 4  # at some of the first looks


def test_a_ring_that_is_lost_costs_the_time_until_the_next_look(guards, url, monkeypatch):
    """L3: the store is the truth."""
    monkeypatch.setattr(engine_bell, "POLL_PROMISED_S", 0.05)
    monkeypatch.setattr(Doorbell, "_say_ended", lambda *_: None)
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    contest = Contest(guards, here, there)
    eventually(lambda: is_promised(here))
    assert contest.ends() == ["done", "done"]


def test_words_that_nobody_understands_are_ignored(guards, url, rung):
    """L3: and words about what nobody waits for."""
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    store = open_store(url)
    with closing(store), closing(bell_of(store)) as stranger:
        stranger.open()
        stranger.ring("hello w e wxyz z00 w00 h00 e00")
        contest = Contest(guards, here, there)
        eventually(lambda: is_promised(here))
        # Not true: so he looks, stays, and says again that he waits.
        stranger.ring(f"e{next(iter(there.heart.held)).hex()}")
        eventually(lambda: sum(words.startswith("w") for words in rung) >= 2)
        assert contest.ends() == ["done", "done"]


def test_while_the_bell_is_out_of_order_who_waits_looks(guards, kind, url, monkeypatch, caplog):
    """L3, D2: it is said once, requests see nothing of it, and it comes back by itself."""
    tries = []

    def broken(self):
        tries.append(self)
        raise OSError("out of\norder")

    with monkeypatch.context() as patch:
        patch.setattr(BELLS[kind], "open", broken)
        here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
        assert Contest(guards, here, there).ends() == ["done", "done"]
        eventually(lambda: len(tries) >= 6)
        said = [text for text in caplog.messages if "bell" in text]
        once = "the bell does not ring, so who waits looks at the store: out of order"
        assert said == [once] * 2  # for each engine
    hears(here, there)


@pytest.fixture
def server(kind):
    """A server of the test's own, to be ended and started again."""
    server = SERVERS[kind]()
    yield server
    server.remove()


def answers(guards, engine):
    """Whether *engine* does; the first to use a connection that was lost learns of it."""
    try:
        guards.run(engine, "again", Handler(), scope="s")
    except StoreUnavailable:
        return False
    return True


@pytest.mark.usefixtures("rarely")
def test_the_bell_comes_back_after_a_restart_of_the_server(guards, server, caplog):
    """L3, D2."""
    caplog.set_level(logging.INFO)
    here, there = guards.engine(server.url, PATIENT), guards.engine(server.url, PATIENT)
    hears(here, there)
    server.stop()
    eventually(lambda: not here.desk.doorbell.is_open and not there.desk.doorbell.is_open)
    server.start()
    hears(here, there)
    eventually(lambda: answers(guards, here) and answers(guards, there))
    contest = Contest(guards, here, there)
    eventually(lambda: is_promised(here))
    assert contest.ends() == ["done", "done"]
    said = [text for text in caplog.messages if "bell" in text]
    assert [text for text in said if "again" in text] == ["the bell rings again"] * 2
    assert len(said) == 4


@pytest.mark.usefixtures("rarely")
def test_who_waits_through_a_loss_of_the_bell_is_announced_again(guards, url):
    """L3: and whoever has promised before the loss need not know of it."""
    here, there = guards.engine(url, PATIENT), guards.engine(url, PATIENT)
    hears(here, there)
    contest = Contest(guards, here, there)
    eventually(lambda: is_promised(here))
    with socket.fromfd(here.desk._bell.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line:
        line.shutdown(socket.SHUT_RDWR)
    eventually(lambda: not here.desk.doorbell.is_open)
    eventually(lambda: here.desk.doorbell.is_open and is_promised(here))
    assert contest.ends() == ["done", "done"]


# --- behind a pooler --------------------------------------------------------------------------


@pytest.fixture
def pooled():
    """The URLs of one store: through PgBouncer, and directly."""
    direct = postgres().fresh_url()
    pooler = Pgbouncer(postgres(), sessions=10)
    yield f"{pooler.url}?{direct.partition('?')[2]}", direct
    pooler.remove()


def test_behind_a_pooler_there_is_no_bell_and_still_an_answer(guards, pooled, caplog):
    """L3: what would listen there is a session of somebody else's."""
    caplog.set_level(logging.INFO)
    here, there = guards.engine(pooled[0], PATIENT), guards.engine(pooled[0], PATIENT)
    assert Contest(guards, here, there).ends() == ["done", "done"]
    for engine in (here, there):
        eventually(lambda engine=engine: not engine.desk.doorbell._thread.is_alive())
        assert not engine.desk.doorbell.is_open
    said = [text for text in caplog.messages if "bell" in text]
    assert said == ["there is no bell behind a pooler: who waits looks at the store"] * 2


def test_who_waits_for_a_node_without_a_bell_looks_as_ever(guards, pooled):
    """L3: a bell of one's own promises nothing."""
    here, there = guards.engine(pooled[1], PATIENT), guards.engine(pooled[0], PATIENT)
    hears(here)
    assert Contest(guards, here, there).ends() == ["done", "done"]


# --- its thread, and its connections ----------------------------------------------------------


def test_the_first_claim_begins_to_listen_and_the_end_of_the_engine_ends_it(guards, url):
    """L3: who only looks up has no bell; who executes hears whoever waits."""
    engine = guards.engine(url, PATIENT)
    doorbell = engine.desk.doorbell
    assert doorbell._thread is None
    guards.run(engine, "k", Handler())
    eventually(lambda: doorbell.is_open)
    guards.done(engine.close())
    assert not doorbell._thread.is_alive()
    assert not doorbell.is_open
    doorbell.listen()
    assert not doorbell._thread.is_alive()


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_an_engine_that_is_forgotten_ends_its_bell(url, flavour):
    with closing(open_store(url)) as store:
        engine = Engine(store) if flavour == "sync" else AsyncEngine(ThreadedStore(store))
        hears(engine)
        thread = engine.desk.doorbell._thread
        del engine
        gc.collect()
        eventually(lambda: not thread.is_alive())


def test_a_process_without_room_for_a_bell_does_without(guards, url, monkeypatch, caplog):
    """D2: a request must not fail because of it."""

    def full():
        raise OSError("too many open files")

    engine = guards.engine(url, PATIENT)
    with monkeypatch.context() as patch:
        patch.setattr(engine_bell.socket, "socketpair", full)
        # An event loop needs such a pair as well, so it is not asked for in one here.
        engine.desk.doorbell.listen()
    assert guards.run(engine, "k", Handler("done")) == "done"
    assert [text for text in caplog.messages if "too many open files" in text]


FORK = """
import os, sys, threading, time, traceback
from coatcheck import Engine
from coatcheck.engine import bell

bell.poll_pauses_s = lambda: iter([3600.0] * 9)
bell.POLL_PROMISED_S = 3600.0
engine = Engine(sys.argv[1], "default")
doorbell = engine.desk.doorbell
deadline = time.monotonic() + 20

def until(is_so):
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)

def promised():
    line = engine.desk.line
    return any(map(line.is_promised, line.ids()))

engine.run("warm", str, scope="s")
until(lambda: doorbell.is_open)
fd = engine.desk._bell.fileno()
to_child, from_parent = os.pipe()
to_parent, from_child = os.pipe()
child = os.fork()
if child == 0:
    try:
        assert engine.desk.doorbell is not doorbell
        assert engine.desk.doorbell._thread is None
        def handler():
            os.write(from_child, b"running")
            os.read(to_child, 1)
            return "child"
        thread = threading.Thread(target=engine.run, args=("k", handler), kwargs={"scope": "s"})
        engine.desk.doorbell.listen()
        until(lambda: engine.desk.doorbell.is_open)
        assert engine.desk._bell.fileno() != fd
        thread.start()
        thread.join()
        until(lambda: not engine.desk.doorbell._outbox)
        engine.close()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
os.read(to_parent, 7)
results = []
policy = engine.desk.policy.__class__(wait="30s", lease="60s")
thread = threading.Thread(
    target=lambda: results.append(engine.run("k", str, scope="s", policy=policy))
)
thread.start()
until(promised)
os.write(from_parent, b".")
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert doorbell.is_open and engine.desk.doorbell is doorbell
assert engine.desk._bell.fileno() == fd
assert doorbell._thread.is_alive()
engine.close()
print(*results)
"""


def test_a_forked_child_has_a_bell_of_its_own(url):
    """L1, L3: and the parent, whose bell is left alone, is woken by the child."""
    # Newer Pythons warn of forks in processes with threads, which is what this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORK), url]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * WAIT_S_MAX, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "child\n"), ran.stderr


# --- what carries it --------------------------------------------------------------------------


def opened(store):
    bell = bell_of(store)
    assert bell.open()
    return bell


def hear(bell, count=1):
    """The next *count* things that are said."""
    heard = []
    eventually(lambda: heard.extend(bell.heard()) or len(heard) >= count)
    return heard


def test_what_is_said_is_heard_by_all_on_the_same_records_and_by_nobody_else(kind, url):
    """S1: the same key in another store is another operation."""
    other_url = {"postgres": postgres, "redis": redis_server}[kind]().fresh_url()
    with closing(open_store(url)) as store, closing(open_store(other_url)) as other:
        ours, twin, theirs = opened(store), opened(store), opened(other)
        for bell, words in ((ours, "first"), (theirs, "second"), (twin, "third")):
            bell.ring(words)
            bell.ping()  # also what comes meanwhile is heard
        assert [hear(ours, 2), hear(twin, 2)] == [["first", "third"]] * 2
        assert hear(theirs) == ["second"]
        for bell in (ours, twin, theirs):
            bell.close()


def test_a_schema_is_the_same_however_it_was_named():
    """S1: in the URL, or by the search path."""
    url = postgres().fresh_url()
    schema = url.partition("=")[2]
    with closing(open_store(url)) as store:
        path = f"{postgres().url}?options=-csearch_path%3D{schema}"
        with closing(open_store(path)) as other:
            ours, theirs = opened(store), opened(other)
            ours.ring("hello")
            assert hear(theirs) == ["hello"]
            ours.close()
            theirs.close()


def test_a_bell_that_is_closed_can_be_opened_again(url):
    with closing(open_store(url)) as store:
        bell = opened(store)
        bell.close()
        for use in (bell.fileno, bell.heard, bell.ping):
            with pytest.raises(Exception, match="not open"):
                use()
        assert bell.open()
        bell.ring("hello")
        assert hear(bell) == ["hello"]
        bell.close()


def test_a_server_that_permits_no_channels_is_a_failure_that_is_logged():
    """D2: not one of the requests'."""
    server = Redis()
    server.ask("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all", "resetchannels")
    url = f"redis://shop:secret@127.0.0.1:{server.port}/0"
    with closing(open_store(url)) as store, closing(bell_of(store)) as bell:
        with pytest.raises(Exception, match="channel"):
            bell.open()
        with pytest.raises(StoreUnavailable, match="channel"):
            bell.ring("hello")
    server.remove()


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.title)
def test_a_store_has_the_bell_that_it_declares(declared):
    kind = getattr(import_module(f"coatcheck.stores.{declared.module}"), declared.name)
    assert hasattr(kind, "bell") == declared.wakes


def test_a_store_without_a_bell_has_none_at_rest_either(guards):
    assert bell_of(AtRest(MemoryStore())) is None
    engine = guards.engine(WatchedStore())
    guards.run(engine, "k", Handler())
    engine.desk.doorbell.listen()
    assert engine.desk.doorbell._thread is None


# --- who waits --------------------------------------------------------------------------------

ID = b"i" * 16
RECORD = GONE._replace(id=ID, version=1)


def test_it_is_said_ever_less_often_that_somebody_waits(monkeypatch):
    """L3: whoever has just won the claim may not have known so when it was said first."""
    doorbell, said = Doorbell(None, Line(), ()), []
    monkeypatch.setattr(doorbell, "_say", lambda *words: said.append(words))
    asked = [len(said) for _ in itertools.islice(doorbell.pauses_s(ID), 40)]
    assert said == [("w", ID)] * 6
    assert [asked.index(count) + 1 for count in range(1, 7)] == [1, 2, 4, 8, 16, 32]


def test_for_what_is_executed_here_nobody_looks_at_all():
    """L3: in whichever of the ways there are."""
    pauses = Doorbell(None, Line(), ({}, {ID: None})).pauses_s(ID)
    assert list(itertools.islice(pauses, 3)) == [float("inf")] * 3


def test_there_is_a_limit_to_what_is_rung_for(monkeypatch):
    """X2: beyond it nothing is promised, and who waits looks as ever."""
    monkeypatch.setattr("coatcheck.engine.waiting.WANTED_MAX", 2)
    line, told = Line(), []
    assert [line.want(id, told.append) for id in (b"1", b"2", b"3", b"2")] == [True] * 2 + [
        False,
        True,
    ]
    line.tell(RECORD._replace(id=b"2"))
    line.tell(RECORD._replace(id=b"2"))
    assert told == [b"2"]
    assert line.want(b"3", told.append)


def test_who_is_nudged_stays_in_line_and_is_told_the_end():
    line, told = Line(), []
    line.join(ID, told.append, 10)
    line.nudge(ID, is_promised=True)
    assert line.is_promised(ID)
    line.nudge(ID, is_promised=False)
    assert not line.is_promised(ID)
    line.nudge(b"other", is_promised=True)
    assert not line.is_promised(b"other")  # nobody waits for it
    line.nudge(ID, is_promised=True)
    line.tell(RECORD)
    assert told == [None, None, None, RECORD]
    assert not line.is_promised(ID)


def test_a_thread_that_is_nudged_and_then_told_misses_neither():
    """L3."""
    waiter = Waiter()
    waiter.wake(None)
    waiter.wait(WAIT_S_MAX)
    assert waiter.record is None
    waiter.wake(RECORD)
    waiter.wake(None)
    waiter.wait(WAIT_S_MAX)
    assert waiter.record is RECORD


def test_a_task_that_is_nudged_and_then_told_misses_neither():
    """L3: also where both come before it has run again."""

    async def main():
        waiter = AsyncWaiter()
        await asyncio.to_thread(waiter.wake, None)
        await waiter.wait(WAIT_S_MAX)
        assert waiter.record is None
        waiter.wake(None)
        waiter.wake(RECORD)
        await waiter.wait(WAIT_S_MAX)
        assert waiter.record is RECORD
        await waiter.wait(0)

    asyncio.run(main())
