"""Deferred work: a claim that a worker takes from a queue; it executes once."""

import pytest

from coatcheck.core.deferred import DeferredToken, decode_token, encode_token, offer, run_deferred
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    Execute,
    Executed,
    Reconcile,
    Replay,
    Snapshot,
    WaitForChange,
    ended,
    first_attempt,
    lifecycle,
    next_attempt,
)
from coatcheck.core.policy import Policy
from coatcheck.core.progress import NOTHING, Note, Step, noted, progress_of
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    RUNNING,
    Swap,
    completed,
    failed,
    in_doubt,
    legal_moves,
    renewed,
)
from coatcheck.errors import ClaimLost

from .flows import NOW, REQUEST, end_of

POLICY = Policy(in_flight="202")
SECRET = b"a secret"
# A handler claimed this a second ago, and deferred it.
CLAIM = first_attempt(REQUEST._replace(nonce=3), POLICY, GONE, NOW - 1_000)
TOKEN = DeferredToken(CLAIM.id, CLAIM.created_ms, CLAIM.nonce)
ANSWER = Outcome(OutcomeKind.COMPLETE, b"answer")


def delivered(current=CLAIM, policy=POLICY, request=REQUEST):
    """A delivery of the token, and its first effect."""
    flow = run_deferred(TOKEN, request, policy, current)
    return flow, next(flow)


def taken(nonce=8, current=CLAIM):
    """The claim of the worker *nonce*."""
    _flow, swap = delivered(current, request=REQUEST._replace(nonce=nonce))
    return swap.record


def refusal_of(flow, *sent):
    return end_of(flow, *sent).problem.code


# --- the token ------------------------------------------------------------------------------


def test_a_token_names_a_claim_in_64_characters():
    """L10."""
    text = encode_token(TOKEN, SECRET)
    assert decode_token(text, SECRET) == TOKEN
    assert len(text) == 64
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@pytest.mark.parametrize(
    "text", ["", "A", "=", "x" * 63, "x" * 64, "ü" * 64, "\ud800" * 64, "!" * 64, "A" * 1_000]
)
def test_any_other_text_is_no_token(text):
    """X3."""
    assert decode_token(text, SECRET) is None


def test_a_token_that_was_changed_in_one_place_is_no_token():
    """X3."""
    text = encode_token(TOKEN, SECRET)
    for at in range(len(text)):
        other = "A" if text[at] != "A" else "B"
        assert decode_token(text[:at] + other + text[at + 1 :], SECRET) is None
    assert decode_token(text + "AAAA", SECRET) is None
    assert decode_token(text, b"another secret") is None


# --- the handler defers ---------------------------------------------------------------------


def test_a_deferred_claim_is_renewed_for_its_worker():
    """L10."""
    flow = offer(CLAIM, NOW + 600_000)
    swap = next(flow)
    assert swap == Swap(CLAIM.id, CLAIM.version, renewed(CLAIM, NOW + 600_000))
    assert [move.name for move in legal_moves(CLAIM, swap.record, NOW)] == ["renew"]
    assert end_of(flow, None) == swap.record


def test_a_claim_can_be_deferred_after_a_renewal_or_a_lost_answer():
    """L10."""
    flow = offer(CLAIM, NOW + 600_000)
    next(flow)
    renewal = renewed(CLAIM, NOW + 60_000)
    again = flow.send(renewal)
    assert again == Swap(CLAIM.id, renewal.version, renewed(renewal, NOW + 600_000))
    assert end_of(flow, again.record) == again.record


def test_a_claim_that_another_attempt_has_taken_over_cannot_be_deferred():
    """L5."""
    flow = offer(CLAIM, NOW + 600_000)
    next(flow)
    with pytest.raises(ClaimLost):
        flow.send(next_attempt(CLAIM, REQUEST, POLICY, NOW))


# --- a worker takes it ----------------------------------------------------------------------


def test_a_worker_replaces_the_nonce_executes_and_completes():
    """L1, L10: the same attempt, in the same generation, under another nonce."""
    flow, swap = delivered()
    claim = swap.record
    assert swap.expected == CLAIM.version
    assert (claim.nonce, claim.attempt, claim.state) == (REQUEST.nonce, CLAIM.attempt, RUNNING)
    assert claim.lease_until_ms == NOW + POLICY.lease_ms
    assert [move.name for move in legal_moves(CLAIM, claim, NOW)] == ["defer"]
    assert flow.send(None) == Execute(claim)
    assert flow.send(ANSWER) == Swap(claim.id, claim.version, completed(claim, b"answer"))
    assert end_of(flow, None) == Executed(claim)


