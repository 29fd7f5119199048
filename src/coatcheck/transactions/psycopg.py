"""Connections of psycopg, for threads and for event loops.

psycopg has three ways to leave a connection in a state in which no end can be sent: an open
pipeline, a `stream()` that was not read to its end, and a pool that takes `close()` for giving the
connection back. All three are detected here; the operation then fails and is rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from psycopg import AsyncCursor, Cursor, Error
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from coatcheck.errors import NotCommitted
from coatcheck.stores.postgres.connection import BoundedConnection
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import (
    AsyncStatementByStatement,
    InTransaction,
    StatementByStatement,
)

# 1 s: a statement that the handler left running is usually short, and the client waits for us.
_BUSY_S_MAX = 1.0
# 5 s: as long as psycopg itself waits for a cancelled statement.
_CANCEL_S_MAX = 5.0
_CANCEL_POLL_S = 0.01

_BUSY = (
    "the handler returned while a statement was still running on its connection, or a stream() was "
    "not read to its end; the transaction was rolled back"
)
_IN_PIPELINE = (
    "the handler returned inside connection.pipeline(); leave the block before the handler returns"
)


class _Psycopg:
    """What the sync and the async adapter share: everything that does not wait."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a connection of either kind
        self.handle = handle
        self._was_closed = False

    def is_closed(self) -> bool:
        """The handler has closed it, or left its `with` block."""
        return self._was_closed

    def _check_idle(self) -> None:
        status = self.handle.info.transaction_status
        if self._is_in_pipeline():
            raise InTransaction("in a pipeline")
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            raise InTransaction
        if status == TransactionStatus.ACTIVE:
            raise InTransaction("executing another statement")

    def _is_in_pipeline(self) -> bool:
        """A pipeline is open, in which psycopg cannot say how many rows a statement affected."""
        is_in_pipeline: bool = self.handle.info.pipeline_status != PipelineStatus.OFF
        return is_in_pipeline

    def _set_timeout(self, statement: Statement) -> None:
        """Limit the time of a claim, where the connection is the store's own."""
        if isinstance(self.handle, BoundedConnection):
            self.handle.next_timeout_s = statement.timeout_s

    def _replace_close(self) -> None:
        """
        Make `close()` disconnect until our transaction is over.

        A pool with `close_returns=True` takes it for giving the connection back, and would hand it
        to another caller while our transaction is open.
        """
        self.handle.close = self._close

    def _restore_close(self) -> None:
        vars(self.handle).pop("close", None)

    def _close(self) -> Any:  # noqa: ANN401 - awaited in async code
        raise NotImplementedError

    def _close_for_handler(self) -> None:
        self._was_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        """End the session, and with it the transaction; `close()` might not (see above)."""
        self.handle.pgconn.finish()


class PsycopgConnection(_Psycopg, StatementByStatement):
    """A `psycopg.Connection`."""

    def start(self) -> None:
        """Begin; psycopg does it with the first statement, unless it is in autocommit mode."""
        self._check_idle()
        self._replace_close()
        if self.handle.autocommit:
            self.write(Statement("begin", ()))

    def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        self._set_timeout(statement)
        # Not connection.cursor(): the application may have set other factories.
        with Cursor(self.handle, row_factory=tuple_row) as cursor:
            cursor.execute(*_in_any_encoding(statement))
            return cursor.rowcount

    def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        if self._is_busy():
            raise NotCommitted(_BUSY)
        if self._is_in_pipeline():
            raise NotCommitted(_IN_PIPELINE)
        return super().end(statement)

    def commit(self) -> None:
        """Commit."""
        self.handle.commit()
        self._restore_close()

    def rollback(self) -> None:
        """Roll back; disconnect if the handler left a pipeline open or a statement running."""
        self._restore_close()
        if self._is_in_pipeline() or self._is_busy():
            self._disconnect()
        else:
            self.handle.rollback()

    def _close(self) -> None:
        self._close_for_handler()

    def _is_busy(self) -> bool:
        """A statement or a `stream()` holds the connection's lock for longer than we wait."""
        lock = self.handle.lock
        if not lock.locked():
            return False
        if is_free := lock.acquire(timeout=_BUSY_S_MAX):
            lock.release()
        return not is_free


class AsyncPsycopgConnection(_Psycopg, AsyncStatementByStatement):
    """A `psycopg.AsyncConnection`."""

    async def start(self) -> None:
        """Begin; psycopg does it with the first statement, unless it is in autocommit mode."""
        self._check_idle()
        self._replace_close()
        if self.handle.autocommit:
            await self.write(Statement("begin", ()))

    async def write(self, statement: Statement) -> int:
        """Execute *statement* and return the number of affected rows."""
        self._set_timeout(statement)
        async with AsyncCursor(self.handle, row_factory=tuple_row) as cursor:
            await cursor.execute(*_in_any_encoding(statement))
            return cursor.rowcount

    async def end(self, statement: Statement) -> bool:
        """Execute *statement*, commit if it affected one row, and return whether it did."""
        if await self._is_busy():
            raise NotCommitted(_BUSY)
        if self._is_in_pipeline():
            raise NotCommitted(_IN_PIPELINE)
        return await super().end(statement)

    async def commit(self) -> None:
        """Commit."""
        await self.handle.commit()
        self._restore_close()

    async def rollback(self) -> None:
        """Roll back; disconnect if the handler left a pipeline open or a statement running."""
        self._restore_close()
        if self._is_in_pipeline() or await self._is_busy():
            self._disconnect()
        else:
            await self._finish_interrupted_statement()
            await self.handle.rollback()

    async def _close(self) -> None:
        self._close_for_handler()

    async def _is_busy(self) -> bool:
        """A statement or a `stream()` holds the connection's lock for longer than we wait."""
        lock = self.handle.lock
        if not lock.locked():
            return False
        try:
            await asyncio.wait_for(lock.acquire(), _BUSY_S_MAX)
        except TimeoutError:
            return True
        lock.release()
        return False

    async def _finish_interrupted_statement(self) -> None:
        """
        Read the answer to a statement whose caller was cancelled more than once.

        After the first cancellation psycopg stops the statement on the server and reads the answer.
        A second one interrupts that, and the connection then accepts no other statement.
        """
        handle = self.handle
        if handle.info.transaction_status != TransactionStatus.ACTIVE:
            return
        with suppress(Error):  # the server may have ended the statement already
            await handle.cancel_safe(timeout=_CANCEL_S_MAX)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _CANCEL_S_MAX
        while handle.info.transaction_status == TransactionStatus.ACTIVE:
            if loop.time() > deadline_s:
                self._disconnect()
                return
            handle.pgconn.consume_input()
            if not handle.pgconn.is_busy():
                handle.pgconn.get_result()
            await asyncio.sleep(_CANCEL_POLL_S)


def _in_any_encoding(statement: Statement) -> tuple[bytes, Sequence[Any]]:
    """
    Return text and values of *statement* so that the session's `client_encoding` does not matter.

    It may lack the letters of a key, so text beyond ASCII goes as bytes that the server decodes.
    """
    values = statement.values
    is_beyond_ascii = [isinstance(value, str) and not value.isascii() for value in values]
    if not any(is_beyond_ascii):
        return statement.text.encode(), values
    start, *rest = statement.text.split("%s")
    marks = ["convert_from(%s::bytea, 'utf8')" if is_so else "%s" for is_so in is_beyond_ascii]
    text = start + "".join(mark + part for mark, part in zip(marks, rest, strict=True))
    return text.encode(), [
        value.encode() if is_so else value
        for value, is_so in zip(values, is_beyond_ascii, strict=True)
    ]
