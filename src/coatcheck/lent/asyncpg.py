"""Connections of asyncpg.

What begins a transaction also claims, in one journey, which saves the client a seventh of its time.
The driver takes one statement at a time unless it is plain text, so the session keeps the claim
under a name of ours, and its values are spelled out; planned anew each time, it would eat up what
was saved. Where the application lets nothing be kept, as behind a pooler, and with a driver that is
not made as we know it, the driver does it all.
"""

from __future__ import annotations

import asyncio
from math import inf
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

from asyncpg import (  # type: ignore[import-untyped]  # ships no types
    Connection,
    InterfaceError,
    InvalidSQLStatementNameError,
)
from asyncpg.transaction import Transaction, TransactionState  # type: ignore[import-untyped]  # as above

from coatcheck.lent.asynchronous import with_dollars
from coatcheck.lent.contract import AsyncOneByOne, InTransaction
from coatcheck.lent.trouble import is_busy
from coatcheck.stores.ledger import Dialect, Statement

# What we have to know of the driver, so that its `transaction()` nests in what we have begun.
_IS_KNOWN = {"_top_xact", "_stmt_cache_enabled", "_config", "_connection", "_state"} <= {
    *Connection.__slots__,
    *Transaction.__slots__,
}
# What a session keeps of ours: texts, and their names there; None for one that forgets.
_KEPT: WeakKeyDictionary[Any, dict[str, str] | None] = WeakKeyDictionary()
# 1 s: what was left running is mostly short, and who asked waits for us. The driver tells nobody
# when it is over, so it is asked again and again.
_BUSY_S_MAX = 1.0
_BUSY_PAUSE_S = 0.01


class AsyncpgLent(AsyncOneByOne):
    """An `asyncpg.Connection`, also one of a pool."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - or what a pool has in its place
        self.handle = handle
        self._transaction: Any = None

    async def begin(self, claim: Statement) -> int:
        """Begin a transaction, and execute *claim* in it; how many rows it affected."""
        handle = self.handle
        if handle.is_in_transaction():
            raise InTransaction
        self._transaction = transaction = handle.transaction()
        session: Any = transaction._connection if _IS_KNOWN else None  # noqa: SLF001 - see `_IS_KNOWN`
        kept = _kept_by(session)
        if kept is None:
            return await super().begin(claim)
        session._top_xact, transaction._state = transaction, TransactionState.STARTED  # noqa: SLF001 - as above
        is_new = claim.text not in kept
        try:
            said = await handle.execute(_begun(kept, claim), timeout=self._limit_s(claim))
            return _affected(said)
        except InvalidSQLStatementNameError:
            # It was told to forget, or it is another one each time: that may happen once.
            _KEPT[session] = None
            await self.rollback()
        except asyncio.CancelledError:
            if is_new:  # the session may not have heard of it
                kept.pop(claim.text, None)
            raise
        self._transaction = handle.transaction()
        return await super().begin(claim)

    async def start(self) -> None:
        """Begin as the driver does it, so that `connection.transaction()` nests in it."""
        await self._transaction.start()

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        text, limit_s = with_dollars(statement.text), self._limit_s(statement)
        return _affected(await self.handle.execute(text, *statement.values, timeout=limit_s))

    def _limit_s(self, statement: Statement) -> float | None:
        """
        How long *statement* may take; None: as long as the application has said, if it has.

        A claim waits for whoever holds its row, which may be longer than that.
        """
        if statement.patience_s == inf or not _IS_KNOWN:
            return None
        set_s: float | None = self._transaction._connection._config.command_timeout  # noqa: SLF001 - as above
        return None if set_s is None else max(set_s, statement.patience_s)

    def is_closed(self) -> bool:
        """It was closed, of which the driver does not tell who did it; a pool has it back then."""
        try:
            return bool(self.handle.is_closed())
        except InterfaceError:
            return True

    async def commit(self) -> None:
        """Commit."""
        await self._transaction.commit()

    async def rollback(self) -> None:
        """
        Undo, whether or not a transaction was begun.

        The driver would do nothing where it was cancelled while it began or ended one. A statement
        that the handler has left running is waited for, and ended with its connection if it does
        not end: else our transaction stayed open, and its claim held.
        """
        transaction = self._transaction
        if not _IS_KNOWN:
            await transaction.rollback()
            return
        session = transaction._connection  # noqa: SLF001 - as above
        if session._top_xact is transaction:  # noqa: SLF001 - as above
            session._top_xact = None  # noqa: SLF001 - as above
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _BUSY_S_MAX
        while True:
            try:
                await self.handle.execute("rollback")
            except InterfaceError as error:
                if not is_busy(error):
                    raise
                if loop.time() >= until_s:
                    self.handle.terminate()
                    raise
                await asyncio.sleep(_BUSY_PAUSE_S)
            else:
                return


def _kept_by(session: Any) -> dict[str, str] | None:  # noqa: ANN401 - of a driver without types
    """What *session* keeps of ours; None where the driver is to begin by itself."""
    if session is None or session._top_xact is not None or not session._stmt_cache_enabled:  # noqa: SLF001 - as above
        return None
    return _KEPT.setdefault(session, {})


def _affected(status: str) -> int:
    """How many rows a statement affected, from what the server says it did."""
    return int(status.rpartition(" ")[2])


def _begun(kept: dict[str, str], claim: Statement) -> str:
    """What begins a transaction and executes *claim* in it; from then on it is *kept*."""
    name, prepare = kept.get(claim.text), ""
    if name is None:
        # One that nobody else has given, whoever has had the session before.
        name = kept[claim.text] = f"coatcheck_{token_hex(8)}"
        prepare = f"prepare {name} as {with_dollars(claim.text)};"
    values = [str(value) if type(value) is int else _spelled(value) for value in claim.values]
    return f"{prepare}begin;execute {name}({','.join(values)})"


def _spelled(value: str | bytes | None) -> str:
    """*value* in a text, whatever the session takes a backslash for. Nothing is ever escaped."""
    if type(value) is bytes:
        return f"E'\\\\x{value.hex()}'"
    if value is None:
        return "null"
    assert type(value) is str
    if value.isascii() and "'" not in value and "\\" not in value:
        return f"'{value}'"
    return f"convert_from(E'\\\\x{value.encode().hex()}', 'utf8')"
