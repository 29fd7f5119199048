"""R1: what record mode would have done with an observed request, for every current record."""

import pytest

from coatcheck.core.lifecycle import Claim, first_attempt
from coatcheck.core.observe import WOULD_REPLAY, WOULD_WAIT, Observation, observe
from coatcheck.core.policy import Policy
from coatcheck.core.record import GONE, completed, failed, in_doubt

from .flows import NOW, REQUEST, end_of

LEASE = 60_000
DAY = 86_400_000
POLICY = Policy()
EARLIER = REQUEST._replace(nonce=6, now_ms=NOW - 1_000)
RUNNING = first_attempt(EARLIER, POLICY, GONE, EARLIER.now_ms)
DEAD = first_attempt(EARLIER._replace(now_ms=NOW - LEASE), POLICY, GONE, NOW - LEASE)
OLD = completed(first_attempt(EARLIER, POLICY, GONE, NOW - DAY), None)


def observed(*conflicts, policy=POLICY, request=REQUEST):
    """What is found if the claims meet these *conflicts*, and the last claim."""
    flow = observe(request, policy)
    claim = next(flow)
    for conflict in conflicts[:-1]:
        claim = flow.send(conflict)
    assert isinstance(claim, Claim)
    return end_of(flow, conflicts[-1]), claim.record


def would_refuse(code):
    return Observation("would_refuse", code)


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_a_new_key_is_claimed(is_acknowledged):
    """R1: also if the acknowledgement of the claim was lost."""
    flow = observe(REQUEST, POLICY)
    claim = next(flow).record
    found = end_of(flow, None if is_acknowledged else claim)
    assert found == Observation("executed", claim=claim, is_fresh=True)


@pytest.mark.parametrize(
    ("current", "policy", "expected"),
    [
        (completed(RUNNING, None), POLICY, WOULD_REPLAY),
        (completed(RUNNING, b"answer"), POLICY, WOULD_REPLAY),
        (RUNNING, POLICY, WOULD_WAIT),
        (RUNNING, Policy(in_flight="409"), would_refuse("in-progress")),
        (RUNNING, Policy(in_flight="202"), WOULD_WAIT),
        (RUNNING._replace(fingerprint=b"o" * 16), POLICY, would_refuse("key-reused")),
        (DEAD, Policy(recovery="manual"), would_refuse("outcome-unknown")),
        (in_doubt(RUNNING), POLICY, would_refuse("outcome-unknown")),
        (OLD, Policy(on_expired="refuse"), would_refuse("key-expired")),
    ],
)
def test_a_known_key_is_answered_as_record_mode_would(current, policy, expected):
    """R1."""
    found, _ = observed(current, policy=policy)
    assert found == expected


@pytest.mark.parametrize(
    ("current", "is_fresh", "attempt"),
    [
        (failed(RUNNING), False, 2),
        (failed(RUNNING)._replace(fingerprint=b""), True, 2),
        (DEAD, False, 2),
        (OLD, True, 1),
    ],
)
def test_what_record_mode_would_run_again_is_claimed_again(current, is_fresh, attempt):
    """R1: a reconcile function is not asked."""
    policy = Policy(recovery="reconcile", reconcile=print) if current is DEAD else POLICY
    found, claim = observed(current, None, policy=policy)
    assert found == Observation("executed", claim=claim, is_fresh=is_fresh)
    assert claim.attempt == attempt


def test_of_two_that_take_over_one_would_have_waited():
    """R1."""
    assert observed(failed(RUNNING), RUNNING)[0] == WOULD_WAIT
