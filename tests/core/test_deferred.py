"""Handing over: a claim that is resumed elsewhere, once however often it is delivered (L10)."""

import pytest

from coatcheck.core.deferred import DeferredToken, decode_token, encode_token, offer, run_deferred
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Execute,
    Executed,
    Reconcile,
    Refuse,
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

NOW = 1_700_000_000_000
POLICY = Policy(in_flight="202")
SECRET = b"a secret"
TICKET = ClaimRequest(b"i" * 16, b"f" * 16, NOW, 7, "POST /orders", "caller", "key")
# What a handler has claimed and handed over, a second ago.
CLAIM = first_attempt(TICKET._replace(nonce=3), POLICY, GONE, NOW - 1_000)
HANDED = DeferredToken(CLAIM.id, CLAIM.created_ms, CLAIM.nonce)


def begun(standing=CLAIM, policy=POLICY, request=TICKET):
    """A delivery of what was handed over, and what it asks for first."""
    flow = run_deferred(HANDED, request, policy, standing)
    return flow, next(flow)


def end_of(flow, *sent):
    """How *flow* ends: at once, or when it is sent something."""
    with pytest.raises(StopIteration) as stopped:
        flow.send(*sent) if sent else next(flow)
    return stopped.value.value


def taken(request=TICKET, standing=CLAIM):
    _flow, swap = begun(standing, request=request)
    return swap.record


# --- the text -------------------------------------------------------------------------------


def test_the_text_names_a_claim_and_is_short():
    text = encode_token(HANDED, SECRET)
    assert decode_token(text, SECRET) == HANDED
    assert len(text) == 64
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@pytest.mark.parametrize(
    "text", ["", "A", "=", "x" * 63, "x" * 64, "ü" * 64, "\ud800" * 64, "!" * 64, "A" * 1_000]
)
def test_a_text_of_somebody_else_names_nothing(text):
    """X3."""
    assert decode_token(text, SECRET) is None


def test_a_text_that_was_changed_in_one_place_names_nothing():
    """X3: neither the claim nor the seal can be another."""
    text = encode_token(HANDED, SECRET)
    for at in range(len(text)):
        other = "A" if text[at] != "A" else "B"
        assert decode_token(text[:at] + other + text[at + 1 :], SECRET) is None
    assert decode_token(text + "AAAA", SECRET) is None
    assert decode_token(text, b"another secret") is None


# --- handing over ---------------------------------------------------------------------------


def test_a_claim_is_kept_for_whoever_takes_it():
    """The same claim with a lease of its own: it is renewed, nothing else."""
    flow = offer(CLAIM, NOW + 600_000)
    swap = next(flow)
    assert swap == Swap(CLAIM.id, CLAIM.version, renewed(CLAIM, NOW + 600_000))
    assert [move.name for move in legal_moves(CLAIM, swap.record, NOW)] == ["renew"]
    assert end_of(flow, None) == swap.record


def test_a_renewal_that_came_between_is_no_reason_not_to_hand_over():
    flow = offer(CLAIM, NOW + 600_000)
    next(flow)
    renewal = renewed(CLAIM, NOW + 60_000)
    again = flow.send(renewal)
    assert again == Swap(CLAIM.id, renewal.version, renewed(renewal, NOW + 600_000))
    assert end_of(flow, None) == again.record


def test_an_offer_whose_answer_was_lost_is_made():
    flow = offer(CLAIM, NOW + 600_000)
    swap = next(flow)
    assert end_of(flow, swap.record) == swap.record


def test_what_another_attempt_has_taken_cannot_be_handed_over():
    """L5."""
    flow = offer(CLAIM, NOW + 600_000)
    next(flow)
    with pytest.raises(ClaimLost):
        flow.send(next_attempt(CLAIM, TICKET, POLICY, NOW))


# --- taking it ------------------------------------------------------------------------------


def test_whoever_swaps_the_nonce_executes_and_its_end_counts():
    """L1, L10: the same attempt, in the same life, under another nonce."""
    flow, swap = begun()
    claim = swap.record
    assert swap.expected == CLAIM.version
    assert (claim.nonce, claim.attempt, claim.state) == (TICKET.nonce, CLAIM.attempt, RUNNING)
    assert claim.lease_until_ms == NOW + POLICY.lease_ms
    assert [move.name for move in legal_moves(CLAIM, claim, NOW)] == ["defer"]
    assert flow.send(None) == Execute(claim)
    end = flow.send(Outcome(OutcomeKind.COMPLETE, b"answer"))
    assert end == Swap(claim.id, claim.version, completed(claim, b"answer"))
    assert end_of(flow, None) == Executed(claim)


