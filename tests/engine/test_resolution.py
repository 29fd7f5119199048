"""In doubt: what an operator decides, through both engines, and what every client gets then."""

import logging
import threading

import pytest

import coatcheck
from coatcheck import (
    ClaimLost,
    DidNotHappen,
    Engine,
    Erased,
    Happened,
    KeyRing,
    Misconfigured,
    NotResolved,
    OutcomeUnknown,
    Policy,
    Response,
    Unknown,
    Unreadable,
    current_operation,
)
from coatcheck.core.identity import caller_digest
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.key import reference_of
from coatcheck.core.progress import progress_of
from coatcheck.core.record import COMPLETED, FAILED, IN_DOUBT, RUNNING, Record, Swap
from coatcheck.core.response import decode_response
from coatcheck.engine.resolution import BY_CHARS_MAX, WHY_CHARS_MAX
from coatcheck.errors import Resumable, StepInDoubt, Uncertain
from coatcheck.stores import Query
from tests.support.engines import (
    BY_ADA,
    LEASE_S,
    Handler,
    Killed,
    WatchedStore,
    held_up,
    only_record,
)
from tests.support.times import NOW_MS, eventually, wait_for

MANUAL = Policy(recovery="manual")


@pytest.fixture(params=["memory", "compact"])
def store(request, tmp_path):
    if request.param == "memory":
        return WatchedStore()
    return coatcheck.open_store(f"sqlite:///{tmp_path}/records.db?compact=1")


@pytest.fixture
def engine(guards, store, clock):
    return guards.engine(store, MANUAL, clock=clock, recover_every_s=None)


def put_in_doubt(guards, engine, key="k") -> str:
    """An operation whose handler failed in the middle; its reference."""
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, key, Handler(ZeroDivisionError()), scope="charges")
    with pytest.raises(OutcomeUnknown) as refused:
        guards.run(engine, key, Handler(), scope="charges")
    return refused.value.reference


def of_request(record: Record) -> Record:
    """*record*, as a request would have made it."""
    return record._replace(label="POST /charges", scope="5c0pe5c0pe5c0pe0")


def change(engine, record: Record) -> None:
    before = only_record(engine)
    after = record._replace(version=before.version + 1)
    assert list(engine.attempts._store.swap([Swap(record.id, before.version, after)])) == [None]


# --- it happened, or it did not ---------------------------------------------------------------


@pytest.mark.parametrize("value", [{"charge": 7}, None, b"raw", 0])
def test_every_retry_gets_what_happened(guards, engine, value):
    """L6, L2: completed with this result, as if the function had returned it."""
    reference = put_in_doubt(guards, engine)
    record = guards.done(engine.resolve(reference, Happened(value=value), **BY_ADA))
    assert record == only_record(engine)
    assert record.state == COMPLETED
    handler = Handler()
    assert guards.run(engine, "k", handler, scope="charges") == value
    assert handler.calls == 0


def test_what_did_not_happen_is_executed_by_the_next_retry(guards, engine):
    """L6: given back, as the next attempt."""
    reference = put_in_doubt(guards, engine)
    record = guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA))
    assert record.state == FAILED
    handler = Handler("charged")
    assert guards.run(engine, "k", handler, scope="charges") == "charged"
    assert handler.calls == 1
    assert only_record(engine).attempt == 2


def stepped(guards, charges, error=None):
    """A handler whose only step may happen at most once, and fails with *error* if it is given."""

    def charge():
        charges.append(1)
        if error is not None:
            raise error
        return len(charges)

    def handle():
        return current_operation().step("charge", charge, at_most_once=True)

    return guards.flavoured(handle)


def put_step_in_doubt(guards, engine, charges):
    failing = stepped(guards, charges, TimeoutError())
    with pytest.raises(TimeoutError):
        guards.done(engine.run("k", failing, scope="charges", policy=Policy()))
    with pytest.raises(StepInDoubt):
        guards.done(engine.run("k", failing, scope="charges", policy=Policy()))
    assert (only_record(engine).state, charges) == (IN_DOUBT, [1])
    return only_record(engine).id


def test_a_step_that_did_not_happen_is_taken_again(guards, engine):
    """L6, L7: else the next attempt would be in doubt again, and so on for ever."""
    charges = []
    id = put_step_in_doubt(guards, engine, charges)
    guards.done(engine.resolve(id, DidNotHappen(), **BY_ADA))
    again = engine.run("k", stepped(guards, charges), scope="charges", policy=Policy())
    assert guards.done(again) == 2
    assert charges == [1, 1]


