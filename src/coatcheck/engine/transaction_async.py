"""One operation in one transaction of a lent connection, for async code (L9).

Differs from `engine/transaction.py` in the words that wait, and in that whoever waits may be
cancelled: then the transaction is ended all the same, before anybody hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from coatcheck.core.flow import Effect
from coatcheck.core.record import Record, Swap
from coatcheck.core.transact import Begin, Commit
from coatcheck.engine.together import IS_LAST, Together, closed_by_handler, ended_by_handler
from coatcheck.errors import CoatcheckError, StoreUnavailable
from coatcheck.lent import AsyncLent
from coatcheck.lent.contract import InTransaction
from coatcheck.lent.ending import to_the_end
from coatcheck.lent.source import borrow
from coatcheck.lent.trouble import Trouble

# 5 s: as long as a store waits for its database. What is not over then ends by itself.
END_S_MAX = 5.0


class AsyncTransaction(Together):
    """The transaction of one operation, and the connection it is on."""

    _lent: AsyncLent | None
    _until_ms = 0  # until when its claim may wait for a row

    def perform(self, effect: Effect[Any]) -> Awaitable[Record | None]:
        """Perform an effect of `core/transact.py`."""
        if isinstance(effect, Begin):
            return self._begin(effect)
        if isinstance(effect, Commit):
            return self._commit(effect.swap)
        return self._roll_back()

    async def abandon(self) -> None:
        """Undo what is not committed; nothing, where all is over."""
        if self._claimed is not None:
            try:
                await self._undo()
            finally:
                self._leave()

    async def _begin(self, begin: Begin) -> Record | None:
        swap, lost, is_won = begin.swap, None, False
        assert swap.record is not None
        self._until_ms = begin.until_ms
        if (standing := self._enter(swap.record)) is not None:
            return standing
        try:
            while not is_won and lost is None:
                trouble = await self._claim(begin)
                is_won = trouble is None
                if trouble is not None:
                    lost = self._rival_of(begin, trouble, await self._look(swap.id))
        finally:
            if not is_won:
                try:
                    await self._undo()
                finally:
                    self._leave(lost)
        return lost

    async def _claim(self, begin: Begin) -> Trouble | None:
        """Make the claim in a new transaction; None: it is made, and the transaction open."""
        for is_last in IS_LAST:
            try:
                lent, self._manager = await borrow(self.lender.source)
                statements = self._statements_of(begin, lent.dialect)
                claim = next(statements)
                self._lent = lent
                is_won = await lent.begin(claim) == 1
                while not is_won and (statement := next(statements, None)):
                    is_won = await lent.write(statement) == 1
            except CoatcheckError as error:
                await self._undo(error)
                raise
            except Exception as error:  # noqa: BLE001 - told what it means, or raised
                await self._undo()
                trouble = self._trouble_of(error, is_last=is_last)
                if trouble in (Trouble.HELD, Trouble.TAKEN):
                    return trouble
            else:
                if is_won:
                    return None
                await self._undo()
                return Trouble.TAKEN
        raise AssertionError  # the last try has returned or raised

    async def _commit(self, swap: Swap) -> None:
        lent, claim = self._lent, self._claimed
        assert lent is not None
        assert claim is not None
        try:
            if lent.is_closed():
                raise closed_by_handler()
            if not await lent.end(self.lender.ledger.change(swap)):
                raise ended_by_handler()
        except Exception as error:
            await self.abandon()
            meaning = self._meaning_of(error)
            if not isinstance(meaning, StoreUnavailable):
                await self._park(claim)
            if meaning is None:
                raise
            raise meaning from error
        manager, self._manager, self._lent = self._manager, None, None
        try:
            await _left(manager, None)
        finally:
            self._committed(swap)

    async def _roll_back(self) -> None:
        """Undo; what the handler has committed before it failed is parked."""
        claim = self._claimed
        await self.abandon()
        if claim is not None:
            await self._park(claim)

    async def _park(self, claim: Record) -> None:
        """Park what stands of *claim*; where nobody can tell, its lease must run out."""
        with suppress(CoatcheckError):
            parking = self._parking(claim, await self._look(claim.id))
            if parking is not None:
                self._desk.noticed(parking, await self._swap(parking))

    async def _undo(self, refusal: CoatcheckError | None = None) -> None:
        """Roll back, and give the connection back; a cancellation does not keep us from it."""
        lent, manager, self._lent, self._manager = self._lent, self._manager, None, None
        if isinstance(refusal, InTransaction):
            lent = None  # what was done there is its owner's
        if lent is not None or manager is not None:
            wait_s = max(0, self._until_ms - self._desk.now_ms()) / 1_000
            await to_the_end(_undone(lent, manager, refusal), wait_s + END_S_MAX)


async def _undone(lent: AsyncLent | None, manager: Any, failure: BaseException | None) -> None:  # noqa: ANN401 - of whoever lends
    """Roll back, and leave *manager*; a connection that does not even do that is dead."""
    if lent is not None:
        try:
            await lent.rollback()
            failure = None
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - its transaction died with it, or the event loop ends
            failure = error
    await _left(manager, failure)


async def _left(manager: Any, failure: BaseException | None) -> None:  # noqa: ANN401 - as above
    if manager is not None:
        try:
            await manager.__aexit__(type(failure) if failure else None, failure, None)
        except Exception:  # noqa: BLE001, S110 - its owner's trouble, and no news to whoever asked
            pass