def test_a_note_of_the_handler_between_looking_and_taking_changes_nothing():
    """L7: it is the same claim still."""
    flow, _swap = begun()
    later = noted(CLAIM, NOTHING.with_note(Note(NOW, 1, "about to charge")))
    again = flow.send(later)
    assert again.expected == later.version
    assert progress_of(again.record).notes == progress_of(later).notes
    assert flow.send(None) == Execute(again.record)


def test_the_steps_of_the_handler_are_its_own():
    """L7: the worker gets their results, and need not ask for them."""
    done = Step("reserve", 1, b"\x02{}")
    standing = noted(CLAIM, NOTHING.with_step(done))
    flow, swap = begun(standing)
    progress = progress_of(swap.record)
    assert (progress.steps, progress.handed) == ((done,), ("reserve",))
    assert flow.send(None) == Execute(swap.record)


def test_the_steps_of_a_worker_are_not_those_of_the_handler_that_hands_over_again():
    """L6, L7: else what a worker has begun or done would be nobody's, and forgotten."""
    progress = NOTHING.with_step(Step("reserve", 1, b"\x02{}"))
    first = progress_of(taken(standing=noted(CLAIM, progress)))
    # A worker has died in its step, and the handler has run again, as the second attempt.
    by_worker = first.with_step(Step("ship", 1))
    again = noted(CLAIM._replace(attempt=2), by_worker.with_step(Step("stamp", 2, b"\x02{}")))
    assert progress_of(taken(standing=again)).handed == ("reserve", "stamp")


def test_a_handler_without_steps_hands_over_again_and_its_worker_keeps_its_own():
    """L6, L7: that nothing was handed on the first time is written down as well."""
    first = progress_of(taken())
    again = noted(CLAIM._replace(attempt=2), first.with_step(Step("ship", 1)))
    assert progress_of(taken(standing=again)).handed == ()


def test_what_was_never_begun_can_be_taken_after_its_lease():
    """L10: a slow queue; nobody else has taken it, so nobody has begun it."""
    manual = Policy(recovery="manual")
    late = TICKET._replace(now_ms=CLAIM.lease_until_ms)
    flow, swap = begun(policy=manual, request=late)
    assert flow.send(None) == Execute(swap.record)
    assert swap.record.attempt == 1


def test_nothing_is_done_for_a_request_that_was_refused_after_all():
    """F1, L10: it would belong to no request, and any other with that key would get its answer."""
    refused = ended(CLAIM, Outcome(OutcomeKind.REJECT), is_fresh=True)
    told = end_of(run_deferred(HANDED, TICKET._replace(fingerprint=b""), POLICY, refused))
    assert isinstance(told, Refuse)
    assert told.problem.code == "key-invalid"
    flow, _swap = begun()
    assert end_of(flow, refused).problem.code == "key-invalid"


def test_whoever_comes_second_is_told_that_it_is_busy():
    """L1: and with a policy that waits, it waits."""
    mine = taken(TICKET._replace(nonce=8))
    flow = run_deferred(HANDED, TICKET, POLICY, mine)
    told = end_of(flow)
    assert isinstance(told, Refuse)
    assert told.problem.code == "in-progress"
    _flow, asks = begun(mine, Policy(in_flight="wait", wait="2s"))
    assert asks == WaitForChange(TICKET.id, mine.version, NOW + 2_000)


def test_whoever_loses_the_swap_is_told_that_it_is_busy():
    """L1."""
    flow, _swap = begun()
    told = end_of(flow, taken(TICKET._replace(nonce=8)))
    assert told.problem.code == "in-progress"


def test_whoever_comes_when_it_is_done_gets_the_result():
    """L10: the queue has delivered it again."""
    done = completed(taken(TICKET._replace(nonce=8)), b"answer")
    assert end_of(run_deferred(HANDED, TICKET, POLICY, done)) == Replay(done, b"answer")


@pytest.mark.parametrize("standing", [GONE, CLAIM._replace(created_ms=NOW - 5)])
def test_what_is_gone_or_has_begun_a_new_life_is_not_resumed(standing):
    """T2."""
    told = end_of(run_deferred(HANDED, TICKET, POLICY, standing))
    assert told.problem.code == "key-expired"


def test_what_is_past_its_window_is_not_resumed():
    """T2: whoever asks now begins a new life, and that is not for a queue to do."""
    late = TICKET._replace(now_ms=CLAIM.window_until_ms)
    assert end_of(run_deferred(HANDED, late, POLICY, CLAIM)).problem.code == "key-expired"


