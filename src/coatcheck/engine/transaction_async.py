"""One operation in one transaction of a lent connection, for async code (L9).

Differs from `engine/transaction.py` in the words that wait, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from coatcheck.core.flow import Effect
from coatcheck.core.record import Record, Swap
from coatcheck.core.transact import Begin, Commit
from coatcheck.engine.desk import Desk
from coatcheck.engine.together import TRIES, Lender, Together, ended_by_handler
from coatcheck.errors import CoatcheckError
from coatcheck.lent import AsyncLent
from coatcheck.lent.source import Borrowed
from coatcheck.lent.trouble import Trouble


class AsyncTransaction(Together):
    """The transaction of one operation, and the connection it is on."""

    def __init__(
        self, desk: Desk, lender: Lender, look: Callable[[bytes], Awaitable[Record]]
    ) -> None:
        super().__init__(desk, lender)
        self._look = look
        self._lent: AsyncLent | None = None
        self._borrowed: Borrowed | None = None

    async def perform(self, effect: Effect[Any]) -> Record | None:
        """Perform an effect of `core/transact.py`."""
        if isinstance(effect, Begin):
            return await self._begin(effect)
        if isinstance(effect, Commit):
            await self._commit(effect.swap)
        else:
            await self.abandon()
        return None

    async def abandon(self) -> None:
        """Undo what is not committed; nothing, where all is over."""
        if self._lent is not None:
            await self._undo()
            self._leave()

    async def _begin(self, begin: Begin) -> Record | None:
        swap, lost, is_won = begin.swap, None, False
        assert swap.record is not None
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
                await self._undo()
                self._leave(lost)
        return lost

    async def _claim(self, begin: Begin) -> Trouble | None:
        """Make the claim in a new transaction; None: it is made, and the transaction open."""
        for tries_left in reversed(range(TRIES)):
            try:
                lent = await self._borrow()
                statements = self._statements_of(begin)
                is_won = await lent.begin(next(statements)) == 1
                while not is_won and (statement := next(statements, None)):
                    is_won = await lent.write(statement) == 1
            except CoatcheckError:
                raise
            except Exception as error:  # noqa: BLE001 - told what it means, or raised
                await self._undo()
                trouble = self._trouble_of(error, is_last=not tries_left)
                if trouble in (Trouble.HELD, Trouble.TAKEN):
                    return trouble
            else:
                if is_won:
                    return None
                await self._undo()
                return Trouble.TAKEN
        raise AssertionError  # the last try has returned or raised

    async def _commit(self, swap: Swap) -> None:
        lent = self._lent
        assert lent is not None
        try:
            if not await lent.end(self.lender.ledger.change(swap)):
                raise ended_by_handler()
        except Exception as error:
            await self.abandon()
            unsure = self._unsure_after(error)
            if unsure is None:
                raise
            raise unsure from error
        await self._give_back(None)
        self._committed(swap)

    async def _borrow(self) -> AsyncLent:
        borrowed = Borrowed(self.lender.source)
        lent = await borrowed.enter()
        self._borrowed, self._lent, self._handle = borrowed, lent, lent.handle
        self._check(lent.dialect)
        return lent

    async def _undo(self) -> None:
        """Roll back, and give the connection back; one that does not even do that is dead."""
        if self._lent is not None:
            failure = None
            try:
                await self._lent.rollback()
            except Exception as error:  # noqa: BLE001 - its transaction died with it
                failure = error
            await self._give_back(failure)

    async def _give_back(self, failure: Exception | None) -> None:
        borrowed, self._borrowed, self._lent, self._handle = self._borrowed, None, None, None
        if borrowed is not None:
            with suppress(Exception):  # its owner's trouble, and no news to whoever asked
                await borrowed.leave(failure)
