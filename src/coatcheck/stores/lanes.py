"""Lanes: the queue before one bulk call, on one event loop.

Beneath `looped.py`. Invariants: every call is answered, or given up where it was cancelled on its
way; no more batches are on their way than there are lanes; nobody waits for a lane that is stuck
while another is free, but who asks for a record that is on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Generic, TypeAlias, TypeVar

from coatcheck.core.flow import Flow
from coatcheck.core.record import Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores.batching import BATCH_MAX, Answers, Bulk, apart, next_round, unknown_outcome
from coatcheck.stores.prompt import Prompt

T = TypeVar("T")
# What takes the last lane is at least this part of what is on its way: a few late ones would take
# as long as all of them, and who comes back meanwhile would have to wait.
SHARE_MIN = 4
# 10 ms: longer than a batch takes where server and network are well, and less than anybody notices.
# What has been away for longer may be stuck, and is not waited for.
PROMPT_S_MAX = 0.01

Future: TypeAlias = "asyncio.Future[Sequence[Record | None]]"
# Who waits, and what is asked for. A plain tuple, for one is made for every call.
Call: TypeAlias = tuple[Future, Sequence[T]]
Batch: TypeAlias = list[Call[T]]


class Lanes(Generic[T]):
    """
    The queue before one bulk call, on one event loop.

    A busy one looks who waits when the loop has gone once through all that was ready: so it finds
    everybody who came in this turn. Who is alone is sent at once.

    Args:
        loop: whose queue it is.
        call: the bulk call.
        split: the next batch and who stays, given who waits, a limit, and what is on its way.
        lanes: how many batches may be on their way at once.
        give_up: what becomes of a call that was cancelled on its way, or whose loop has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        call: Callable[[Sequence[T]], Awaitable[Sequence[Record | None]]],
        split: Callable[[Batch[T], int, list[Batch[T]]], tuple[Batch[T], Batch[T]]],
        *,
        lanes: int,
        give_up: Callable[[Call[T]], None],
    ) -> None:
        self._loop = loop
        self._call = call
        self._split = split
        self._lanes = lanes
        self._give_up = give_up
        self._waiting: Batch[T] = []
        self._away: list[Batch[T]] = []  # the batches that are on their way
        self._slow: list[Batch[T]] = []  # those of them that may be stuck
        self._is_timed = False  # we shall look which are
        self._is_busy = False  # the last batch was not for one caller alone
        self._looking: asyncio.Handle | None = None  # we shall look at the end of this turn
        self._is_closed = False
        self._idle: asyncio.Event | None = None  # whoever closes waits for it

    def put(self, asks: Sequence[T]) -> Future:
        """Ask; after closing nothing can be asked, where it would wait for ever."""
        if self._is_closed:
            raise StoreUnavailable("the store is closed")
        future: Future = asyncio.Future(loop=self._loop)
        if not asks:
            future.set_result([])
            return future
        if not self._away and not self._waiting and not self._is_busy:
            self._send([(future, asks)])
            return future
        self._waiting.append((future, asks))
        if self._looking is None and len(self._away) < self._lanes:
            if self._is_busy:
                self._look_soon()
            else:
                self._look()
        return future

    def _look_soon(self) -> None:
        """After everybody who was woken before this."""
        if self._looking is not None:
            self._looking.cancel()
        self._looking = self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Send whoever waits, as far as there are lanes."""
        self._looking = None
        while len(self._away) < self._lanes and (batch := self._next_batch()):
            self._is_busy = len(batch) > 1
            self._send(batch)

    def _next_batch(self) -> Batch[T]:
        """An equal part for each lane of what waits and what is on its way."""
        if not self._waiting:
            return []
        waiting, away = _count_of(self._waiting), sum(map(_count_of, self._away))
        is_last = len(self._away) + 1 == self._lanes
        if is_last and SHARE_MIN * waiting < away - sum(map(_count_of, self._slow)):
            if not self._is_timed:
                self._is_timed = True
                self._loop.call_later(PROMPT_S_MAX, self._look_who_is_slow, [*self._away])
            return []
        limit = min(BATCH_MAX, -(-(waiting + away) // self._lanes))
        batch, self._waiting = self._split(self._waiting, limit, self._away)
        return batch

    def _look_who_is_slow(self, away: list[Batch[T]]) -> None:
        """Those of *away* that still are; nobody waits for them any more."""
        self._is_timed = False
        self._slow = [batch for batch in away if batch in self._away]
        self._look()

    def _send(self, batch: Batch[T]) -> None:
        self._away.append(batch)
        self._ask(batch[0][1] if len(batch) == 1 else _all_of(batch), partial(self._hear, batch))

    def _ask(self, asks: Sequence[T], hear: Callable[[Future], None]) -> None:
        try:
            answer = self._call(asks)
        except StopIteration as error:  # no future takes it
            answer = _failed(self._loop, RuntimeError(*error.args))
        except BaseException as error:
            answer = _failed(self._loop, error)
            if not isinstance(error, Exception):
                answer.add_done_callback(hear)
                raise
        if isinstance(answer, Prompt):
            answer.tell(hear)
        else:
            asyncio.ensure_future(answer).add_done_callback(hear)

    def _hear(self, batch: Batch[T], answer: Future) -> None:
        """The answer has come."""
        if not answer.cancelled() and answer.exception() is None:
            results = answer.result()
            if len(results) == _count_of(batch):
                _give_back(batch, results, ())
                self._free(batch)
                return
        flow = apart(_all_of(batch))
        next(flow)
        self._hear_trouble(batch, flow, answer)

    def _hear_trouble(self, batch: Batch[T], flow: Flow[Answers], answer: Future) -> None:
        """The flow decides who is asked for again, alone, and in the end what each is told."""
        try:
            error = answer.exception()
            effect = flow.send(answer.result()) if error is None else flow.throw(error)
        except StopIteration as done:
            _give_back(batch, *done.value)
        except asyncio.CancelledError:
            for ask in batch:
                self._give_up(ask)
        except BaseException as interruption:  # noqa: BLE001 - told to whoever asked
            for ask in batch:
                refuse(ask, interruption)
        else:
            assert isinstance(effect, Bulk)
            self._ask(effect.asks, partial(self._hear_trouble, batch, flow))
            return
        self._free(batch)

    def _free(self, batch: Batch[T]) -> None:
        """*batch* is back; those who were in it will ask again in the next turn, so wait for it."""
        self._away.remove(batch)
        if batch in self._slow:
            self._slow.remove(batch)
        if self._waiting:
            self._look_soon()
        elif self._idle is not None and not self._away:
            self._idle.set()

    async def close(self) -> None:
        """Finish what is queued."""
        self._is_closed = True
        if self._away or self._waiting:
            self._idle = asyncio.Event()
            await self._idle.wait()

    def abandon(self) -> None:
        """The loop is closed."""
        self._is_closed = True
        for ask in [*chain.from_iterable(self._away), *self._waiting]:
            self._give_up(ask)
        self._waiting = []


def _failed(loop: asyncio.AbstractEventLoop, error: BaseException) -> Future:
    """As if *error* had come later."""
    answer: Future = loop.create_future()
    answer.set_exception(error)
    return answer


def _all_of(batch: Batch[T]) -> list[T]:
    return [one for _, asks in batch for one in asks]


def _count_of(batch: Batch[T]) -> int:
    return sum([len(asks) for _, asks in batch])


def _give_back(
    batch: Batch[T], results: Sequence[Record | None], errors: Sequence[Exception | None]
) -> None:
    has_errors = any(errors)
    start = 0
    for future, asks in batch:
        end = start + len(asks)
        if future.done():  # its caller was cancelled
            pass
        elif has_errors and (error := next(filter(None, errors[start:end]), None)):
            future.set_exception(error)
        else:
            future.set_result(results[start:end])
        start = end


def refuse(ask: Call[T], interruption: BaseException | None = None) -> None:
    """Say that it was interrupted to whoever still waits."""
    future, _ = ask
    if not future.done() and not future.get_loop().is_closed():
        future.set_exception(unknown_outcome(interruption))


def by_id(
    waiting: Batch[Swap], limit: int, away: list[Batch[Swap]]
) -> tuple[Batch[Swap], Batch[Swap]]:
    """Swaps: nobody who asks for a record that is on its way."""
    taken = {swap.id for batch in away for _, swaps in batch for swap in swaps}
    ids = [swap.id for _, swaps in waiting for swap in swaps]
    # Nearly always everybody asks for one record, and each for another.
    if len(ids) == len(waiting) == len(set(ids)) and taken.isdisjoint(ids):
        return waiting[:limit], waiting[limit:]
    return next_round(waiting, _swaps_of, limit, taken)


_swaps_of = itemgetter(1)


def in_order(waiting: Batch[T], limit: int, _away: list[Batch[T]]) -> tuple[Batch[T], Batch[T]]:
    """Reads: as they came."""
    return waiting[:limit], waiting[limit:]
