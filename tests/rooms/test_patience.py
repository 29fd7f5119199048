"""The store vanishes after the claim: the end is tried again, and nothing is done twice (D2, L5)."""

import io
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from engines import NOW_MS, WatchedStore
from servers.redis import Redis

from coatcheck import Policy
from coatcheck.core.record import COMPLETED, FAILED, RUNNING, Swap, completed, in_doubt, renewed
from coatcheck.engine import driver, driver_async
from coatcheck.engine.patience import Patience
from coatcheck.errors import StoreUnavailable
from coatcheck.server.wsgi import IdempotencyMiddleware

DOWN = StoreUnavailable("down")
DEAF = StoreUnavailable("deaf", is_ambiguous=True)
A_SWAP = Swap(b"i" * 16, 1, None)


@pytest.fixture
def store():
    return WatchedStore()


def run_without_store(guards, engine, store, key="k", result="done"):
    """A handler during whose work the store goes down."""
    calls = []

    def work():
        calls.append(1)
        store.is_down = True
        return result

    return calls, lambda: guards.run(engine, key, work, scope="s")


# --- how long ---------------------------------------------------------------------------------


def test_what_was_perhaps_written_is_tried_once_more_at_once():
    """L2: it meets its own record."""
    patience = Patience(0)
    assert patience.pause_s(A_SWAP, DEAF) == 0
    assert patience.pause_s(A_SWAP, DEAF) is None
    assert Patience(0).pause_s(A_SWAP, DOWN) is None


def test_pauses_grow_and_end_with_the_budget():
    """D2: no request hangs longer than that."""
    patience = Patience(2)
    pauses = []
    while (pause_s := patience.pause_s(A_SWAP, DOWN)) is not None:
        pauses.append(pause_s)
    assert sum(pauses) == pytest.approx(2)
    assert 5 <= len(pauses) <= 8
    assert pauses[0] < 0.1


def test_what_the_store_takes_to_fail_counts_as_well():
    """D2: a store that is frozen takes its whole time-out for each try."""
    now_s = [100.0]
    patience = Patience(2, now_s[0], clock=lambda: now_s[0])
    tries = 1
    while (pause_s := patience.pause_s(A_SWAP, DEAF)) is not None:
        now_s[0] += pause_s + 5
        tries += 1
    assert tries == 2  # and no third: it is over before that could begin


@pytest.mark.parametrize("failure", [DOWN, DEAF])
def test_so_does_what_it_took_the_first_time(failure):
    """D2: what the client waits is counted from the first try, and the heart goes on."""
    assert Patience(2, 100.0, clock=lambda: 101.9).pause_s(A_SWAP, failure) is not None
    assert Patience(2, 100.0, clock=lambda: 102.0).pause_s(A_SWAP, failure) is None


def test_a_store_that_takes_longer_to_fail_than_that_is_asked_once(guards, monkeypatch):
    """D2: such as a file that the application itself has locked."""
    tries, engine = [], guards.engine(Locked(lambda: tries.append(1)), sweep_every_s=None)
    # As if ten seconds had passed when the first try has failed.
    passed = SimpleNamespace(monotonic=lambda: time.monotonic() - 10)
    for module in (driver, driver_async):
        monkeypatch.setattr(module, "time", passed)
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", lambda: "done", scope="s")
    assert len(tries) == 1


class Locked(WatchedStore):
    """Takes claims and no ends; tells of each that it was asked to, but for the heart's."""

    def __init__(self, tell):
        super().__init__()
        self._tell = tell

    def swap(self, swaps):
        if swaps[0].record.state == RUNNING:
            return super().swap(swaps)
        if threading.current_thread().name != "coatcheck-heart":
            self._tell()
        raise StoreUnavailable("locked")


def test_only_writes_that_the_store_did_not_answer_are_tried_again():
    patience = Patience(2)
    assert patience.pause_s(A_SWAP, ValueError("no")) is None


# --- the end of an execution ------------------------------------------------------------------


def test_a_blink_of_the_store_is_not_seen_by_the_client(guards, store):
    """D2: down for two tries, and back."""
    engine = guards.engine(store)
    store.troubles = ["", "down", "down"]
    assert guards.run(engine, "k", lambda: "done", scope="s") == "done"
    assert store.record.state == COMPLETED


def test_a_claim_is_not_tried_again_while_the_store_is_away(guards, store):
    """D2: nothing has run, so the client is told at once."""
    engine = guards.engine(store)
    guards.run(engine, "first", lambda: None, scope="s")
    store.troubles = ["down"]
    with pytest.raises(StoreUnavailable):
        guards.run(engine, "k", lambda: "done", scope="s")
    assert store.troubles == []
    assert guards.run(engine, "k", lambda: "done", scope="s") == "done"


