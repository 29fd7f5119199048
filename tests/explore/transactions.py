"""The world of transaction mode: a database with locks, and clients that may crash (L9).

One record and its effects, visible to others only after the commit. A claim locks the row until its
transaction ends, so that a duplicate waits, or times out. The adversary crashes clients, loses the
answer to a commit or the commit itself, makes handlers fail or refuse, and lets time pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from coatcheck.core.flow import Flow
from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.lifecycle import Answer, Execute, Executed, Replay, Snapshot, WaitForChange
from coatcheck.core.record import COMPLETED, GONE, Record, Swap
from coatcheck.core.transaction import Begin, Commit, Rollback
from coatcheck.errors import StoreUnavailable

from .places import Atlas, HandlerError, Kind, Place, Raised

NOW_MS = 1_000_000_000


class Budget(NamedTuple):
    """How often the adversary may still do each thing."""

    crashes: int = 0
    unsure: int = 0  # a commit whose answer is lost, or which is lost itself
    failures: int = 0
    refusals: int = 0  # a handler whose answer is kept and whose effect is undone
    ticks: int = 0  # a waiter's time passes
    windows: int = 0


class Client(NamedTuple):
    """One client: the place of its flow."""

    place: Place
    is_over: bool = False


class World(NamedTuple):
    """One state of everything."""

    now_ms: int
    record: Record | None
    effects: tuple[int, ...]  # the clients whose effects are committed, in their order
    holder: int | None  # the client with the open transaction
    claim: Record | None  # its write, which no other client sees yet
    clients: tuple[Client, ...]
    left: Budget


class TransactionScenario:
    """The clients, and what may go wrong; *locks* is False for a database that does not lock."""

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        budget: Budget,
        transact: Callable[..., Flow[Answer]],
        *,
        locks: bool = True,
    ) -> None:
        self.atlases = tuple(Atlas(n, kind, transact) for n, kind in enumerate(kinds))
        self.locks = locks
        clients = tuple(Client(atlas.start) for atlas in self.atlases)
        self.start = World(NOW_MS, None, (), None, None, clients, budget)

    def steps(self, world: World) -> Iterator[World]:
        """Everything that can happen next."""
        for number, client in enumerate(world.clients):
            if not client.is_over:
                yield from self._moves(world, number, client.place)
                if world.left.crashes:
                    yield self._crashed(world, number)
        if world.left.windows and world.record is not None and world.holder is None:
            left = world.left._replace(windows=world.left.windows - 1)
            yield world._replace(now_ms=world.record.window_until_ms, left=left)

    def _moves(self, world: World, number: int, place: Place) -> Iterator[World]:
        asks = place.asks
        if asks is None:
            yield self._resumed(world, number, world.now_ms)
        elif isinstance(asks, Begin):
            yield from self._begins(world, number, asks)
        elif isinstance(asks, Execute):
            yield self._resumed(world, number, _done_by(number))
            if world.left.refusals:
                after = world._replace(left=world.left._replace(refusals=world.left.refusals - 1))
                yield self._resumed(after, number, _refused_by(number))
            if world.left.failures:
                after = world._replace(left=world.left._replace(failures=world.left.failures - 1))
                yield self._resumed(after, number, Raised(HandlerError))
                yield self._resumed(after, number, Outcome(OutcomeKind.RELEASE))
        elif isinstance(asks, Commit):
            yield from self._commits(world, number, asks)
        elif isinstance(asks, Rollback):
            yield self._resumed(world._replace(holder=None, claim=None), number, None)
        elif isinstance(asks, Swap):
            yield self._swaps(world, number, asks)
        else:
            assert isinstance(asks, WaitForChange)
            yield from self._watches(world, number, asks)

    def _begins(self, world: World, number: int, begin: Begin) -> Iterator[World]:
        swap = begin.swap
        assert swap.record is not None
        if world.holder is not None and self.locks:  # waits, and may time out
            if world.left.ticks:
                left = world.left._replace(ticks=world.left.ticks - 1)
                later = world._replace(now_ms=max(world.now_ms, begin.until_ms), left=left)
                yield self._resumed(later, number, swap.record._replace(nonce=-1))
            return
        current = 0 if world.record is None else world.record.version
        if current != swap.expected:
            yield self._resumed(world, number, world.record or GONE)
        else:
            opened = world._replace(holder=number, claim=swap.record)
            yield self._resumed(opened, number, None)

    def _commits(self, world: World, number: int, commit: Commit) -> Iterator[World]:
        closed = world._replace(holder=None, claim=None)
        assert commit.swap.record is not None
        effects = world.effects if commit.undo else (*world.effects, number)
        done = closed._replace(record=commit.swap.record, effects=effects)
        yield self._resumed(done, number, None)
        if world.left.unsure:
            left = world.left._replace(unsure=world.left.unsure - 1)
            yield self._resumed(done._replace(left=left), number, Raised(StoreUnavailable))
            yield self._resumed(closed._replace(left=left), number, Raised(StoreUnavailable))

    def _swaps(self, world: World, number: int, swap: Swap) -> World:
        """A write of its own, outside a transaction."""
        current = 0 if world.record is None else world.record.version
        if current != swap.expected:
            return self._resumed(world, number, world.record or GONE)
        return self._resumed(world._replace(record=swap.record), number, None)

    def _watches(self, world: World, number: int, watch: WaitForChange) -> Iterator[World]:
        current = world.record or GONE
        if current.version != watch.version:
            yield self._resumed(world, number, Snapshot(current, world.now_ms))
        elif world.left.ticks or watch.until_ms <= world.now_ms:
            left = world.left._replace(ticks=max(0, world.left.ticks - 1))
            later = world._replace(now_ms=max(world.now_ms, watch.until_ms), left=left)
            yield self._resumed(later, number, Snapshot(current, later.now_ms))

    def _crashed(self, world: World, number: int) -> World:
        """The process is gone, and its transaction with it."""
        if world.holder == number:
            world = world._replace(holder=None, claim=None)
        left = world.left._replace(crashes=world.left.crashes - 1)
        over = Client(world.clients[number].place, is_over=True)
        return _with(world._replace(left=left), number, over)

    def _resumed(self, world: World, number: int, sent: Any) -> World:
        place = self.atlases[number].after(world.clients[number].place, sent)
        return _with(world, number, Client(place, place.is_over))


def _with(world: World, number: int, client: Client) -> World:
    clients = (*world.clients[:number], client, *world.clients[number + 1 :])
    return world._replace(clients=clients)


def explored(scenario: TransactionScenario) -> int:
    """Check every state that can be reached; returns their number."""
    seen = {scenario.start}
    waiting = [scenario.start]
    while waiting:
        world = waiting.pop()
        _check(world, scenario.start.left)
        following = list(scenario.steps(world))
        assert following or all(client.is_over for client in world.clients), (
            "no client can continue"
        )
        fresh = {after for after in following if after not in seen}
        seen |= fresh
        waiting += fresh
    return len(seen)


def _check(world: World, budget: Budget) -> None:
    """What holds in every state."""
    generations = 1 + budget.windows - world.left.windows
    lost = budget.crashes - world.left.crashes + budget.unsure - world.left.unsure
    final = [n for n, client in enumerate(world.clients) if client.place.outcome in _finals(n)]
    refused = [n for n in final if world.clients[n].place.outcome == _refused_by(n)]
    assert len(final) <= generations + lost, "a handler that ran again after a final answer"
    assert len(world.effects) <= generations, "an effect that happened twice"
    assert not set(refused) & set(world.effects), "an effect of a refusal"
    if world.record is None:
        assert not world.effects, "an effect without its record"
    else:
        assert world.record.state == COMPLETED, "a record without its answer"
        given = [*map(_answer_of, world.effects[-1:]), *map(_refusal_of, refused)]
        assert world.record.response in given, "a record without its effect"
    for number, (place, _) in enumerate(world.clients):
        if isinstance(place.answer, Executed) and place.outcome == _done_by(number):
            assert number in world.effects, "a success that was never committed"
        if isinstance(place.answer, Replay):
            answers = [*map(_answer_of, world.effects), *map(_refusal_of, refused)]
            assert place.answer.response in answers, "a made-up answer"


def _answer_of(number: int) -> bytes:
    return b"by %d" % number


def _refusal_of(number: int) -> bytes:
    return b"refused by %d" % number


def _done_by(number: int) -> Outcome:
    return Outcome(OutcomeKind.COMPLETE, _answer_of(number))


def _refused_by(number: int) -> Outcome:
    return Outcome(OutcomeKind.COMPLETE, _refusal_of(number), status=402)


def _finals(number: int) -> tuple[Outcome, Outcome]:
    return _done_by(number), _refused_by(number)