def test_what_is_swept_while_it_is_taken_is_not_resumed():
    """T3."""
    flow, _swap = begun()
    assert end_of(flow, GONE).problem.code == "key-expired"


def test_the_answer_of_a_worker_that_was_gone_for_too_long_does_not_count():
    """L5: it gets the one that stands; or, where its record is swept, nobody knows better."""
    flow, swap = begun()
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"late"))
    done = completed(next_attempt(swap.record, TICKET._replace(nonce=9), POLICY, NOW), b"other")
    assert end_of(flow, done) == Replay(done, b"other")
    flow, swap = begun()
    flow.send(None)
    flow.send(Outcome(OutcomeKind.COMPLETE, b"late"))
    assert end_of(flow, GONE) == Executed(swap.record)


# --- after a worker has died or failed ------------------------------------------------------


def dead(policy=POLICY):
    """Taken by a worker that died; its lease is over."""
    late = TICKET._replace(now_ms=NOW + policy.lease_ms, nonce=9)
    return taken(TICKET._replace(nonce=8)), late


def test_after_a_worker_has_died_the_next_delivery_is_the_next_attempt():
    """L5, L6."""
    standing, late = dead()
    flow, swap = begun(standing, request=late)
    assert (swap.record.attempt, swap.record.nonce) == (2, 9)
    assert flow.send(None) == Execute(swap.record)


def test_where_nothing_may_run_again_the_next_delivery_parks_it():
    """L6."""
    standing, late = dead()
    flow, swap = begun(standing, Policy(recovery="manual"), late)
    assert swap.record.state == IN_DOUBT
    assert end_of(flow, None).problem.code == "outcome-unknown"


@pytest.mark.parametrize("kind", [OutcomeKind.COMPLETE, OutcomeKind.RELEASE])
def test_where_somebody_can_be_asked_the_next_delivery_asks(kind):
    """L6: it happened, with this answer; or it did not, and may run."""
    policy = Policy(recovery="reconcile", reconcile=print)
    standing, late = dead()
    flow, swap = begun(standing, policy, late)
    assert flow.send(None) == Reconcile(swap.record)
    if kind is OutcomeKind.RELEASE:
        assert flow.send(Outcome(kind)) == Execute(swap.record)
        return
    end = flow.send(Outcome(kind, b"answer"))
    assert end.record.state == COMPLETED
    assert end_of(flow, None).response == b"answer"


def test_after_a_worker_has_failed_the_next_delivery_is_the_next_attempt():
    """L4."""
    flow, swap = begun(failed(taken(TICKET._replace(nonce=8))))
    assert (swap.record.attempt, swap.record.state) == (2, RUNNING)
    assert flow.send(None) == Execute(swap.record)


def test_what_is_in_doubt_is_not_resumed():
    """L6."""
    standing = in_doubt(taken(TICKET._replace(nonce=8)))
    assert end_of(run_deferred(HANDED, TICKET, POLICY, standing)).problem.code == "outcome-unknown"


# --- every order ----------------------------------------------------------------------------


class Actor:
    """A flow that goes on one effect at a time, over one record."""

    def __init__(self, flow):
        self.flow = flow
        self.effect = next(flow)
        self.executions = 0
        self.answer = None

    def go_on(self, world):
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
    """Two deliveries and a client's retry, in *order*; None where it names one that is over."""
    world = World()
    actors = [
        Actor(run_deferred(HANDED, TICKET._replace(nonce=8), POLICY, CLAIM)),
        Actor(run_deferred(HANDED, TICKET._replace(nonce=9), POLICY, CLAIM)),
        Actor(lifecycle(TICKET._replace(nonce=10), POLICY)),
    ]
    for number in order:
        if actors[number].effect is None:
            return None
        actors[number].go_on(world)
    return world, actors


def test_in_every_order_of_deliveries_and_retries_one_executes():
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


def test_a_handler_that_takes_it_back_and_a_worker_that_takes_it_do_not_both_win():
    """L5: whoever is second changes nothing."""
    for is_worker_first in (True, False):
        world = World()
        worker = Actor(run_deferred(HANDED, TICKET._replace(nonce=8), POLICY, CLAIM))
        taken_back = Swap(CLAIM.id, CLAIM.version, failed(CLAIM))
        if is_worker_first:
            worker.go_on(world)
            assert world.swap(taken_back).nonce == 8
            assert isinstance(worker.effect, Execute)
        else:
            assert world.swap(taken_back) is None
            assert world.record.state == FAILED
            worker.go_on(world)
            # It was given back, so that the delivery is the next attempt.
            assert worker.effect.record.attempt == 2