def test_a_worker_takes_a_claim_to_which_the_handler_has_added_a_note():
    """L7."""
    flow, _swap = delivered()
    later = noted(CLAIM, NOTHING.with_note(Note(NOW, 1, "about to charge")))
    again = flow.send(later)
    assert again.expected == later.version
    assert progress_of(again.record).notes == progress_of(later).notes
    assert flow.send(None) == Execute(again.record)


def test_a_worker_need_not_ask_for_the_steps_of_the_handler():
    """L7: it gets their results."""
    done = Step("reserve", 1, b"\x02{}")
    progress = progress_of(taken(current=noted(CLAIM, NOTHING.with_step(done))))
    assert (progress.steps, progress.handed) == ((done,), ("reserve",))


@pytest.mark.parametrize("handler_steps", [(), ("reserve",)])
def test_the_next_worker_must_ask_for_the_steps_of_an_earlier_worker(handler_steps):
    """L6, L7: a worker died in its step, and the handler, as attempt 2, has deferred again."""
    progress = NOTHING
    for name in handler_steps:
        progress = progress.with_step(Step(name, 1, b"\x02{}"))
    by_worker = progress_of(taken(current=noted(CLAIM, progress))).with_step(Step("ship", 1))
    second = noted(CLAIM._replace(attempt=2), by_worker.with_step(Step("stamp", 2, b"\x02{}")))
    assert progress_of(taken(current=second)).handed == (*handler_steps, "stamp")


def test_work_that_has_not_begun_can_be_taken_after_its_lease():
    """L10: the queue is slow."""
    late = REQUEST._replace(now_ms=CLAIM.lease_until_ms)
    flow, swap = delivered(policy=Policy(recovery="manual"), request=late)
    assert flow.send(None) == Execute(swap.record)
    assert swap.record.attempt == 1


def test_nothing_executes_for_a_request_that_was_refused_after_all():
    """F1, L10: any other request with that key would get its answer."""
    refused = ended(CLAIM, Outcome(OutcomeKind.REJECT), is_fresh=True)
    flow = run_deferred(TOKEN, REQUEST._replace(fingerprint=b""), POLICY, refused)
    assert refusal_of(flow) == "key-invalid"
    assert refusal_of(delivered()[0], refused) == "key-invalid"


def test_a_second_delivery_is_refused_or_waits():
    """L1."""
    mine = taken()
    assert refusal_of(run_deferred(TOKEN, REQUEST, POLICY, mine)) == "in-progress"
    assert refusal_of(delivered()[0], mine) == "in-progress"
    _flow, wait = delivered(mine, Policy(in_flight="wait", wait="2s"))
    assert wait == WaitForChange(REQUEST.id, mine.version, NOW + 2_000)


def test_a_delivery_after_the_work_is_done_gets_the_result():
    """L10: the queue has delivered it again."""
    done = completed(taken(), b"answer")
    assert end_of(run_deferred(TOKEN, REQUEST, POLICY, done)) == Replay(done, b"answer")


@pytest.mark.parametrize(
    ("current", "now_ms"),
    [(GONE, NOW), (CLAIM._replace(created_ms=NOW - 5), NOW), (CLAIM, CLAIM.window_until_ms)],
    ids=["gone", "a new generation", "past its window"],
)
def test_work_of_an_expired_key_is_not_executed(current, now_ms):
    """T2, T3."""
    flow = run_deferred(TOKEN, REQUEST._replace(now_ms=now_ms), POLICY, current)
    assert refusal_of(flow) == "key-expired"
    assert refusal_of(delivered()[0], GONE) == "key-expired"


def test_the_answer_of_a_worker_that_lost_its_claim_does_not_count():
    """L5: it gets the answer of the newer attempt; or its own, if the record is gone."""
    flow, swap = delivered()
    done = completed(next_attempt(swap.record, REQUEST._replace(nonce=9), POLICY, NOW), b"other")
    assert end_of(flow, None, ANSWER, done) == Replay(done, b"other")
    flow, swap = delivered()
    assert end_of(flow, None, ANSWER, GONE) == Executed(swap.record)


# --- after a worker has died or failed ------------------------------------------------------

LATE = REQUEST._replace(now_ms=NOW + POLICY.lease_ms, nonce=9)  # the lease of a worker is over


