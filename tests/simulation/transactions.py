"""A visit in a transaction: `engine/transaction.py`, with `yield` where that would block (L9)."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

from coatcheck.core.flow import Effect
from coatcheck.core.record import Record, Swap
from coatcheck.core.transact import Begin, Commit
from coatcheck.engine.together import TRIES, Together
from coatcheck.errors import StoreUnavailable
from coatcheck.lent.trouble import Trouble

from .database import Transaction
from .world import Pause

if TYPE_CHECKING:
    from .driver import Visit

# How often a claim tries its row anew while another holds it: a lock that is waited for, without
# a queue.
LOOKS_PER_WAIT = 8


class SimulatedTransaction(Together):
    """The transaction of one visit, while there is one; who is in it is production's to decide."""

    def __init__(self, visit: Visit) -> None:
        # Of a desk it needs who is at work and who waits, and a process has both.
        nothing = cast("Any", None)  # of a lender; nor does any handler here end by itself
        super().__init__(cast("Any", visit.process), nothing, visit.standing, nothing)
        self._visit = visit
        self._process = visit.process
        self._database = visit.process.setting.database
        self._store = visit.process.setting.store
        self._transaction: Transaction | None = None

    def perform(self, effect: Effect[Any]) -> Generator[Pause, Any, Record | None]:
        """Perform an effect of `core/transact.py`."""
        if isinstance(effect, Begin):
            return (yield from self._begin(effect))
        if isinstance(effect, Commit):
            yield from self._commit(effect.swap)
        else:
            self.abandon()
        return None

    def abandon(self) -> None:
        """Undo what is not committed; nothing, where all is over."""
        if self._transaction is not None:
            self._undo()
            self._leave()

    def charge(self, _claim: Record, response: bytes) -> Generator[Pause, Any, bytes]:
        """The handler's effect: a write in the same transaction."""
        transaction = self._transaction
        assert transaction is not None
        write = functools.partial(self._database.write, transaction, response)
        is_written = yield self._store.ask(write, is_repeatable=False)
        if not is_written:
            raise StoreUnavailable("the connection is lost")
        return response

    def _begin(self, begin: Begin) -> Generator[Pause, Any, Record | None]:
        claim = begin.swap.record
        assert claim is not None
        if (standing := self._enter(claim)) is not None:
            return standing
        lost: Record | None = None
        is_won = False
        try:
            while not is_won and lost is None:
                trouble = yield from self._claim(begin)
                is_won = trouble is None
                if trouble is not None:
                    standing = yield from self._visit.standing(claim.id)
                    lost = self._rival_of(begin, trouble, standing)
        finally:
            if not is_won:
                self._undo()
                self._leave(lost)
        return lost

    def _claim(self, begin: Begin) -> Generator[Pause, Any, Trouble | None]:
        """Make the claim on a connection that is not dead, and wait for its row."""
        pause_ms = max(1.0, self._visit.policy.wait_ms / LOOKS_PER_WAIT)
        for tries_left in reversed(range(TRIES)):
            transaction = self._transaction = Transaction(self._visit, self._process)
            claim = functools.partial(self._database.claim, transaction, begin.swap)
            try:
                trouble: Trouble | None = yield self._store.ask(claim, is_repeatable=False)
                while trouble is Trouble.HELD and self._process.clock.now_ms() < begin.until_ms:
                    yield pause_ms
                    trouble = yield self._store.ask(claim, is_repeatable=False)
            except StoreUnavailable:
                self._undo()
                if not tries_left:
                    raise
            else:
                if trouble is not None:
                    self._undo()
                return trouble
        raise AssertionError  # the last try has returned or raised

    def _commit(self, swap: Swap) -> Generator[Pause, Any, None]:
        transaction = self._transaction
        assert transaction is not None
        commit = functools.partial(self._database.commit, transaction, swap)
        try:
            is_done = yield self._store.ask(commit, is_repeatable=False)
        except StoreUnavailable as error:
            self.abandon()
            raise StoreUnavailable("at the commit", is_ambiguous=True) from error
        if not is_done:
            self.abandon()
            raise StoreUnavailable("at the commit", is_ambiguous=True)
        self._transaction = None
        self._committed(swap)

    def _undo(self) -> None:
        """Give the connection back; the database hears of it a little later."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None and self._process.is_alive:  # else it finds out by itself
            delay_ms = self._store.delay_ms()
            self._process.world.later(delay_ms, self._database.abort, transaction)
