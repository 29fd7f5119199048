"""The rules: what must hold in every state, whatever the adversary does.

They know the store, the clock and the table of legal moves, and repeat no decision of the flow.
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

# More than any client alone needs: claim, lose, read, take over, reconcile, execute, end.
PROBE_EFFECTS_MAX = 10
# Refusals after which a key may stay as it is: an operator has to look at it.
SETTLED_CODES = {"outcome-unknown", "result-unavailable"}


class Violation(AssertionError):
    """A promise was broken."""


def require(holds: object, promise: str) -> None:
    """*promise* is kept, or the exploration ends here."""
    if not holds:
        raise Violation(promise)


# --- what the store accepts -------------------------------------------------------------------


def accepted(scenario: Scenario, world: World, number: int, record: Record) -> Past:
    """Client *number* has replaced the current record with *record*."""
    before, past = world.record, world.past
    require(legal_moves(before, record, world.now_ms), "every accepted swap is a legal move")
    require(record.version > past.version_max, "versions only grow, also across generations")
    nonce = scenario.atlases[number].nonce
    if before is not None and record.state != RUNNING:
        is_in_doubt = record.state == IN_DOUBT and is_lease_over(before, world.now_ms)
        require(before.nonce == nonce or is_in_doubt, "only its holder ends an attempt")
    if before is not None and before.created_ms == record.created_ms:
        _check_generation(before, record)
    if record.state == RUNNING:
        own = scenario.kinds[number].fingerprint
        require(record.fingerprint == own, "a claim is for the request of its client")
    if record.state in (FAILED, IN_DOUBT) and before is not None and before.nonce == nonce:
        past = _ended(scenario, world, number, record)
    return past._replace(version_max=record.version)


def _check_generation(before: Record, record: Record) -> None:
    times = before.window_until_ms == record.window_until_ms
    require(
        times and before.expires_ms == record.expires_ms, "the times of a generation are set once"
    )
    is_same = record.fingerprint == before.fingerprint
    is_open = before.fingerprint == b"" or (record.state == FAILED and record.fingerprint == b"")
    require(is_same or is_open, "another request never continues a generation")
    is_next = record.state == RUNNING and record.nonce != before.nonce
    require(record.attempt == before.attempt + is_next, "attempts are counted one by one")


def _ended(scenario: Scenario, world: World, number: int, record: Record) -> Past:
    """An execution has ended without a final answer, and its own client has written that."""
    outcome = world.clients[number].place.outcome
    is_known = isinstance(outcome, Outcome) and outcome.kind in (
        OutcomeKind.RELEASE,
        OutcomeKind.REJECT,
    )
    is_clear = is_known or scenario.kinds[number].policy.recovery == "retry"
    require(is_clear or record.state == IN_DOUBT, "an attempt with an unclear end is not released")
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
    is_gone = client.is_over and client.place.answer is None
    require(
        is_asked or is_gone,
        "a late write does not change the record of a client that has continued",
    )


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
            is_over = client.lease_until_ms <= world.now_ms
            require(is_over, "executions overlap only after a lease ran out")
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
            place.trust == claim,
            "reconcile: nothing runs again before the reconcile function was called",
        )
    return past._replace(executions=tuple(sorted((*past.executions, (*attempt, RUNNING)))))


def _is_executing(client: Client) -> bool:
    return not client.is_over and isinstance(client.place.asks, Execute)


def reconciled(past: Past, claim: Record) -> Past:
    """A reconcile function has answered that nothing before *claim* happened."""
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
            require(is_own, "no client gets the answer to another request")
            require(record.state == COMPLETED, "only final answers are replayed")
            return _final(world, record.created_ms, response)
        case Refuse():
            _refused(scenario, world, number, place)
    return world.past


def _executed(world: World, number: int, place: Place, claim: Record) -> Past:
    current = world.record
    assert isinstance(place.outcome, Outcome)
    if place.sent is GONE:  # it was paused for its whole retention
        return world.past
    is_kept = place.outcome.kind is OutcomeKind.COMPLETE
    if current is not None and current.created_ms == claim.created_ms:
        is_safe = current.state == COMPLETED and current.response == place.outcome.response
        is_open = current.state != COMPLETED and current.nonce != claim.nonce
        is_open = is_open or current.state in (FAILED, IN_DOUBT)
        require(is_safe if is_kept else is_open, "an answer leaves after its record is safe")
    if not is_kept:
        return world.past
    return _final(world, claim.created_ms, place.outcome.response or number)


def _final(world: World, generation: int, response: object) -> Past:
    past = world.past
    known = dict(past.finals).get(generation)
    if known is None:
        return past._replace(finals=(*past.finals, (generation, response)))
    require(known == response, "one generation has one final answer")
    return past


def _refused(scenario: Scenario, world: World, number: int, place: Place) -> None:
    client, current = world.clients[number], world.record
    nonce = scenario.atlases[number].nonce
    holds = current is not None and current.state == RUNNING and current.nonce == nonce
    require(not holds, "a client that is refused holds no claim")
    if place.claim is not None:
        is_lost = isinstance(place.sent, Record) and place.sent.nonce != nonce
        require(is_lost, "a client that is refused ran nothing, unless it lost its claim")
    elif place.trust is None and not client.has_lost:
        require(not client.has_claimed, "a waiter that gives up has changed nothing")


# --- what comes after -------------------------------------------------------------------------


def check_progress(scenario: Scenario, world: World) -> None:
    """If all clients were gone now, a new one would succeed once the lease is over."""
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
    answer = run(lifecycle(request, kind.policy), Alone(record, now_ms))
    if not isinstance(answer, Refuse):
        return
    code = answer.problem.code
    if code == "key-expired":  # refused while retention lasts
        assert record is not None
        require(now_ms < record.expires_ms, "a key expires once")
        _probe(scenario, record, record.expires_ms)
    else:
        require(code in SETTLED_CODES, f"a key is never stuck: {code}")


class Alone:
    """Performs the effects of a client that is alone with *current*."""

    def __init__(self, current: Record | None, now_ms: int) -> None:
        self.current = current
        self._now_ms = now_ms
        self._count = 0

    def __call__(self, effect: object) -> object:
        self._count += 1
        require(
            self._count <= PROBE_EFFECTS_MAX, "a key is never stuck: a lone client does not end"
        )
        match effect:
            case Swap(_, expected, record):
                return self._swap(expected, record)
            case Execute():
                return Outcome(OutcomeKind.COMPLETE, b"probed")
            case Reconcile():
                return Outcome(OutcomeKind.RELEASE)
        raise Violation("a key is never stuck: a lone client waits")

    def _swap(self, expected: int, record: Record | None) -> Record | None:
        before = self.current
        if (before.version if before else 0) != expected:
            return before or GONE
        require(legal_moves(before, record, self._now_ms), "every accepted swap is a legal move")
        self.current = record
        return None
