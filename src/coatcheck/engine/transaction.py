"""One operation in one transaction of a lent connection, for sync code (L9).

Performs the effects of `core/transact.py`. Duplicates in the same process do not take a connection
each to wait for the row; they stand in line like all others. Whatever goes wrong, the transaction
is over and the connection is back with its owner before anybody hears of it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from coatcheck.core.flow import Effect
from coatcheck.core.record import Record, Swap
from coatcheck.core.transact import Begin, Commit
from coatcheck.engine.together import IS_LAST, Together, closed_by_handler, ended_by_handler
from coatcheck.errors import CoatcheckError, StoreUnavailable
from coatcheck.lent import Lent
from coatcheck.lent.contract import InTransaction
from coatcheck.lent.source import borrowed
from coatcheck.lent.trouble import Trouble


class Transaction(Together):
    """The transaction of one operation, and the connection it is on."""

    _lent: Lent | None

    def perform(self, effect: Effect[Any]) -> Record | None:
        """Perform an effect of `core/transact.py`."""
        if isinstance(effect, Begin):
            return self._begin(effect)
        if isinstance(effect, Commit):
            self._commit(effect.swap)
        else:
            self._roll_back()
        return None

    def abandon(self) -> None:
        """Undo what is not committed; nothing, where all is over."""
        if self._claimed is not None:
            try:
                self._undo()
            finally:
                self._leave()

    def _begin(self, begin: Begin) -> Record | None:
        swap, lost, is_won = begin.swap, None, False
        assert swap.record is not None
        if (standing := self._enter(swap.record)) is not None:
            return standing
        try:
            while not is_won and lost is None:
                trouble = self._claim(begin)
                is_won = trouble is None
                if trouble is not None:
                    lost = self._rival_of(begin, trouble, self._look(swap.id))
        finally:
            if not is_won:
                try:
                    self._undo()
                finally:
                    self._leave(lost)
        return lost

    def _claim(self, begin: Begin) -> Trouble | None:
        """Make the claim in a new transaction; None: it is made, and the transaction open."""
        for is_last in IS_LAST:
            try:
                manager = borrowed(self.lender.source)
                lent = manager.__enter__()
                self._manager = manager
                statements = self._statements_of(begin, lent.dialect)
                claim = next(statements)
                self._lent = lent
                is_won = lent.begin(claim) == 1
                is_won = is_won or any(lent.write(statement) == 1 for statement in statements)
            except CoatcheckError as error:
                self._undo(error)
                raise
            except Exception as error:  # noqa: BLE001 - told what it means, or raised
                self._undo()
                trouble = self._trouble_of(error, is_last=is_last)
                if trouble in (Trouble.HELD, Trouble.TAKEN):
                    return trouble
            else:
                if is_won:
                    return None
                self._undo()
                return Trouble.TAKEN
        raise AssertionError  # the last try has returned or raised

    def _commit(self, swap: Swap) -> None:
        lent, claim = self._lent, self._claimed
        assert lent is not None
        assert claim is not None
        try:
            if lent.is_closed():
                raise closed_by_handler()
            if not lent.end(self.lender.ledger.change(swap)):
                raise ended_by_handler()
        except Exception as error:
            self.abandon()
            meaning = self._meaning_of(error)
            if not isinstance(meaning, StoreUnavailable):
                self._park(claim)
            if meaning is None:
                raise
            raise meaning from error
        try:
            self._give_back(None)
        finally:
            self._committed(swap)

    def _roll_back(self) -> None:
        """
        Undo; what the handler has committed before it failed is parked.

        It is looked for each time: who has begun another transaction since looks like all others.
        """
        claim = self._claimed
        self.abandon()
        if claim is not None:
            self._park(claim)

    def _park(self, claim: Record) -> None:
        """Park what stands of *claim*; where nobody can tell, its lease must run out."""
        with suppress(CoatcheckError):
            parking = self._parking(claim, self._look(claim.id))
            if parking is not None:
                self._desk.noticed(parking, self._swap(parking))

    def _undo(self, refusal: CoatcheckError | None = None) -> None:
        """Roll back, and give the connection back; one that does not even do that is dead."""
        failure: Exception | None = None
        if self._lent is None or isinstance(refusal, InTransaction):
            failure = refusal  # and what was done there is its owner's
        else:
            try:
                self._lent.rollback()
            except Exception as error:  # noqa: BLE001 - its transaction died with it
                failure = error
        self._give_back(failure)

    def _give_back(self, failure: Exception | None) -> None:
        manager, self._manager, self._lent = self._manager, None, None
        if manager is not None:
            with suppress(Exception):  # its owner's trouble, and no news to whoever asked
                manager.__exit__(type(failure) if failure else None, failure, None)