def test_a_step_in_doubt_is_taken_when_an_operator_runs_it_again(guards, engine):
    """L6, L7."""
    charges = []
    id = put_step_in_doubt(guards, engine, charges)
    assert guards.done(engine.rerun(id, stepped(guards, charges), **BY_ADA)) == 2
    assert charges == [1, 1]


def test_an_operator_decides_also_where_requests_run_without_the_store(guards, store, clock):
    """L6, D2: the engine's own policy may say what contradicts a rerun under "manual"."""
    engine = guards.engine(store, Policy(on_outage="execute"), clock=clock, recover_every_s=None)
    for number in range(2):
        with pytest.raises(Uncertain):
            guards.run(engine, f"k{number}", Handler(Uncertain()), scope="s")
    first, second = (reference_of(record.id) for record in store.find(Query()).records)
    guards.done(engine.resolve(first, Happened(value="charged"), **BY_ADA))
    work = guards.flavoured(Handler("charged"))
    assert guards.done(engine.rerun(second, work, **BY_ADA)) == "charged"
    assert {record.state for record in store.find(Query()).records} == {COMPLETED}


def test_the_record_contains_the_operator_the_time_and_the_reason(guards, engine, clock, caplog):
    """L6, O1: and so does one line of the log."""
    reference = put_in_doubt(guards, engine)
    clock.advance(3_600)
    caplog.set_level(logging.INFO, "coatcheck")
    guards.done(engine.resolve(reference, DidNotHappen(), by="ada", why="two\nlines"))
    (resolution,) = progress_of(only_record(engine)).resolutions
    assert resolution == (clock.now_ms, "did not happen", "ada", "two\nlines")
    (line,) = [line for line in caplog.messages if "was resolved" in line]
    assert line == (
        rf"coatcheck: operation {reference} (charges) was resolved: it did not happen, says 'ada': "
        r"'two\nlines'"
    )


@pytest.mark.parametrize("spelled", ["lower", "no dashes", "id", "bytes"])
def test_an_operation_is_named_by_its_reference_or_its_id(guards, engine, spelled):
    """K5."""
    reference = put_in_doubt(guards, engine)
    id = only_record(engine).id
    named = {
        "lower": reference.lower(),
        "no dashes": reference.replace("-", ""),
        "id": id.hex(),
        "bytes": id,
    }[spelled]
    assert guards.done(engine.resolve(named, DidNotHappen(), **BY_ADA)).id == id


def test_a_waiter_for_an_abandoned_operation_is_woken(guards, store):
    """L3, L6: the decision is the end that it waits for."""
    decides = threading.current_thread()
    # Over for the operator, but not for the waiter, which would mark the operation in doubt.
    later_ms = 1_000 * LEASE_S
    engine = guards.engine(
        store,
        MANUAL,
        clock=lambda: NOW_MS + later_ms * (threading.current_thread() is decides),
        recover_every_s=None,
    )
    dying = guards.beside(engine, "k", Handler(Killed()), scope="charges")
    with pytest.raises(Killed):
        dying.result(20)
    record = only_record(engine)
    waiting = guards.beside(engine, "k", Handler(), scope="charges")
    eventually(lambda: engine.attempts.waiters.count(record.id))
    outcome = Happened(value="found")
    guards.done(engine.resolve(record.id, outcome, abandoned=True, **BY_ADA))
    assert waiting.result(20) == "found"


# --- requests and functions -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "response"),
    [
        (
            Happened(201, [("Location", "/charges/7")], b"{}"),
            Response(201, [(b"location", b"/charges/7")], b"{}"),
        ),
        (Happened(), Response(200, [], b"")),
    ],
)
def test_a_request_is_completed_with_a_response(guards, engine, outcome, response):
    """L6, L2."""
    put_in_doubt(guards, engine)
    change(engine, of_request(only_record(engine)))
    record = guards.done(engine.resolve(only_record(engine).id, outcome, **BY_ADA))
    assert decode_response(record.response) == response


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"status": 99_999}, "status is 99999; it must be a number from 200 to 599"),
        ({"status": 199}, "status is 199"),
        ({"status": "201"}, "status is '201'"),
        ({"headers": {"Location": "/x"}}, "headers is {.*it must be a list of pairs of texts"),
        ({"headers": [(b"x", b"y")]}, "is no header; it must be a pair of texts"),
        ({"headers": ["Location: /x"]}, "is no header; it must be a pair of texts"),
        ({"headers": [("a b", "y")]}, "'a b' cannot be the name of a header"),
        ({"headers": [("X", "a\r\nSet-Cookie: evil=1")]}, "cannot be the value of the header X"),
        ({"headers": [("X", "\u20ac")]}, "cannot be the value of the header X"),
        ({"status": 204, "body": b"done"}, "a response of status 204 has no body"),
        ({"body": "text"}, "body is a str; it must be bytes"),
        ({"body": None}, "body is a NoneType; it must be bytes"),
    ],
)
def test_an_answer_that_could_not_be_served_is_refused_when_it_is_made(answer, sentence):
    """L6: every retry would fail, and the operator would never know."""
    with pytest.raises(Misconfigured, match=sentence):
        Happened(**answer)


