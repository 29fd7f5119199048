"""The rules: what must hold in every state, whatever the adversary does.

They look at what happened, never at why: they know the store, the clock and the table of legal
moves, and repeat no decision of the flow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coatcheck.core.flow import run
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import (
    ClaimRequest,
    Execute,
    Executed,
    Reconcile,
    Refuse,
    Replay,
    lifecycle,
)
from coatcheck.core.record import (
    COMPLETED,
    FAILED,
    GONE,
    IN_DOUBT,
    RUNNING,
    Record,
    Swap,
    is_lease_over,
    legal_moves,
)

if TYPE_CHECKING:
    from .places import Place
    from .world import Client, Past, Scenario, World

# More than any client alone needs: claim, lose, look, take over, ask, execute, end.
PROBE_EFFECTS_MAX = 10
# Where a key may end for good: a person was told, or will be.
SETTLED_CODES = {"outcome-unknown", "result-unavailable"}


class Violation(AssertionError):
    """A promise was broken."""


def require(holds: object, promise: str) -> None:
    """*promise* is kept, or the exploration ends here."""
    if not holds:
        raise Violation(promise)


# --- what the store accepts -------------------------------------------------------------------


def accepted(scenario: Scenario, world: World, number: int, record: Record) -> Past:
    """Client *number* has written *record* over what stands."""
    before, past = world.record, world.past
    require(legal_moves(before, record, world.now_ms), "every accepted swap is a legal move")
    require(record.version > past.version_max, "versions only grow, also across lives")
    nonce = scenario.atlases[number].nonce
    if before is not None and record.state != RUNNING:
        is_parked = record.state == IN_DOUBT and is_lease_over(before, world.now_ms)
        require(before.nonce == nonce or is_parked, "only its holder ends an attempt")
    if before is not None and before.created_ms == record.created_ms:
        _check_life(before, record)
    if record.state == RUNNING:
        own = scenario.kinds[number].fingerprint
        require(record.fingerprint == own, "a claim is for the request of its client")
    if record.state in (FAILED, IN_DOUBT) and before is not None and before.nonce == nonce:
        past = _ended(scenario, world, number, record)
    return past._replace(version_max=record.version)


def _check_life(before: Record, record: Record) -> None:
    times = before.window_until_ms == record.window_until_ms
    require(times and before.expires_ms == record.expires_ms, "the times of a life are set once")
    is_same = record.fingerprint == before.fingerprint
    is_open = before.fingerprint == b"" or (record.state == FAILED and record.fingerprint == b"")
    require(is_same or is_open, "another request never goes on with a life")
    is_next = record.state == RUNNING and record.nonce != before.nonce
    require(record.attempt == before.attempt + is_next, "attempts are counted one by one")


def _ended(scenario: Scenario, world: World, number: int, record: Record) -> Past:
    """An execution says itself that it has ended without a final answer."""
    outcome = world.clients[number].place.outcome
    is_told = isinstance(outcome, Outcome) and outcome.kind in (
        OutcomeKind.RELEASE,
        OutcomeKind.REJECT,
    )
    is_clear = is_told or scenario.kinds[number].policy.recovery == "retry"
    require(
        is_clear or record.state == IN_DOUBT, "an attempt with an unclear end is not given back"
    )
    executions = tuple(
        (*e[:2], record.state) if e[:2] == (record.created_ms, record.attempt) else e
        for e in world.past.executions
    )
    return world.past._replace(executions=executions)


def check_late(world: World, number: int, record: Record) -> None:
    """A write that was lost on its way has just taken effect."""
    client = world.clients[number]
    asks = client.place.asks
    is_asked = isinstance(asks, Swap) and asks.record == record
    is_gone = client.is_savepoint_gone and client.place.answer is None
    require(is_asked or is_gone, "a late write does not surprise the client that went on")


# --- what clients do and get ------------------------------------------------------------------


def begun(scenario: Scenario, world: World, number: int, place: Place) -> Past:
    """Client *number* begins to execute at *place*."""
    assert isinstance(place.asks, Execute)
    claim = place.asks.claim
    past, policy = world.past, scenario.kinds[number].policy
    attempt = (claim.created_ms, claim.attempt)
    here = [e for e in past.executions if e[0] == claim.created_ms]
    require(attempt not in [e[:2] for e in here], "an attempt executes at most once")
    is_live = world.clients[number].lease_until_ms > world.now_ms
    for other, client in enumerate(world.clients):
        if is_live and other != number and _is_executing(client):
            is_savepoint_gone = client.lease_until_ms <= world.now_ms
            require(is_savepoint_gone, "executions overlap only after a lease ran out")
    unknown = [e for e in here if e[2] == RUNNING]
    unclear = [e for e in here if e[2] != FAILED]
    require(
        len(unknown) <= past.leases_over,
        "another execution follows only an end that is known or a lease that ran out",
    )
    if policy.recovery == "manual":
        require(not unclear, "manual: nothing runs again after an unclear end")
    if policy.recovery == "reconcile" and unclear:
        require(
            place.trust == claim, "reconcile: nothing runs again before the reconciler was asked"
        )
    return past._replace(executions=tuple(sorted((*past.executions, (*attempt, RUNNING)))))


def _is_executing(client: Client) -> bool:
    return not client.is_savepoint_gone and isinstance(client.place.asks, Execute)


def reconciled(past: Past, claim: Record) -> Past:
    """A reconciler has said that nothing before *claim* happened, so another one may follow."""
    executions = tuple((*e[:2], FAILED) if e[0] == claim.created_ms else e for e in past.executions)
    return past._replace(executions=executions)


def answered(scenario: Scenario, world: World, number: int, place: Place) -> Past:
    """Client *number* has its answer, or an error."""
    match place.answer:
        case Executed(claim):
            return _executed(world, number, place, claim)
        case Replay(record, response):
            author = scenario.kinds[int(response.rpartition(b" ")[2])]
            is_own = author.fingerprint == scenario.kinds[number].fingerprint
            require(is_own, "nobody sees the answer to another request")
            require(record.state == COMPLETED, "only final answers are replayed")
            return _final(world, record.created_ms, response)
        case Refuse():
            _refused(scenario, world, number, place)
    return world.past


def _executed(world: World, number: int, place: Place, claim: Record) -> Past:
    standing = world.record
    assert isinstance(place.outcome, Outcome)
    if place.told is GONE:  # it slept through its whole retention; nobody remembers this life
        return world.past
    is_kept = place.outcome.kind is OutcomeKind.COMPLETE
    if standing is not None and standing.created_ms == claim.created_ms:
        is_safe = standing.state == COMPLETED and standing.response == place.outcome.response
        is_open = standing.state != COMPLETED and standing.nonce != claim.nonce
        is_open = is_open or standing.state in (FAILED, IN_DOUBT)
        require(is_safe if is_kept else is_open, "an answer leaves after its record is safe")
    if not is_kept:
        return world.past
    return _final(world, claim.created_ms, place.outcome.response or number)


def _final(world: World, life: int, response: object) -> Past:
    past = world.past
    known = dict(past.finals).get(life)
    if known is None:
        return past._replace(finals=(*past.finals, (life, response)))
    require(known == response, "one life has one final answer")
    return past


def _refused(scenario: Scenario, world: World, number: int, place: Place) -> None:
    client, standing = world.clients[number], world.record
    nonce = scenario.atlases[number].nonce
    holds = standing is not None and standing.state == RUNNING and standing.nonce == nonce
    require(not holds, "who is refused holds no claim")
    if place.claim is not None:
        is_lost = isinstance(place.told, Record) and place.told.nonce != nonce
        require(is_lost, "who is refused ran nothing, unless it lost its claim")
    elif place.trust is None and not client.has_lost:
        require(not client.has_claimed, "a waiter that gives up has changed nothing")


# --- what comes after -------------------------------------------------------------------------


def check_progress(scenario: Scenario, world: World) -> None:
    """If everybody vanished now, a new client would get through once the lease is over."""
    question = (world.record, world.now_ms)
    if question not in scenario.probes:
        scenario.probes[question] = True
        _probe(scenario, world.record, world.now_ms)


def _probe(scenario: Scenario, record: Record | None, now_ms: int) -> None:
    kind = scenario.kinds[0]
    if record is not None:
        now_ms = max(now_ms, record.lease_until_ms)
        kind = kind._replace(fingerprint=record.fingerprint or kind.fingerprint)
    request = ClaimRequest(b"I" * 16, kind.fingerprint, now_ms, 9_999)
    answer = run(lifecycle(request, kind.policy), _Alone(record, now_ms))
    if not isinstance(answer, Refuse):
        return
    code = answer.problem.code
    if code == "key-expired":  # it says no only while retention lasts
        assert record is not None
        require(now_ms < record.expires_ms, "a key expires once")
        _probe(scenario, record, record.expires_ms)
    else:
        require(code in SETTLED_CODES, f"a key is never stuck: {code}")


class _Alone:
    """Performs the effects of a client that nobody disturbs."""

    def __init__(self, standing: Record | None, now_ms: int) -> None:
        self._standing = standing
        self._now_ms = now_ms
        self._count = 0

    def __call__(self, effect: object) -> object:
        self._count += 1
        require(self._count <= PROBE_EFFECTS_MAX, "a key is never stuck: a lone client goes round")
        match effect:
            case Swap(_, expected, record):
                return self._swap(expected, record)
            case Execute():
                return Outcome(OutcomeKind.COMPLETE, b"probed")
            case Reconcile():
                return Outcome(OutcomeKind.RELEASE)
        raise Violation("a key is never stuck: a lone client waits")

    def _swap(self, expected: int, record: Record | None) -> Record | None:
        before = self._standing
        if (before.version if before else 0) != expected:
            return before or GONE
        require(legal_moves(before, record, self._now_ms), "every accepted swap is a legal move")
        self._standing = record
        return None
