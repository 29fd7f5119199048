"""Record and effect together: what the transactions of sync and async code have in common (L9).

All but the waiting: who of this process is in a transaction for which operation, what is written
there, and what it means when that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from coatcheck.core.record import GONE, RUNNING, Record, Swap, in_doubt
from coatcheck.core.transact import Begin
from coatcheck.engine.desk import Desk
from coatcheck.errors import CoatcheckError, Misconfigured, NotCommitted, StoreUnavailable
from coatcheck.lent.source import Source
from coatcheck.lent.trouble import Trouble, is_busy, is_refused, trouble_of
from coatcheck.stores.ledger import Dialect, Ledger, Statement

# Nothing has run when a claim fails, so it may be made again: on another connection, where a pool
# did not know yet that the first one is dead.
TRIES = 3
# For each of them, whether it is the last.
IS_LAST = (*[False] * (TRIES - 1), True)
# What a claim lost against may be swept before it is looked at, but not again and again.
_GHOSTS_MAX = 5
# The nonce of a claim in a transaction that nobody else can see yet.
_UNSEEN = -1


class Lender(NamedTuple):
    """Whose connections are used, and how a record is written on them."""

    source: Source
    ledger: Ledger


class Together:
    """The transaction of one operation; see `Transaction` and `AsyncTransaction`."""

    def __init__(
        self,
        desk: Desk,
        lender: Lender,
        look: Callable[[bytes], Any],
        swap: Callable[[Swap], Any],
    ) -> None:
        self.lender = lender
        self._desk = desk
        # Finds the record that stands, and writes one; awaited in async code, like the others.
        self._look = look
        self._swap = swap
        self._claimed: Record | None = None
        self._ghosts = 0
        self._lent: Any = None  # on which we have begun
        self._manager: Any = None  # what has lent it

    @property
    def connection(self) -> Any:  # noqa: ANN401 - of whatever driver
        """What was lent, as its owner knows it."""
        if self._lent is None:
            raise NotCommitted("the transaction of this operation is over, and its connection back")
        return self._lent.handle

    def has_collided(self, error: BaseException) -> bool:
        """The database undid it for nobody's fault: from the start it may well succeed."""
        return trouble_of(error, self.lender.ledger.dialect) is Trouble.COLLIDED

    # --- who is at work in this process -------------------------------------------------------

    def _enter(self, claim: Record) -> Record | None:
        """Begin work on *claim*; else the claim that this process works on already."""
        standing = self._desk.under_way.setdefault(claim.id, claim)
        if standing is not claim:
            # Held for as long as its transaction is open, whatever its lease says.
            return standing._replace(lease_until_ms=claim.lease_until_ms)
        self._claimed = claim
        return None

    def _leave(self, standing: Record | None = None) -> None:
        """The work is over and nothing remains of it; who waits looks at what stands instead."""
        claim, self._claimed = self._claimed, None
        if claim is not None:
            self._desk.under_way.pop(claim.id, None)
            # What somebody else has not committed yet is no record that one could go by.
            if standing is None or standing.nonce == _UNSEEN:
                standing = GONE
            self._desk.line.tell(standing._replace(id=claim.id))

    def _committed(self, swap: Swap) -> None:
        self._claimed = None
        self._desk.under_way.pop(swap.id, None)
        self._desk.noticed(swap, None)

    # --- what is written, and what it means when that fails -----------------------------------

    def _statements_of(self, begin: Begin, dialect: Dialect) -> Iterator[Statement]:
        ledger = self.lender.ledger
        if dialect != ledger.dialect:
            raise Misconfigured(
                f"the store is in {ledger.dialect}, and the connection that was lent leads to "
                f"{dialect}; record and effect can only commit together in one database"
            )
        wait_ms = begin.until_ms - self._desk.now_ms()
        return ledger.claim(begin.swap, max(1, wait_ms))  # not 0, which is no limit in some places

    def _trouble_of(self, error: Exception, *, is_last: bool) -> Trouble:
        """What the *error* of a claim means; raises where it cannot be made."""
        trouble = trouble_of(error, self.lender.ledger.dialect)
        if trouble in (Trouble.HELD, Trouble.TAKEN):
            return trouble
        if trouble is None or is_last:
            raise StoreUnavailable(_words(error)) from error
        return trouble

    def _meaning_of(self, error: Exception) -> CoatcheckError | None:
        """
        What the *error* of an end means; None: what it says, and there was no commit.

        An outage is one of which nobody can tell whether the commit took place.
        """
        if is_busy(error):
            return NotCommitted("the handler has left a statement running on its connection")
        dialect = self.lender.ledger.dialect
        if trouble_of(error, dialect) is not Trouble.AWAY or is_refused(error, dialect):
            return None
        return StoreUnavailable(f"at the commit: {_words(error)}", is_ambiguous=True)

    @staticmethod
    def _parking(claim: Record, standing: Record) -> Swap | None:
        """
        What parks *claim*, which its handler has ended by itself; None: nothing of it stands.

        Committed without its end it is in doubt: some of the work is done, and maybe not all of
        it. It must not run again by itself only because its lease has run out.
        """
        if standing.nonce != claim.nonce or standing.state != RUNNING:
            return None
        return Swap(claim.id, standing.version, in_doubt(standing))

    def _rival_of(self, begin: Begin, trouble: Trouble, standing: Record) -> Record | None:
        """
        What a claim lost against; *standing* is what the store knows of it.

        None: nothing that is still there, so the claim may well be made now.
        """
        if trouble is Trouble.HELD:  # by a transaction that nobody else can see yet
            assert begin.swap.record is not None
            return begin.swap.record._replace(nonce=_UNSEEN)
        if standing.version or begin.swap.expected:
            return standing
        self._ghosts += 1
        if self._ghosts > _GHOSTS_MAX:
            raise StoreUnavailable(
                "a claim loses against a record that the store does not have: does the connection "
                "that was lent lead to the store's own database and schema?"
            )
        return None


def closed_by_handler() -> NotCommitted:
    """There is no connection any more, and nothing of the end was sent on it."""
    return NotCommitted(
        "the connection that was lent was closed before the operation's end; leave that to whoever "
        "has lent it"
    )


def ended_by_handler() -> NotCommitted:
    """The claim is not there any more, although this transaction made it."""
    return NotCommitted(
        "the handler has committed or rolled back by itself; leave that to the operation, or use "
        "a savepoint"
    )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