@pytest.mark.parametrize(
    ("is_request", "outcome", "complaint"),
    [
        (False, Happened(201, body=b"{}"), "is a function"),
        (True, Happened(value={}), "is a request"),
        (False, Happened(value=object()), "neither JSON nor bytes"),
        (False, Unknown(), "not an outcome"),
        (False, None, "not an outcome"),
    ],
)
def test_an_outcome_that_no_retry_could_get_is_refused(
    guards, engine, is_request, outcome, complaint
):
    """L6: and the operation stays in doubt."""
    put_in_doubt(guards, engine)
    if is_request:
        change(engine, of_request(only_record(engine)))
    with pytest.raises(Misconfigured, match=complaint):
        guards.done(engine.resolve(only_record(engine).id, outcome, **BY_ADA))
    assert only_record(engine).state == IN_DOUBT


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["by", "why"])
@pytest.mark.parametrize("text", ["", "  ", None, "x" * (WHY_CHARS_MAX + 1)])
def test_a_resolution_needs_an_operator_and_a_reason(guards, engine, name, text):
    """L6."""
    reference = put_in_doubt(guards, engine)
    assert BY_CHARS_MAX <= WHY_CHARS_MAX
    with pytest.raises(Misconfigured, match=f"^{name} is "):
        guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA | {name: text}))
    assert only_record(engine).state == IN_DOUBT


@pytest.mark.parametrize("reference", ["7D3F-92AB-1C4E", "0" * 32, b"\0" * 16])
def test_an_unknown_operation_is_not_resolved(guards, engine, reference):
    """L6."""
    put_in_doubt(guards, engine)
    with pytest.raises(NotResolved, match="there is no operation ") as refused:
        guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA))
    assert refused.value.record is None


def test_a_wrong_reference_is_refused(guards, engine):
    with pytest.raises(NotResolved, match="is not a reference such as"):
        guards.done(engine.resolve("order-42", DidNotHappen(), **BY_ADA))


def test_a_reference_of_two_operations_is_ambiguous(guards, engine):
    """K5: 60 bits seldom collide; if they do, a person says which."""
    reference = put_in_doubt(guards, engine)
    record = only_record(engine)
    twin = record._replace(id=record.id[:8] + b"another!")
    assert list(engine.attempts._store.swap([Swap(twin.id, 0, twin)])) == [None]
    with pytest.raises(NotResolved, match=f"several operations have .*{twin.id.hex()}"):
        guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA))
    assert guards.done(engine.resolve(twin.id.hex(), DidNotHappen(), **BY_ADA)).id == twin.id


def test_of_two_resolutions_the_second_is_refused_with_the_first(guards, engine):
    """L6: and nothing changes."""
    reference = put_in_doubt(guards, engine)
    first = guards.done(engine.resolve(reference, Happened(value=1), by="ada", why="saw it"))
    told = r"is completed already \(resolved by 'ada': 'saw it'\)"
    with pytest.raises(NotResolved, match=told) as refused:
        guards.done(engine.resolve(reference, DidNotHappen(), by="bob", why="did not"))
    assert refused.value.record == first == only_record(engine)


def test_a_released_operation_is_not_in_doubt_any_more(guards, engine):
    reference = put_in_doubt(guards, engine)
    guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA))
    with pytest.raises(NotResolved, match="the next retry runs it"):
        guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA))