@pytest.mark.parametrize(
    ("current", "request_"), [(taken(), LATE), (failed(taken()), REQUEST)], ids=["died", "failed"]
)
def test_after_a_worker_has_died_or_failed_the_next_delivery_is_the_next_attempt(current, request_):
    """L4, L5, L6."""
    flow, swap = delivered(current, request=request_)
    claim = swap.record
    assert (claim.attempt, claim.state, claim.nonce) == (2, RUNNING, request_.nonce)
    assert flow.send(None) == Execute(claim)


def test_under_manual_the_next_delivery_marks_it_in_doubt():
    """L6."""
    flow, swap = delivered(taken(), Policy(recovery="manual"), LATE)
    assert swap.record.state == IN_DOUBT
    assert refusal_of(flow, None) == "outcome-unknown"
    again = run_deferred(TOKEN, REQUEST, POLICY, in_doubt(taken()))
    assert refusal_of(again) == "outcome-unknown"


def test_under_reconcile_the_next_delivery_asks():
    """L6: it happened, with this answer; or it did not, and may run."""
    policy = Policy(recovery="reconcile", reconcile=print)
    flow, swap = delivered(taken(), policy, LATE)
    assert flow.send(None) == Reconcile(swap.record)
    assert flow.send(Outcome(OutcomeKind.RELEASE)) == Execute(swap.record)
    flow, _swap = delivered(taken(), policy, LATE)
    flow.send(None)
    assert flow.send(ANSWER).record.state == COMPLETED
    assert end_of(flow, None).response == b"answer"


# --- every order ----------------------------------------------------------------------------


class Actor:
    """A flow that performs one effect at a time, on one record."""

    def __init__(self, flow):
        self.flow = flow
        self.effect = next(flow)
        self.executions = 0
        self.answer = None

    def step(self, world):
        if isinstance(self.effect, Swap):
            sent = world.swap(self.effect)
        elif isinstance(self.effect, WaitForChange):
            sent = Snapshot(world.record, self.effect.until_ms)
        else:
            assert isinstance(self.effect, Execute)
            self.executions += 1
            sent = Outcome(OutcomeKind.COMPLETE, b"answer %d" % self.effect.claim.nonce)
        try:
            self.effect = self.flow.send(sent)
        except StopIteration as stopped:
            self.effect, self.answer = None, stopped.value


class World:
    def __init__(self):
        self.record = CLAIM

    def swap(self, swap):
        if swap.expected != self.record.version:
            return self.record
        assert legal_moves(self.record, swap.record, NOW)
        self.record = swap.record
        return None


def played(order):
    """Two deliveries and a retry of the client, in *order*."""
    world = World()
    actors = [
        Actor(run_deferred(TOKEN, REQUEST._replace(nonce=8), POLICY, CLAIM)),
        Actor(run_deferred(TOKEN, REQUEST._replace(nonce=9), POLICY, CLAIM)),
        Actor(lifecycle(REQUEST._replace(nonce=10), POLICY)),
    ]
    for number in order:
        actors[number].step(world)
    return world, actors


def test_in_every_order_of_deliveries_and_retries_exactly_one_executes():
    """L1, L10: every interleaving, to the end."""
    orders, ends = [()], 0
    while orders:
        order = orders.pop()
        world, actors = played(order)
        left = [number for number, actor in enumerate(actors) if actor.effect is not None]
        orders += [(*order, number) for number in left]
        if left:
            continue
        ends += 1
        assert sum(actor.executions for actor in actors) == 1
        assert actors[2].executions == 0
        assert world.record.state == COMPLETED
        for actor in actors:
            kept = getattr(actor.answer, "response", world.record.response)
            assert kept == world.record.response
    assert ends > 20


def test_of_a_handler_that_releases_and_a_worker_that_takes_the_second_changes_nothing():
    """L5."""
    released = Swap(CLAIM.id, CLAIM.version, failed(CLAIM))
    world = World()
    worker = Actor(run_deferred(TOKEN, REQUEST._replace(nonce=8), POLICY, CLAIM))
    worker.step(world)
    assert world.swap(released).nonce == 8
    assert isinstance(worker.effect, Execute)
    world = World()
    worker = Actor(run_deferred(TOKEN, REQUEST._replace(nonce=8), POLICY, CLAIM))
    assert world.swap(released) is None
    assert world.record.state == FAILED
    worker.step(world)
    assert worker.effect.record.attempt == 2  # the delivery is the next attempt
