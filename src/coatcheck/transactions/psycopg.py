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

from psycopg import AsyncConnection, AsyncCursor, Cursor, Error
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from coatcheck.core.flow import Call, Flow
from coatcheck.errors import NotCommitted
from coatcheck.stores.postgres.connection import BoundedConnection
from coatcheck.stores.transaction_statements import Dialect, Statement
from coatcheck.transactions.contract import InTransaction, TransactionConnection

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


class PsycopgConnection(TransactionConnection):
    """A `psycopg.Connection` or `psycopg.AsyncConnection`."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a connection of either kind
        super().__init__(handle)
        self._is_async = isinstance(handle, AsyncConnection)
        self._was_closed = False

    def start(self) -> Flow[None]:
        """Begin; psycopg does it with the first statement, unless it is in autocommit mode."""
        if self._is_in_pipeline():
            raise InTransaction("in a pipeline")
        status = self.handle.info.transaction_status
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            raise InTransaction
        if status == TransactionStatus.ACTIVE:
            raise InTransaction("executing another statement")
        # A pool with `close_returns=True` takes `close()` for giving the connection back, and would
        # hand it to another caller while our transaction is open.
        self.handle.close = self._close_async if self._is_async else self._close
        if self.handle.autocommit:
            yield from self.write(Statement("begin", ()))

    def write(self, statement: Statement) -> Flow[int]:
        """Execute *statement* and return the number of affected rows."""
        if isinstance(self.handle, BoundedConnection):  # the store's own
            self.handle.next_timeout_s = statement.timeout_s
        # Not connection.cursor(): the application may have set other factories.
        cursor_type: Any = AsyncCursor if self._is_async else Cursor
        cursor = cursor_type(self.handle, row_factory=tuple_row)
        yield from Call(cursor.execute, _in_any_encoding(statement))
        affected: int = cursor.rowcount
        return affected

    def is_closed(self) -> bool:
        """The handler has closed it, or left its `with` block."""
        return self._was_closed

    def end(self, completion: Statement, *, undo: bool = False) -> Flow[None]:
        """Write *completion* and commit; raises `NotCommitted` if our transaction is over."""
        if not self._was_closed and (yield from self._is_busy()):
            raise NotCommitted(_BUSY)
        if not self._was_closed and self._is_in_pipeline():
            raise NotCommitted(_IN_PIPELINE)
        yield from super().end(completion, undo=undo)

    def commit(self) -> Flow[None]:
        """Commit."""
        yield from Call(self.handle.commit)
        self._restore_close()

    def rollback(self) -> Flow[None]:
        """Roll back; disconnect if the handler left a pipeline open or a statement running."""
        self._restore_close()
        if self._is_in_pipeline() or (yield from self._is_busy()):
            self._disconnect()
            return
        if self._is_async:
            yield from Call(self._finish_interrupted_statement)
        yield from Call(self.handle.rollback)

    def _is_in_pipeline(self) -> bool:
        """A pipeline is open, in which psycopg cannot say how many rows a statement affected."""
        is_in_pipeline: bool = self.handle.info.pipeline_status != PipelineStatus.OFF
        return is_in_pipeline

    def _is_busy(self) -> Flow[bool]:
        """A statement or a `stream()` holds the connection's lock for longer than we wait."""
        lock = self.handle.lock
        if not lock.locked():
            return False
        if self._is_async:
            try:
                yield from Call(asyncio.wait_for, (lock.acquire(), _BUSY_S_MAX))
            except TimeoutError:
                return True
        elif not lock.acquire(timeout=_BUSY_S_MAX):
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

    # --- close() while our transaction is open ------------------------------------------------

    def _close(self) -> None:
        self._was_closed = True
        self._disconnect()

    async def _close_async(self) -> None:
        self._close()

    def _restore_close(self) -> None:
        vars(self.handle).pop("close", None)

    def _disconnect(self) -> None:
        """End the session, and with it the transaction; `close()` might not."""
        self.handle.pgconn.finish()


def _in_any_encoding(statement: Statement) -> tuple[bytes, Sequence[Any]]:
    """
    Return text and values of *statement* so that the session's `client_encoding` does not matter.

    It may lack the letters of a key, so text beyond ASCII goes as bytes that the server decodes.
    """
    if all(not isinstance(value, str) or value.isascii() for value in statement.values):
        return statement.text.encode(), statement.values
    start, *rest = statement.text.split("%s")
    text, values = start, []
    for value, part in zip(statement.values, rest, strict=True):
        if isinstance(value, str) and not value.isascii():
            text += "convert_from(%s::bytea, 'utf8')" + part
            values.append(value.encode())
        else:
            text += "%s" + part
            values.append(value)
    return text.encode(), values
