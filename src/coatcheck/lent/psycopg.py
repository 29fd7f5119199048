"""Connections of psycopg, for threads and for event loops.

What we say in a transaction goes in two journeys: `begin` with the claim, and `commit` with the
end. The driver would make four of them, and a journey costs as much as what is said there. So each
is one text; whatever the handler says goes the driver's own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg.errors import DivisionByZero, error_from_result
from psycopg.generators import execute
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from coatcheck.errors import Misconfigured
from coatcheck.lent.contract import IN_TRANSACTION, AsyncEndsInTwo, EndsInTwo, ended_by_handler
from coatcheck.stores.ledger import Dialect, Statement

_DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)


class _Psycopg:
    """What both have in common."""

    dialect: Dialect = "postgresql"

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - a connection of either kind
        self.handle = handle

    def _check_idle(self) -> None:
        if self.handle.info.transaction_status:
            raise Misconfigured(IN_TRANSACTION)

    def _text_of(self, statement: Statement) -> str | None:
        """What says *statement*, and begins where that is due; None: only the driver can say it."""
        handle = self.handle
        if statement.spelled is None:
            return None
        if handle.info.transaction_status:
            return statement.spelled()
        levels = (handle.isolation_level, handle.read_only, handle.deferrable)
        if not handle.autocommit and levels != (None, None, None):
            return None
        return f"begin; {statement.spelled()}"

    def _must_begin(self) -> bool:
        """The driver would not do it by itself."""
        return self.handle.autocommit and not self.handle.info.transaction_status

    def _send(self, text: str) -> None:
        self.handle.pgconn.send_query(text.encode(self.handle.info.encoding))

    def _checked(self, results: Sequence[PGresult]) -> int:
        """How many rows the last of *results* speaks of; raised, where one is an error."""
        for result in results:
            if result.status not in _DONE:
                raise error_from_result(result, encoding=self.handle.info.encoding)
        return results[-1].command_tuples or 0


class PsycopgLent(_Psycopg, EndsInTwo):
    """A `psycopg.Connection`."""

    def begin(self) -> None:
        """Nothing yet: the first statement begins."""
        self._check_idle()

    def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        text = self._text_of(statement)
        if text is not None:
            return self._say(text)
        if self._must_begin():
            self._say("begin")
        affected: int = self.handle.execute(statement.text, statement.values).rowcount
        return affected

    def end(self, statement: Statement) -> None:
        """Execute *statement* and commit; `NotCommitted` where it does not affect one row."""
        if statement.spelled is None:
            super().end(statement)
            return
        try:
            self._say(_ending(statement.spelled()))
        except DivisionByZero as error:
            raise ended_by_handler() from error

    def _say(self, text: str) -> int:
        handle = self.handle
        with handle.lock:
            self._send(text)
            return self._checked(handle.wait(execute(handle.pgconn)))

    def commit(self) -> None:
        """Commit."""
        self.handle.commit()

    def rollback(self) -> None:
        """Undo."""
        self.handle.rollback()


class PsycopgAsyncLent(_Psycopg, AsyncEndsInTwo):
    """A `psycopg.AsyncConnection`; differs from the other in the words that wait."""

    async def begin(self) -> None:
        """Nothing yet: the first statement begins."""
        self._check_idle()

    async def write(self, statement: Statement) -> int:
        """Execute *statement*; how many rows it affected."""
        text = self._text_of(statement)
        if text is not None:
            return await self._say(text)
        if self._must_begin():
            await self._say("begin")
        cursor = await self.handle.execute(statement.text, statement.values)
        affected: int = cursor.rowcount
        return affected

    async def end(self, statement: Statement) -> None:
        """Execute *statement* and commit; `NotCommitted` where it does not affect one row."""
        if statement.spelled is None:
            await super().end(statement)
            return
        try:
            await self._say(_ending(statement.spelled()))
        except DivisionByZero as error:
            raise ended_by_handler() from error

    async def _say(self, text: str) -> int:
        handle = self.handle
        async with handle.lock:
            self._send(text)
            return self._checked(await handle.wait(execute(handle.pgconn)))

    async def commit(self) -> None:
        """Commit."""
        await self.handle.commit()

    async def rollback(self) -> None:
        """Undo."""
        await self.handle.rollback()


def _ending(update: str) -> str:
    """
    What executes *update* and commits.

    A division fails where no row was there: a count would be known only after the commit.
    """
    return f"with ended as ({update} returning 1) select 1 / count(*) from ended; commit"  # noqa: S608 - a store's own