def test_an_operator_may_resolve_an_abandoned_operation(guards, engine, clock):
    """L6: its lease is over, and it is not in doubt yet; a living one is never touched."""
    with pytest.raises(Killed):
        guards.run(engine, "k", Handler(Killed()), scope="charges")
    reference = reference_of(only_record(engine).id)
    with pytest.raises(NotResolved, match="is being executed, by attempt 1"):
        guards.done(engine.resolve(reference, DidNotHappen(), abandoned=True, **BY_ADA))
    clock.advance(LEASE_S)
    with pytest.raises(NotResolved, match="not in doubt yet"):
        guards.done(engine.resolve(reference, DidNotHappen(), **BY_ADA))
    guards.done(engine.resolve(reference, DidNotHappen(), abandoned=True, **BY_ADA))
    assert only_record(engine).state == FAILED


def test_a_zombie_cannot_undo_a_resolution(guards, engine, clock):
    """L5: its end comes after the decision, and changes nothing."""
    zombie = held_up("late")
    running = guards.beside(engine, "k", zombie, scope="charges")
    wait_for(zombie.is_running)
    record = only_record(engine)
    engine.attempts.heartbeat.leases.clear()  # its renewals do not come through
    clock.advance(LEASE_S)
    outcome = Happened(value="found")
    guards.done(engine.resolve(record.id, outcome, abandoned=True, **BY_ADA))
    zombie.may_end.set()
    assert running.result(20) == "found"
    assert guards.run(engine, "k", Handler(), scope="charges") == "found"


def test_an_encrypted_operation_is_resolved_by_an_engine_with_its_keys(guards, clock):
    """X1: notes that cannot be read cannot be added to."""
    store, ring = WatchedStore(), KeyRing({"1": b"k" * 32})
    engine = guards.engine(store, MANUAL, clock=clock, keyring=ring, recover_every_s=None)

    def noting():
        yield current_operation().note("about to charge")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", noting, scope="charges")
    with Engine(store, clock=clock) as without, pytest.raises(Unreadable, match="key ring"):
        without.resolve(store.record.id, DidNotHappen(), **BY_ADA)
    record = guards.done(engine.resolve(store.record.id, DidNotHappen(), **BY_ADA))
    assert [note.what for note in progress_of(record).notes] == ["about to charge"]
    assert b"ada" not in store.record.progress


# --- run again, now ---------------------------------------------------------------------------


def test_an_operation_in_doubt_is_run_again_and_its_end_counts(guards, engine):
    """L6: as the next attempt, held and fenced like any other."""
    reference = put_in_doubt(guards, engine)
    seen = []

    def again(amount, currency):
        operation = current_operation()
        record = only_record(engine)
        seen.append((operation.attempt, operation.label, operation.reference))
        assert (record.state, record.id in engine.attempts.heartbeat.leases) == (RUNNING, True)
        return {"charged": amount, "in": currency}

    function = guards.flavoured(again)
    result = guards.done(engine.rerun(reference, function, 5, currency="EUR", **BY_ADA))
    assert result == {"charged": 5, "in": "EUR"}
    assert seen == [(2, "charges", reference)]
    assert engine.attempts.heartbeat.leases == {}
    record = only_record(engine)
    assert (record.state, record.attempt) == (COMPLETED, 2)
    assert [r.outcome for r in progress_of(record).resolutions] == ["run again"]
    handler = Handler()
    assert guards.run(engine, "k", handler, scope="charges") == result
    assert handler.calls == 0


