"""What the tables of outgoing events and of Kafka's offsets have in common.

They are in the database of the handler, beside the records. A relay or a consumer creates its table
when it starts, which suits development; with `create=0` in the URL of the store,
`coatcheck migrate` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from coatcheck.errors import Misconfigured
from coatcheck.stores.transaction_statements import Dialect, TransactionStatements

# A catalogue, and no attempt to create: "create table if not exists" needs the right to create a
# table, also if it exists.
_IS_THERE: dict[Dialect, str] = {
    "sqlite": "select 1 from sqlite_master where type = 'table' and name = ?1",
    "postgresql": "select 1 where to_regclass(%s) is not null",
    "mysql": "select 1 from information_schema.tables "
    "where table_schema = database() and table_name = %s",
}


class ConsumerTable:
    """
    One table in the database of a store.

    *creation* has the statement that creates it, and *option* is that of `coatcheck migrate`.
    """

    def __init__(
        self,
        statements: TransactionStatements,
        name: str,
        creation: Mapping[Dialect, str],
        *,
        option: str,
    ) -> None:
        self.name = name
        self.option = option
        self._statements = statements
        self._dialect: Dialect = statements.dialect
        self._creation = creation[self._dialect].format(name)

    def is_there(self) -> bool:
        """The table exists."""
        return bool(self._statements.run(_IS_THERE[self._dialect], (self.name,)))

    def create(self) -> None:
        """Create the table if there is none."""
        try:
            self._statements.run(self._creation)
        except Exception:
            # Of two processes that create it at the same time, PostgreSQL refuses one.
            if not self.is_there():
                raise

    def create_if_allowed(self) -> None:
        """Create the table if there is none; raises if the URL of the store has `create=0`."""
        if self.is_there():
            return
        if not self._statements.may_create:
            raise Misconfigured(
                f"there is no table {self.name}, and create=0 in the URL of the store forbids to "
                f"create it: run `coatcheck migrate {self.option}`"
            )
        self.create()
