"""The world of steps, deferred work and operators (L6, L7, L10).

One record, one queue, the effects downstream, and the parties: clients whose handler takes steps or
defers its work, workers, operators, the background recovery. Each runs production flows
(`lifecycle`, `take`, `offer`, `run_deferred`, `resolve`, `rerun`, `recover`). No party waits, so
that worlds stay small. The adversary chooses the party that moves, crashes parties before or after
an effect, makes effects fail, renews a claim, and lets leases expire.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from coatcheck.core.deferred import DeferredToken
from coatcheck.core.flow import Effect
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Execute, Reconcile, Snapshot
from coatcheck.core.record import GONE, RUNNING, Record, Swap, is_same_write, renewed
from coatcheck.core.steps import Run
from coatcheck.errors import Misconfigured

from . import middle_rules as rules
from .places import Atlas, HandlerError, Kind, Place, Raised, ServeFlow

NOW_MS = 1_000_000_000

# The result of a step that cannot be stored.
UNKEPT = Misconfigured("neither JSON nor bytes")


@dataclass(frozen=True, slots=True)
class Now(Effect[int]):
    """Read the clock."""


@dataclass(frozen=True, slots=True)
class Look(Effect[Snapshot]):
    """Read the record and the clock."""


@dataclass(frozen=True, slots=True)
class Ask(Effect[Outcome]):
    """Ask downstream what the attempt of *claim*, and those before it, did."""

    claim: Record


@dataclass(frozen=True, slots=True)
class Put(Effect[None]):
    """Put *handed* on the queue."""

    handed: DeferredToken


@dataclass(frozen=True, slots=True)
class Take(Effect[DeferredToken]):
    """Receive a token from the queue; it stays there, to be delivered again."""


class Budget(NamedTuple):
    """How often the adversary may still do each thing."""

    crashes: int = 0
    failures: int = 0  # an effect that raises, and happened or not
    expiries: int = 0
    renewals: int = 0
    unkept: int = 0  # an effect whose result cannot be stored
    unacknowledged: int = (
        0  # a write takes effect, but its acknowledgement is lost, so it is repeated
    )


class Party(NamedTuple):
    """One participant: its flow, and which kind of client it is."""

    flow: ServeFlow
    kind: Kind
    is_operator: bool = False
    is_work: bool = False


class Client(NamedTuple):
    """The place of one party in its flow."""

    place: Place
    is_over: bool = False


class World(NamedTuple):
    """One state of everything."""

    now_ms: int
    record: Record | None
    effects: tuple[rules.Done, ...]  # in their order
    queue: tuple[DeferredToken, ...]
    clients: tuple[Client, ...]
    left: Budget
    past: rules.Past


class PartyScenario:
    """The parties, and what may go wrong."""

    def __init__(self, parties: tuple[Party, ...], budget: Budget) -> None:
        self.parties = parties
        self.atlases = tuple(Atlas(n, p.kind, p.flow) for n, p in enumerate(parties))
        clients = tuple(Client(atlas.start) for atlas in self.atlases)
        self.start = World(NOW_MS, None, (), (), clients, budget, rules.Past())

    def steps(self, world: World) -> Iterator[World]:
        """Everything that can happen next."""
        for number, client in enumerate(world.clients):
            if not client.is_over:
                yield from self._moves(world, number, client.place)
                if world.left.crashes and client.place.asks is not None:
                    yield _over(_spent(world, crashes=1), number)
        if world.left.expiries and world.record is not None:
            lease_ms = self.parties[0].kind.policy.lease_ms
            yield _spent(world._replace(now_ms=world.now_ms + lease_ms), expiries=1)
        yield from self._renewals(world)

    def _moves(self, world: World, number: int, place: Place) -> Iterator[World]:
        match place.asks:
            case None:
                if self._is_next_to_arrive(world, number):
                    yield self._resumed(world, number, world.now_ms)
            case Swap() as swap:
                yield from self._swaps(world, number, swap)
            case Run(name):
                yield from self._runs(world, number, name)
            case Take():
                for handed in dict.fromkeys(world.queue):
                    yield self._resumed(world, number, handed)
            case asks:
                yield self._answered(world, number, asks)

    def _answered(self, world: World, number: int, asks: Effect[Any]) -> World:
        """Perform an effect that has only one result."""
        match asks:
            case Execute(claim):
                is_work = self.parties[number].is_work
                past = rules.begun(world.past, claim, is_work=is_work)
                return self._resumed(world._replace(past=past), number, None)
            case Put(handed):
                return self._resumed(world._replace(queue=(*world.queue, handed)), number, None)
            case Look():
                return self._resumed(world, number, Snapshot(world.record or GONE, world.now_ms))
            case Ask(claim) | Reconcile(claim):
                return self._asked(world, number, claim)
        assert isinstance(asks, Now)
        return self._resumed(world, number, world.now_ms)

    def _is_next_to_arrive(self, world: World, number: int) -> bool:
        """Of parties that differ only in their number, the lower one arrives first."""
        return not any(
            self.parties[before] == self.parties[number]
            and world.clients[before].place is self.atlases[before].start
            for before in range(number)
        )

    def _swaps(self, world: World, number: int, swap: Swap) -> Iterator[World]:
        record, current = swap.record, world.record or GONE
        assert record is not None
        if current.version == swap.expected:
            past = rules.accepted(
                world.past,
                (world.record, record, world.now_ms),
                nonce=self.atlases[number].nonce,
                is_operator=self.parties[number].is_operator,
            )
            after = world._replace(record=record, past=past)
            yield self._resumed(after, number, None)
            if (
                world.left.unacknowledged
            ):  # the next one conflicts with this one, or with a later record
                yield _spent(after, unacknowledged=1)
        else:
            is_own = is_same_write(current, record)
            yield self._resumed(world, number, None if is_own else current)

    def _runs(self, world: World, number: int, name: str) -> Iterator[World]:
        claim = world.clients[number].place.claim
        assert claim is not None
        done = rules.Done(name, claim.created_ms, claim.attempt, number)
        reruns = self.parties[number].kind.policy.reruns
        is_once = name == "charge" or (name == "work" and not reruns)
        nonce = self.atlases[number].nonce
        past = rules.ran(world.past, done, world.record, nonce=nonce, is_once=is_once)
        ran = world._replace(effects=(*world.effects, done), past=past)
        yield self._resumed(ran, number, rules.answer_of(done))
        if world.left.failures:
            yield self._resumed(_spent(world, failures=1), number, Raised(HandlerError))
            yield self._resumed(_spent(ran, failures=1), number, Raised(HandlerError))
        if world.left.unkept:
            forgotten = ran._replace(past=rules.unkept(ran.past, done))
            yield self._resumed(_spent(forgotten, unkept=1), number, UNKEPT)
        if world.left.crashes:
            yield _over(_spent(ran, crashes=1), number)

    def _asked(self, world: World, number: int, claim: Record) -> World:
        """Downstream answers with the truth."""
        sent = Outcome(OutcomeKind.RELEASE)
        for done in world.effects:
            if done.generation == claim.created_ms and done.name != "reserve":
                sent = Outcome(OutcomeKind.COMPLETE, rules.answer_of(done))
        past = rules.asked(world.past, claim)
        return self._resumed(world._replace(past=past), number, sent)

    def _renewals(self, world: World) -> Iterator[World]:
        """The heartbeat of the party that holds the claim renews it."""
        record = world.record
        if record is None or record.state != RUNNING or not world.left.renewals:
            return
        lease_until_ms = world.now_ms + self.parties[0].kind.policy.lease_ms
        for number, client in enumerate(world.clients):
            is_held = client.place.claim is not None and not client.is_over
            if is_held and self.atlases[number].nonce == record.nonce:
                after = world._replace(record=renewed(record, lease_until_ms))
                yield _spent(after, renewals=1)

    def _resumed(self, world: World, number: int, sent: Any) -> World:
        place = self.atlases[number].after(world.clients[number].place, sent)
        past = world.past
        if place.answer is not None:
            past = rules.answered(past, place.answer, world.effects)
        client = Client(place, place.is_over)
        return _with(world._replace(past=past), number, client)


def _over(world: World, number: int) -> World:
    return _with(world, number, Client(world.clients[number].place, is_over=True))


def _with(world: World, number: int, client: Client) -> World:
    clients = (*world.clients[:number], client, *world.clients[number + 1 :])
    return world._replace(clients=clients)


def _spent(world: World, **amounts: int) -> World:
    left = {name: getattr(world.left, name) - n for name, n in amounts.items()}
    return world._replace(left=world.left._replace(**left))


def explored(scenario: PartyScenario) -> int:
    """Check every state that can be reached; returns their number, raises `Violation`."""
    seen = {scenario.start}
    waiting = [scenario.start]
    while waiting:
        world = waiting.pop()
        rules.check_progress(world.record, world.now_ms, scenario.parties[0].kind)
        fresh = {after for after in scenario.steps(world) if after not in seen}
        seen |= fresh
        waiting += fresh
    return len(seen)
