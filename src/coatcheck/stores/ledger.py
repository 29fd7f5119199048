"""Ledgers: how a record is written on a connection that is not the store's own (L9).

In transaction mode a claim and its completion are statements in the application's transaction, on
its connection and in its driver's idiom. A store in a SQL database offers the text and the values
for that; who sends them is in `coatcheck.lent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

from coatcheck.core.record import Swap
from coatcheck.errors import Misconfigured
from coatcheck.stores.contract import Store

Dialect: TypeAlias = Literal["sqlite", "postgresql", "mysql"]


class Statement(NamedTuple):
    """What is sent; the marks are "?1" on SQLite, else "%s"."""

    text: str
    values: Sequence[Any]
    # How long to wait for the answer to a claim, where the connection is the store's own or the
    # driver has a limit by itself.
    patience_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """
    The table of one store, for foreign connections.

    Attributes:
        dialect: which database it is.
        claim: the statements that write a claim, one after the other until one has affected a row,
            which is where it wins; they wait for whoever holds its row, but at most so many
            milliseconds.
        change: completes a claim that this transaction holds; where it affects one row.
        connect: a connection of the store's own, to be lent where nobody else lends one.
        connect_async: the same for async code.
        is_shelved: connecting takes long enough that connections are kept and used again.
    """

    dialect: Dialect
    claim: Callable[[Swap, int], Iterator[Statement]]
    change: Callable[[Swap], Statement]
    connect: Callable[[], Any]
    connect_async: Callable[[], Any]
    is_shelved: bool = True


def ledger_of(store: Store) -> Ledger:
    """The ledger of *store*, if it is in a SQL database."""
    ledger = getattr(store, "ledger", None)
    if not isinstance(ledger, Ledger):
        raise Misconfigured(
            "mode='transaction' needs a store in a SQL database, the one that the handler writes "
            "to: sqlite://, postgresql:// or mysql://"
        )
    return ledger
