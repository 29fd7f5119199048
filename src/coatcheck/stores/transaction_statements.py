"""Statements that write a record on a connection of the application.

In transaction mode the claim and its completion are statements in the application's own
transaction, on its connection and through its driver. A store in a SQL database provides their
text and values; `coatcheck.transactions` sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

from coatcheck.core.record import Swap
from coatcheck.errors import Misconfigured

Dialect: TypeAlias = Literal["sqlite", "postgresql", "mysql"]


class Statement(NamedTuple):
    """A statement and its values; the placeholders are "?1" on SQLite, otherwise "%s"."""

    text: str
    values: Sequence[Any]
    # The timeout of a claim, on connections of the store's own and in drivers that have one.
    timeout_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionStatements:
    """
    How to write the records of one store on other connections.

    Attributes:
        dialect: the database.
        claim: yields the statements that write a claim. Execute them in order until one affects a
            row, which means that the claim was written. They wait at most the given milliseconds
            for a transaction that has locked the row.
        change: the statement that completes a claim of this transaction. It affects one row, or
            none if this transaction does not hold the claim.
        connect: opens a connection of the store's own, if the application provides none.
        connect_async: the same for async code.
        is_pooled: opening a connection is slow, so that connections are pooled.
        events_table: the name of the table of outgoing events, quoted.
        offsets_table: the same of the table of Kafka's offsets.
        may_create: whether these two tables may be created; not with `create=0` in the URL.
    """

    dialect: Dialect
    claim: Callable[[Swap, int], Iterator[Statement]]
    change: Callable[[Swap], Statement]
    connect: Callable[[], Any]
    connect_async: Callable[[], Any]
    is_pooled: bool = True
    events_table: str = "coatcheck_events"
    offsets_table: str = "coatcheck_offsets"
    may_create: bool = True

    def run(self, text: str, values: Sequence[Any] = ()) -> Sequence[Any]:
        """Run a statement on a connection of the store's own, and commit; its rows."""
        with closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(text, *[values] if values else [])
            rows: Sequence[Any] = cursor.fetchall() if cursor.description else ()
            connection.commit()
            return rows

    def over(self, packed: Callable[[Swap], Swap]) -> TransactionStatements:
        """Return the statements that write what *packed* makes of a swap."""
        claim, change = self.claim, self.change
        return replace(
            self,
            claim=lambda swap, wait_ms: claim(packed(swap), wait_ms),
            change=lambda swap: change(packed(swap)),
        )


def transaction_statements_of(store: object) -> TransactionStatements:
    """Return the statements of *store*; raise `Misconfigured` if it is not in a SQL database."""
    statements = getattr(store, "transaction_statements", None)
    if not isinstance(statements, TransactionStatements):
        raise no_transactions()
    return statements


def no_transactions() -> Misconfigured:
    """Return the error for a store that is not in a SQL database."""
    return Misconfigured(
        "mode='transaction' needs a store in a SQL database, the one that the handler writes "
        "to: sqlite://, postgresql:// or mysql://"
    )