@pytest.mark.parametrize(
    ("error", "state"), [(ZeroDivisionError(), IN_DOUBT), (Resumable("known"), FAILED)], ids=repr
)
def test_a_rerun_that_fails_leaves_it_in_doubt_unless_it_is_resumable(guards, store, error, state):
    """L6: whatever the engine's policy is; that of the operation may be another."""
    engine = guards.engine(store, recover_every_s=None)
    failing = Handler(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        guards.run(engine, "k", failing, scope="charges", policy=MANUAL)
    again = guards.flavoured(Handler(error))
    with pytest.raises(type(error)):
        guards.done(engine.rerun(only_record(engine).id, again, **BY_ADA))
    assert only_record(engine).state == state


def test_a_request_is_rerun_with_a_response(guards, engine):
    """L6, L2."""
    put_in_doubt(guards, engine)
    change(engine, of_request(only_record(engine)))
    answer = Happened(201, [], b"{}")
    again = guards.flavoured(Handler(answer))
    assert guards.done(engine.rerun(only_record(engine).id, again, **BY_ADA)) == answer
    assert decode_response(only_record(engine).response) == Response(201, [], b"{}")


def test_a_request_that_is_rerun_without_a_response_is_done_but_not_kept(guards, engine, caplog):
    """L12: nothing runs a third time because of that."""
    put_in_doubt(guards, engine)
    change(engine, of_request(only_record(engine)))
    again = guards.flavoured(Handler({"charged": 5}))
    assert guards.done(engine.rerun(only_record(engine).id, again, **BY_ADA)) == {"charged": 5}
    assert (only_record(engine).state, only_record(engine).response) == (COMPLETED, None)
    assert "not Happened(status, headers, body)" in caplog.text


def test_an_operation_that_is_not_in_doubt_is_not_run_again(guards, engine):
    """L6."""
    guards.run(engine, "k", Handler("done"), scope="charges")
    handler = Handler()
    again = guards.flavoured(handler)
    with pytest.raises(NotResolved, match="completed already"):
        guards.done(engine.rerun(only_record(engine).id, again, **BY_ADA))
    assert handler.calls == 0


def test_a_rerun_that_was_taken_over_raises_claim_lost(guards, engine):
    """L5."""
    put_in_doubt(guards, engine)

    def again():
        record = only_record(engine)
        change(engine, record._replace(nonce=1, attempt=record.attempt + 1))
        return "late"

    with pytest.raises(ClaimLost, match="taken over while it ran"):
        guards.done(engine.rerun(only_record(engine).id, guards.flavoured(again), **BY_ADA))
    assert only_record(engine).response is None


# --- corrections and erasing ------------------------------------------------------------------


def test_a_decision_is_corrected_for_every_process(guards, engine, store, clock):
    """L6: a process that has made a decision asks the store again, which may have another by now."""
    reference = put_in_doubt(guards, engine)
    guards.done(engine.resolve(reference, Happened(value="wrong"), **BY_ADA))
    assert guards.run(engine, "k", Handler(), scope="charges") == "wrong"
    other = guards.engine(store, MANUAL, clock=clock, recover_every_s=None)
    guards.done(other.resolve(reference, Happened(value="right"), correct=True, **BY_ADA))
    assert guards.run(engine, "k", Handler(), scope="charges") == "right"
    guards.done(other.resolve(reference, DidNotHappen(), correct=True, **BY_ADA))
    assert guards.run(engine, "k", Handler("charged"), scope="charges") == "charged"
    for outcome in (Happened(value="late"), DidNotHappen()):  # executed: not to be corrected
        with pytest.raises(NotResolved, match="nothing to correct"):
            guards.done(other.resolve(reference, outcome, correct=True, **BY_ADA))
    with pytest.raises(NotResolved, match="no operation"):
        guards.done(engine.resolve(b"absent" * 2 + b"....", DidNotHappen(), correct=True, **BY_ADA))


def complete_for(guards, engine, key: str, caller: str) -> bytes:
    """A request of *caller* that is completed; its id."""
    id = key.encode() * 16
    digest = caller_digest("own", caller)
    made = engine.attempts.new_request(id, b"f" * 16, key=key, caller=digest, label="POST /orders")
    operation = guards.done(engine.begin(made, Policy()))
    guards.done(engine.complete(operation, Outcome(OutcomeKind.COMPLETE, b"answer")))
    return id


def test_everything_of_a_caller_is_erased_and_forgotten(guards, clock):
    """R3: from the store and from the memory of this process; others keep theirs."""
    store = WatchedStore()
    engine = guards.engine(store, clock=clock, sweep_every_s=None, recover_every_s=None)
    store.now_ms = lambda: clock.now_ms + 1_000  # later than the versions of these records
    ids = [complete_for(guards, engine, key, "ada") for key in "ab"]
    kept = complete_for(guards, engine, "c", "eve")
    assert guards.done(engine.erase("ada", dry_run=True)) == Erased(2, ())
    assert engine.attempts.replay_cache.knows(ids[0])
    assert guards.done(engine.erase("ada")) == Erased(2, ())
    assert [engine.attempts.replay_cache.knows(id) for id in (*ids, kept)] == [False, False, True]
    assert [record.id for record in store.records] == [kept]
    with pytest.raises(Misconfigured, match="caller is empty"):
        guards.done(engine.erase(""))


def test_a_record_whose_version_is_ahead_of_the_clock_is_not_erased(guards, clock):
    """R3, T3: its next generation would get a version that was used before."""
    store = WatchedStore()
    engine = guards.engine(store, clock=clock, sweep_every_s=None, recover_every_s=None)
    store.now_ms = lambda: clock.now_ms
    id = complete_for(guards, engine, "a", "ada")
    assert guards.done(engine.erase("ada")) == Erased(0, (reference_of(id),))
    assert store.record.id == id
