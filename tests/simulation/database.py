"""The database of transaction mode: locked rows, and effects that commit with their record.

A transaction sees and locks its row when it claims it. It ends by a commit, by a rollback, when its
process is gone and the database has noticed that, or when the database itself restarts.
"""

from __future__ import annotations

from coatcheck.core.record import Record, Swap
from coatcheck.transactions.errors import ErrorKind

from .downstream import Downstream
from .faults import Broken
from .store import SimulatedStore
from .world import Host, World


class Transaction:
    """One transaction, on a connection of its own."""

    def __init__(self, owner: object, host: Host) -> None:
        self.owner = owner
        self.host = host
        self.claim: Record | None = None  # while it is open
        self.effects: list[bytes] = []
        self.is_over = False


class Database:
    """Which transaction has locked which row; records are in the store, effects downstream."""

    def __init__(
        self, world: World, store: SimulatedStore, downstream: Downstream, broken: Broken
    ) -> None:
        self.world = world
        self.store = store
        self.downstream = downstream
        self.broken = broken
        self._open: dict[bytes, Transaction] = {}

    def claim(self, transaction: Transaction, swap: Swap) -> ErrorKind | None:
        """Make the claim *swap*; else its row is held by another that is open, or taken."""
        if transaction.is_over or not transaction.host.is_alive:  # the connection is closed
            return ErrorKind.LOCKED
        if swap.id in self._open and self.broken.rows_are_locked:
            return ErrorKind.LOCKED
        if self.store.get(swap.id).version != swap.expected:
            return ErrorKind.DUPLICATE
        transaction.claim = swap.record
        self._open[swap.id] = transaction
        self.world.happened(transaction.owner, "claims in a transaction", swap.record)
        return None

    def write(self, transaction: Transaction, effect: bytes) -> bool:
        """Have an effect, when it commits; False: the transaction is gone."""
        if transaction.claim is not None:
            transaction.effects.append(effect)
        return transaction.claim is not None

    def commit(self, transaction: Transaction, swap: Swap) -> bool:
        """Record and effects are there; False: the transaction is gone, and all of it."""
        claim, record = transaction.claim, swap.record
        if claim is None or record is None:
            return False
        self.store.put(claim, transaction.owner)
        self.store.put(record, transaction.owner)
        for effect in transaction.effects:
            self.downstream.add(claim, effect)
        self._end(transaction)
        return True

    def abort(self, transaction: Transaction) -> None:
        """Nothing of it has happened."""
        if not transaction.is_over:
            self.world.happened(transaction.owner, "rolls back")
            self._end(transaction)

    def _end(self, transaction: Transaction) -> None:
        transaction.is_over = True
        claim, transaction.claim = transaction.claim, None
        if claim is not None and self._open.get(claim.id) is transaction:
            del self._open[claim.id]

    def lose(self, host: Host) -> None:
        """*host* is gone; its connections are found dead after a while."""
        for transaction in list(self._open.values()):
            if transaction.host is host:
                self.world.later(self.store.faults.timeout_ms, self.abort, transaction)

    def restart(self) -> None:
        """No transaction outlives it."""
        for transaction in list(self._open.values()):
            self.abort(transaction)
