"""The world: one record, one clock, some clients, and everything that can happen next.

The store is the contract's compare-and-swap. Clients do what the engines do: they repeat an
ambiguous swap once and recognise their own record, they wait and read, and they renew while they
execute. The adversary chooses the client that moves. As often as the budget allows, it crashes a
client, loses an acknowledgement, loses a message or delivers it late, lets time pass, makes
handlers fail, and sweeps. A paused client is one that is not chosen.

The adversary may not let a whole retention pass between the moment at which a client reads the
clock and its claim. Versions of a new generation start from the clock, so such a claim could repeat
a version. The shortest retention is a lease, and requests are not that slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Execute, Reconcile, Snapshot, WaitForChange, lifecycle
from coatcheck.core.policy import Policy
from coatcheck.core.record import (
    GONE,
    RUNNING,
    Record,
    State,
    Swap,
    is_retention_over,
    is_same_attempt,
    is_same_write,
    renewed,
)
from coatcheck.errors import StoreUnavailable

from . import rules
from .places import Atlas, HandlerError, Kind, Place, Raised, ServeFlow

NOW_MS = 1_000_000_000


class Budget(NamedTuple):
    """How often the adversary may still do each thing."""

    crashes: int = 0
    unacknowledged: int = 0  # a swap takes effect, but its acknowledgement is lost
    losses: int = 0  # a swap is lost on its way, or arrives late, at any later time
    renewals: int = 0
    expiries: int = 0  # a lease's time passes
    ticks: int = 0  # a waiter's time passes
    windows: int = 0  # time passes to the end of the window
    retentions: int = 0  # time passes to the end of retention
    failures: int = 0  # executions that end without an answer to keep
    crowds: int = 0  # a waiter is one too many


class Client(NamedTuple):
    """One client: the place of its flow, and what its engine knows."""

    place: Place
    has_tried: bool = False  # its swap was sent once, and the answer was lost
    looked: Record | None = None  # what a waiter has read and not yet acted upon
    held: Record | None = None  # the claim as its heartbeat knows it
    renewal: tuple[int, Record] | None = None  # on its way: expected version, record
    # Known only to the explorer: until when its claim lasts in the store, and what it wrote.
    lease_until_ms: int = 0
    has_claimed: bool = False
    has_lost: bool = False  # something it wrote was lost on its way, or its acknowledgement
    is_over: bool = False  # it has its answer, or crashed


class Past(NamedTuple):
    """What has happened and is no longer in the store; only the rules read it."""

    version_max: int = 0
    leases_over: int = 0  # how often time passed the end of a lease, or may have
    # (generation, attempt, how it ended: RUNNING until its client has written that)
    executions: tuple[tuple[int, int, State], ...] = ()
    finals: tuple[tuple[int, object], ...] = ()  # (generation, the final answer a client got)


class World(NamedTuple):
    """One state of everything."""

    now_ms: int
    record: Record | None
    clients: tuple[Client, ...]
    late: tuple[tuple[int, int, Record], ...]  # lost on their way: client, expected, record
    left: Budget
    past: Past


Step = tuple[tuple[Any, ...], World]

# The place of every client whose history no longer matters.
OVER = Place(Kind(Policy()))

FAILURES: tuple[Outcome | Raised, ...] = (
    Raised(HandlerError),
    Outcome(OutcomeKind.COMPLETE, None),  # done, but too large to keep
    Outcome(OutcomeKind.RELEASE),
    Outcome(OutcomeKind.REJECT),
)


@dataclass
class Scenario:
    """The clients, what may go wrong, and which flow and engine are under test."""

    kinds: tuple[Kind, ...]
    budget: Budget
    failures: tuple[Outcome | Raised, ...] = FAILURES
    lifecycle: ServeFlow = lifecycle
    # Switches that break the engine or the store on purpose, for the mutants.
    recognises_own: bool = True
    compares_versions: bool = True
    atlases: tuple[Atlas, ...] = field(init=False)
    probes: dict[Any, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.atlases = tuple(Atlas(n, kind, self.lifecycle) for n, kind in enumerate(self.kinds))

    def start(self) -> World:
        """Nothing has happened yet."""
        clients = tuple(Client(atlas.start) for atlas in self.atlases)
        return World(NOW_MS, None, clients, (), self.budget, Past())


def steps(scenario: Scenario, world: World) -> list[Step]:
    """Everything that can happen next."""
    rules.check_progress(scenario, world)
    found: list[Step] = []
    for number, client in enumerate(world.clients):
        found += _moves(scenario, world, number, client)
    if not found and any(not client.is_over for client in world.clients):
        found.append((("time passes",), _at(world, _next_wake_ms(world))))
    found += _heartbeats(scenario, world)
    found += _adversary(scenario, world)
    return found


# --- clients ----------------------------------------------------------------------------------


def _moves(scenario: Scenario, world: World, number: int, client: Client) -> Iterator[Step]:
    if client.is_over:
        return
    asks = client.place.asks
    if asks is None:
        if _is_next_to_arrive(scenario, world, number):
            yield (number, "arrives"), _resume(scenario, world, number, world.now_ms)
    elif isinstance(asks, Swap):
        yield from _swaps(scenario, world, number, asks)
    elif isinstance(asks, WaitForChange):
        yield from _watches(scenario, world, number, asks)
    elif isinstance(asks, Execute):
        yield from _endings(scenario, world, number)
    else:
        assert isinstance(asks, Reconcile)
        for sent in _reconcile_answers(number):
            yield (number, "reconciles", sent.kind.name), _resume(scenario, world, number, sent)


def _is_next_to_arrive(scenario: Scenario, world: World, number: int) -> bool:
    """Of clients that differ only in their number, the lower one arrives first."""
    return not any(
        scenario.kinds[before] == scenario.kinds[number]
        and world.clients[before].place is scenario.atlases[before].start
        for before in range(number)
    )


def _swaps(scenario: Scenario, world: World, number: int, swap: Swap) -> Iterator[Step]:
    assert swap.record is not None
    after, lost = _swapped(scenario, world, number, swap.expected, swap.record)
    if scenario.recognises_own and lost is not None and is_same_write(lost, swap.record):
        lost = None
    verb = "loses" if lost is not None else "writes"
    yield (number, verb, swap.record), _resume(scenario, after, number, lost)
    if lost is None and world.left.unacknowledged:
        after = after._replace(left=_spent(world.left, unacknowledged=1))
        yield (
            (number, "writes unacknowledged", swap.record),
            _unacknowledged(scenario, after, number),
        )
    if world.left.losses:
        late = (*world.late, (number, swap.expected, swap.record))
        after = world._replace(late=late, left=_spent(world.left, losses=1))
        yield (number, "writes to nowhere", swap.record), _unacknowledged(scenario, after, number)


def _unacknowledged(scenario: Scenario, world: World, number: int) -> World:
    """The store did not answer: the client repeats the swap once, and then gives up."""
    client = world.clients[number]
    after = _with(world, number, client._replace(has_tried=True, has_lost=True))
    if client.has_tried:
        return _resume(scenario, after, number, Raised(StoreUnavailable))
    return after


def _watches(scenario: Scenario, world: World, number: int, watch: WaitForChange) -> Iterator[Step]:
    client = world.clients[number]
    current = client.looked or world.record or GONE
    is_woken = current.version != watch.version or watch.until_ms <= world.now_ms
    if client.looked is not None or is_woken:
        seen = Snapshot(current, world.now_ms)
        yield (number, "sees", current), _resume(scenario, world, number, seen)
    if client.looked is None and is_woken and _may_pass(world.left):  # while time may pass
        yield (number, "looks"), _with(world, number, client._replace(looked=current))
    if world.left.crowds and watch.until_ms > world.now_ms:
        after = world._replace(left=_spent(world.left, crowds=1))
        yield (number, "is one waiter too many"), _resume(scenario, after, number, None)


def _endings(scenario: Scenario, world: World, number: int) -> Iterator[Step]:
    done = Outcome(OutcomeKind.COMPLETE, b"by %d" % number)
    yield (number, "executed"), _resume(scenario, world, number, done)
    if world.left.failures:
        after = world._replace(left=_spent(world.left, failures=1))
        for outcome in scenario.failures:
            yield (number, "executed", outcome), _resume(scenario, after, number, outcome)


def _reconcile_answers(number: int) -> tuple[Outcome, ...]:
    """What a reconcile function may answer; if it happened, with a response of its own."""
    return (
        Outcome(OutcomeKind.COMPLETE, b"found by %d" % number),
        Outcome(OutcomeKind.RELEASE),
        Outcome(OutcomeKind.IN_DOUBT),
    )


def _resume(scenario: Scenario, world: World, number: int, sent: Any) -> World:
    """Send a result to the client, which runs to its next effect or its answer."""
    now_ms, record, clients, late, left, past = world
    client = clients[number]
    asked = client.place.asks
    place = scenario.atlases[number].after(client.place, sent)
    asks, held = place.asks, None
    if isinstance(asked, Reconcile) and sent.kind is OutcomeKind.RELEASE:
        past = rules.reconciled(past, asked.claim)
        world = world._replace(past=past)
    if isinstance(asks, (Execute, Reconcile)):
        held = asks.claim
        if isinstance(asks, Execute):
            past = rules.begun(scenario, world, number, place)
    elif asks is None:
        past = rules.answered(scenario, world, number, place)
        client = _ended(world, number, place)
    if asks is not None:
        lease_until_ms = client.lease_until_ms if place.claim is None else 0
        client = Client(
            *(place, False, None, held, client.renewal, lease_until_ms),
            *(client.has_claimed, client.has_lost),
        )
    clients = (*clients[:number], client, *clients[number + 1 :])
    return World(now_ms, record, clients, late, left, past)


def _ended(world: World, number: int, place: Place) -> Client:
    """Forget the history of a client that is over, unless a message of it is still on its way."""
    is_late = bool(world.late) and any(late[0] == number for late in world.late)
    kept = place if is_late else OVER
    return Client(kept, renewal=world.clients[number].renewal, is_over=True)


def _swapped(
    scenario: Scenario, world: World, number: int, expected: int, record: Record
) -> tuple[World, Record | None]:
    """Apply a swap as the store does, and check the rules for what it accepts."""
    current = world.record
    version = 0 if current is None else current.version
    blind = not scenario.compares_versions and record.state != RUNNING and current is not None
    if version != expected and not blind:
        return world, GONE if current is None else current
    past = rules.accepted(scenario, world, number, record)
    client = world.clients[number]
    clients = world.clients
    if record.state == RUNNING and not client.is_over:
        client = client._replace(lease_until_ms=record.lease_until_ms, has_claimed=True)
        clients = (*clients[:number], client, *clients[number + 1 :])
    return World(world.now_ms, record, clients, world.late, world.left, past), None


# --- heartbeats -------------------------------------------------------------------------------


def _heartbeats(scenario: Scenario, world: World) -> Iterator[Step]:
    for number, client in enumerate(world.clients):
        if client.renewal is not None:
            yield from _renewals(scenario, world, number, client.renewal)
        elif client.held is not None and world.left.renewals:
            lease_ms = scenario.kinds[number].policy.lease_ms
            renewal = renewed(client.held, world.now_ms + lease_ms)
            beating = client._replace(renewal=(client.held.version, renewal))
            after = _with(world, number, beating)
            yield (number, "sends a renewal"), after._replace(left=_spent(world.left, renewals=1))


def _renewals(
    scenario: Scenario, world: World, number: int, renewal: tuple[int, Record]
) -> Iterator[Step]:
    """A renewal arrives, perhaps long after the handler ended; see `Heartbeat._renew`."""
    expected, record = renewal
    after, lost = _swapped(scenario, world, number, expected, record)
    client = after.clients[number]._replace(renewal=None)
    if lost is None and world.left.unacknowledged:
        unacknowledged = _with(after, number, client)._replace(
            left=_spent(world.left, unacknowledged=1)
        )
        yield (number, "renews unacknowledged"), unacknowledged
    held = client.held
    if held is not None:
        if lost is None or is_same_write(lost, record):
            held = record
        else:
            held = lost if is_same_attempt(lost, held) else None
        client = client._replace(held=held)
    yield (number, "renews", lost is None), _with(after, number, client)


# --- the adversary ----------------------------------------------------------------------------


def _adversary(scenario: Scenario, world: World) -> Iterator[Step]:
    for index in range(len(world.late)):
        yield _arrives_late(scenario, world, index)
    if world.record is not None and is_retention_over(world.record, world.now_ms):
        yield ("sweep",), world._replace(record=None)
    if all(client.is_over for client in world.clients):
        return
    if world.left.crashes:
        after = world._replace(left=_spent(world.left, crashes=1))
        for number, client in enumerate(world.clients):
            if not client.is_over:
                dead = _ended(world, number, client.place)
                yield (number, "crashes"), _with(after, number, dead)
    yield from _times(scenario, world)


def _arrives_late(scenario: Scenario, world: World, index: int) -> Step:
    number, expected, record = world.late[index]
    rest = world._replace(late=world.late[:index] + world.late[index + 1 :])
    after, lost = _swapped(scenario, rest, number, expected, record)
    if lost is None:
        rules.check_late(world, number, record)
    client = after.clients[number]
    if client.is_over:
        after = _with(after, number, _ended(after, number, client.place))
    return (number, "writes late" if lost is None else "is too late"), after


def _times(scenario: Scenario, world: World) -> Iterator[Step]:
    left, policy = world.left, scenario.kinds[0].policy
    if left.ticks:
        after = _at(world, world.now_ms + policy.wait_ms)
        yield ("a wait passes",), after._replace(left=_spent(left, ticks=1))
    if left.expiries:
        after = _at(world, world.now_ms + policy.lease_ms, leases_over=1)
        yield ("a lease passes",), after._replace(left=_spent(left, expiries=1))
    if world.record is None:
        return
    if left.windows and world.record.window_until_ms > world.now_ms:
        after = _at(world, world.record.window_until_ms, leases_over=1)
        yield ("the window passes",), after._replace(left=_spent(left, windows=1))
    if left.retentions and world.record.expires_ms > world.now_ms and not _is_claiming(world):
        after = _at(world, world.record.expires_ms, leases_over=1)
        yield ("retention passes",), after._replace(left=_spent(left, retentions=1))


def _is_claiming(world: World) -> bool:
    """A client has read the clock, and its claim is not written yet."""
    return any(
        isinstance(client.place.asks, Swap) and client.place.claim is client.place.trust is None
        for client in world.clients
        if not client.is_over
    ) or any(record.state == RUNNING for _, _, record in world.late)


def _at(world: World, now_ms: int, *, leases_over: int = 0) -> World:
    record = world.record
    if record is not None and record.state == RUNNING and not leases_over:
        leases_over = world.now_ms < record.lease_until_ms <= now_ms
    past = world.past._replace(leases_over=world.past.leases_over + leases_over)
    return world._replace(now_ms=now_ms, past=past)


def _next_wake_ms(world: World) -> int:
    asks = (client.place.asks for client in world.clients if not client.is_over)
    return min(watch.until_ms for watch in asks if isinstance(watch, WaitForChange))


def _with(world: World, number: int, client: Client) -> World:
    now_ms, record, clients, late, left, past = world
    clients = (*clients[:number], client, *clients[number + 1 :])
    return World(now_ms, record, clients, late, left, past)


def _may_pass(left: Budget) -> bool:
    return bool(left.expiries or left.ticks or left.windows or left.retentions)


def _spent(left: Budget, **amounts: int) -> Budget:
    return left._replace(**{name: getattr(left, name) - n for name, n in amounts.items()})
