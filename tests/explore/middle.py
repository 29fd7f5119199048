"""The world of what happens in the middle: steps, work that is handed over, and people (L6, L7, L10).

One record, one queue, the ledger downstream, and everybody who may have a hand in it: clients whose
handler takes steps or hands over, workers, people, the background reconciler. Each is a flow made
of production's own (`lifecycle`, `take`, `offer`, `run_deferred`, `resolve`, `rerun`, `recover`); what a
handler does between them is here. Nobody waits for anybody, so that worlds stay small. The
adversary decides who moves, kills clients before or after an effect, makes effects fail, renews a
claim, and lets leases run out.
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

# What a step has returned of which nothing can be kept.
UNKEPT = Misconfigured("neither JSON nor bytes")


@dataclass(frozen=True, slots=True)
class Now(Effect[int]):
    """What time is it?"""


@dataclass(frozen=True, slots=True)
class Look(Effect[Snapshot]):
    """What stands, and when."""


@dataclass(frozen=True, slots=True)
class Ask(Effect[Outcome]):
    """Ask downstream what became of the attempt of *claim*, and of those before it."""

    claim: Record


@dataclass(frozen=True, slots=True)
class Put(Effect[None]):
    """Put *handed* on the queue."""

    handed: DeferredToken


@dataclass(frozen=True, slots=True)
class Take(Effect[DeferredToken]):
    """Be delivered what is on the queue; it stays there, to be delivered again."""


class Budget(NamedTuple):
    """How often the adversary may still do each thing."""

    crashes: int = 0
    failures: int = 0  # an effect that raises, and happened or not
    expiries: int = 0
    renewals: int = 0
    unkept: int = 0  # an effect whose result is none that could be kept
    deaf: int = 0  # a write that takes effect, and is made once more because nobody has heard of it


class Party(NamedTuple):
    """One of those who take part: what it does, and which kind of client it is."""

    flow: ServeFlow
    kind: Kind
    is_person: bool = False
    is_work: bool = False


class Client(NamedTuple):
    """Where one of them stands."""

    place: Place
    is_savepoint_gone: bool = False


class World(NamedTuple):
    """One state of everything."""

    now_ms: int
    record: Record | None
    effects: tuple[rules.Done, ...]  # in their order
    queue: tuple[DeferredToken, ...]
    clients: tuple[Client, ...]
    left: Budget
    past: rules.Past


class Errand:
    """Who takes part."""

    def __init__(self, parties: tuple[Party, ...], budget: Budget) -> None:
        self.parties = parties
        self.atlases = tuple(Atlas(n, p.kind, p.flow) for n, p in enumerate(parties))
        clients = tuple(Client(atlas.start) for atlas in self.atlases)
        self.start = World(NOW_MS, None, (), (), clients, budget, rules.Past())

    def steps(self, world: World) -> Iterator[World]:
        """Everything that can happen next."""
        for number, client in enumerate(world.clients):
            if not client.is_savepoint_gone:
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
                    yield self._told(world, number, world.now_ms)
            case Swap() as swap:
                yield from self._swaps(world, number, swap)
            case Run(name):
                yield from self._runs(world, number, name)
            case Take():
                for handed in dict.fromkeys(world.queue):
                    yield self._told(world, number, handed)
            case asks:
                yield self._answered(world, number, asks)

    def _answered(self, world: World, number: int, asks: Effect[Any]) -> World:
        """What has but one answer."""
        match asks:
            case Execute(claim):
                is_work = self.parties[number].is_work
                past = rules.begun(world.past, claim, is_work=is_work)
                return self._told(world._replace(past=past), number, None)
            case Put(handed):
                return self._told(world._replace(queue=(*world.queue, handed)), number, None)
            case Look():
                return self._told(world, number, Snapshot(world.record or GONE, world.now_ms))
            case Ask(claim) | Reconcile(claim):
                return self._asked(world, number, claim)
        assert isinstance(asks, Now)
        return self._told(world, number, world.now_ms)

    def _is_next_to_arrive(self, world: World, number: int) -> bool:
        """Of those that differ in nothing but their number, the lower one comes first."""
        return not any(
            self.parties[before] == self.parties[number]
            and world.clients[before].place is self.atlases[before].start
            for before in range(number)
        )

    def _swaps(self, world: World, number: int, swap: Swap) -> Iterator[World]:
        record, standing = swap.record, world.record or GONE
        assert record is not None
        if standing.version == swap.expected:
            past = rules.accepted(
                world.past,
                (world.record, record, world.now_ms),
                nonce=self.atlases[number].nonce,
                is_person=self.parties[number].is_person,
            )
            after = world._replace(record=record, past=past)
            yield self._told(after, number, None)
            if world.left.deaf:  # it is made again, and meets itself or what came meanwhile
                yield _spent(after, deaf=1)
        else:
            is_own = is_same_write(standing, record)
            yield self._told(world, number, None if is_own else standing)

    def _runs(self, world: World, number: int, name: str) -> Iterator[World]:
        claim = world.clients[number].place.claim
        assert claim is not None
        done = rules.Done(name, claim.created_ms, claim.attempt, number)
        reruns = self.parties[number].kind.policy.reruns
        is_once = name == "charge" or (name == "work" and not reruns)
        nonce = self.atlases[number].nonce
        past = rules.ran(world.past, done, world.record, nonce=nonce, is_once=is_once)
        ran = world._replace(effects=(*world.effects, done), past=past)
        yield self._told(ran, number, rules.answer_of(done))
        if world.left.failures:
            yield self._told(_spent(world, failures=1), number, Raised(HandlerError))
            yield self._told(_spent(ran, failures=1), number, Raised(HandlerError))
        if world.left.unkept:
            forgotten = ran._replace(past=rules.unkept(ran.past, done))
            yield self._told(_spent(forgotten, unkept=1), number, UNKEPT)
        if world.left.crashes:
            yield _over(_spent(ran, crashes=1), number)

    def _asked(self, world: World, number: int, claim: Record) -> World:
        """It answers with the truth; what comes after that is nobody's fault."""
        told = Outcome(OutcomeKind.RELEASE)
        for done in world.effects:
            if done.life == claim.created_ms and done.name != "reserve":
                told = Outcome(OutcomeKind.COMPLETE, rules.answer_of(done))
        past = rules.asked(world.past, claim)
        return self._told(world._replace(past=past), number, told)

    def _renewals(self, world: World) -> Iterator[World]:
        """Whoever holds the claim is alive, and its heart beats."""
        record = world.record
        if record is None or record.state != RUNNING or not world.left.renewals:
            return
        lease_until_ms = world.now_ms + self.parties[0].kind.policy.lease_ms
        for number, client in enumerate(world.clients):
            is_held = client.place.claim is not None and not client.is_savepoint_gone
            if is_held and self.atlases[number].nonce == record.nonce:
                after = world._replace(record=renewed(record, lease_until_ms))
                yield _spent(after, renewals=1)

    def _told(self, world: World, number: int, told: Any) -> World:
        place = self.atlases[number].after(world.clients[number].place, told)
        past = world.past
        if place.answer is not None:
            past = rules.answered(past, place.answer, world.effects)
        client = Client(place, place.is_savepoint_gone)
        return _with(world._replace(past=past), number, client)


def _over(world: World, number: int) -> World:
    return _with(world, number, Client(world.clients[number].place, is_savepoint_gone=True))


def _with(world: World, number: int, client: Client) -> World:
    clients = (*world.clients[:number], client, *world.clients[number + 1 :])
    return world._replace(clients=clients)


def _spent(world: World, **amounts: int) -> World:
    left = {name: getattr(world.left, name) - n for name, n in amounts.items()}
    return world._replace(left=world.left._replace(**left))


def explored(errand: Errand) -> int:
    """Every state that can be reached is right; how many they are. Raises `Violation`."""
    seen = {errand.start}
    waiting = [errand.start]
    while waiting:
        world = waiting.pop()
        rules.check_progress(world.record, world.now_ms, errand.parties[0].kind)
        fresh = {after for after in errand.steps(world) if after not in seen}
        seen |= fresh
        waiting += fresh
    return len(seen)