def test_the_heart_writes_the_end_when_the_store_is_back(guards, store):
    """L5: nothing runs twice, although nobody comes back."""
    engine = guards.engine(store, Policy(patience=0))
    calls, run = run_without_store(guards, engine, store)
    with pytest.raises(StoreUnavailable):
        run()
    assert store.record.state == RUNNING
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)
    assert guards.run(engine, "k", lambda: "again", scope="s") == "done"
    assert calls == [1]


def test_the_client_may_be_told_the_truth_at_once(guards, store):
    """D2: by choice, and the end is still written later."""
    engine = guards.engine(store, Policy(patience=0, unrecorded="answer"))
    calls, run = run_without_store(guards, engine, store)
    assert run() == "done"
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)
    assert calls == [1]


def test_an_error_is_written_later_as_well(guards, store):
    """L4: so that the retry need not wait for the lease."""
    engine = guards.engine(store, Policy(patience=0))

    def fail():
        store.is_down = True
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", fail)
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == FAILED)


def test_an_end_is_written_on_top_of_a_renewal(guards, store):
    """L5: the heart may have renewed the claim between the two tries."""
    engine = guards.engine(store, Policy(patience=0), sweep_every_s=None)
    _, run = run_without_store(guards, engine, store)
    with pytest.raises(StoreUnavailable):
        run()
    claim = store.record
    beaten = renewed(claim, NOW_MS)
    store._records[claim.id] = beaten  # as if it had been there when the store went
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)
    assert store.record.version == beaten.version + 1


def test_a_late_end_does_not_forget_whose_steps_are_remembered(store):
    """F1, L7: it was refused at the door, but only after a step."""

    def application(environ, start_response):
        environ["coatcheck.operation"].step("charge", lambda: 100)
        store.is_down = True
        start_response("403 Forbidden", [])
        return [b""]

    guarded = IdempotencyMiddleware(application, store=store, policy=Policy(patience=0))
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "HTTP_IDEMPOTENCY_KEY": "k",
        "wsgi.input": io.BytesIO(b""),
    }
    list(guarded(environ, lambda *_: None))
    fingerprint = store.record.fingerprint
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == FAILED)
    assert store.record.fingerprint == fingerprint != b""
    guarded.engine.close()


def test_an_end_is_written_although_somebody_has_parked_it(guards, store):
    """L6: who saw the lease run out does not know; who executed does."""
    engine = guards.engine(store, Policy(patience=0), sweep_every_s=None)
    _, run = run_without_store(guards, engine, store)
    with pytest.raises(StoreUnavailable):
        run()
    store._records[store.record.id] = in_doubt(store.record)
    store.is_down = False
    store.wait_for(lambda record: record is not None and record.state == COMPLETED)


def test_an_end_that_comes_too_late_changes_nothing(guards, store):
    """L5: another attempt has taken over, and its answer is the one that stands."""
    engine = guards.engine(store, Policy(patience=0))
    _, run = run_without_store(guards, engine, store)
    with pytest.raises(StoreUnavailable):
        run()
    other = store.record._replace(nonce=1, attempt=2, version=store.record.version + 5)
    store._records[other.id] = other
    store.is_down = False
    engine.heart.beat()
    assert store.record == other


def test_only_who_executes_has_something_to_end(guards, store):
    """L5: another visit of the same key, whose take-over failed, leaves nothing to the heart."""
    engine = guards.engine(store, Policy(patience=0))
    told = []

    def work():
        (held,) = engine.heart.held.values()
        taken_over = held.claim._replace(nonce=1, attempt=2, version=held.claim.version + 1)
        for record in (taken_over, completed(taken_over, None)):
            engine.desk.give_up(Swap(record.id, held.claim.version, record), DOWN)
        told.append(len(engine.heart._unfinished))

    guards.run(engine, "k", work)
    assert told == [0]


def test_closing_writes_what_can_be_written(guards, store):
    """L5: a deployment ends the process while an end is still to be written."""
    engine = guards.engine(store, Policy(patience=0))
    _, run = run_without_store(guards, engine, store)
    with pytest.raises(StoreUnavailable):
        run()
    store.is_down = False
    guards.done(engine.close())
    assert store.record.state == COMPLETED


# --- a store that is frozen -------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Redis]:
    server = Redis()
    yield server
    server.remove()


@pytest.mark.parametrize("works", [lambda: "done", lambda: 1 / 0], ids=["returns", "raises"])
def test_no_caller_hangs_longer_than_its_budget_on_a_frozen_store(guards, server, works):
    """D2: patience, and the time-out of the tries that may be under way when it is over."""
    engine = guards.engine(f"{server.fresh_url()}&timeout=500ms", Policy(patience="1s"))
    begun_s = []

    def work():
        server.kill(signal.SIGSTOP)
        begun_s.append(time.monotonic())
        return works()

    with pytest.raises((StoreUnavailable, ZeroDivisionError)):
        guards.run(engine, "k", work)
    taken_s = time.monotonic() - begun_s[0]
    server.kill(signal.SIGCONT)
    # 0.5 s each: the first try, the one that is repeated at once, and the last; a second to spare.
    assert taken_s < 1 + 3 * 0.5 + 1
