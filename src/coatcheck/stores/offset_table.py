"""The table of Kafka's offsets, in the database of the handler: `coatcheck_offsets`.

A handler in transaction mode writes the offset in its own transaction, and the consumer reads it
when it gets the partition.
"""

from __future__ import annotations

from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.stores.consumer_table import ConsumerTable
from coatcheck.stores.transaction_statements import Dialect, Statement, TransactionStatements

# 255: of the columns on MySQL, whose keys are short. A topic has at most 249.
GROUP_CHARS_MAX = 255

_COLUMNS = "consumer_group, topic, partition_number, next_offset"
_KEY = "primary key (consumer_group, topic, partition_number)"
_CREATE: dict[Dialect, str] = {
    "sqlite": "create table if not exists {} (consumer_group text not null, topic text not null, "
    f"partition_number integer not null, next_offset integer not null, {_KEY}) without rowid",
    "postgresql": "create table if not exists {} (consumer_group text not null, "
    "topic text not null, partition_number integer not null, next_offset bigint not null, "
    f"{_KEY})",
    "mysql": "create table if not exists {} (consumer_group varchar(255) not null, "
    "topic varchar(255) not null, partition_number integer not null, next_offset bigint not null, "
    f"{_KEY}) engine = innodb, character set utf8mb4, collate utf8mb4_bin",
}
# The last one wins, also with a lower offset: a topic may have been created again. A consumer that
# has lost its partition meanwhile may so lower the offset; the records since come as duplicates.
_STORE: dict[Dialect, str] = {
    "sqlite": f"insert into {{}} ({_COLUMNS}) values (?1, ?2, ?3, ?4) on conflict "
    "(consumer_group, topic, partition_number) do update set next_offset = excluded.next_offset",
    "postgresql": f"insert into {{}} ({_COLUMNS}) values (%s, %s, %s, %s) on conflict "
    "(consumer_group, topic, partition_number) do update set next_offset = excluded.next_offset",
    "mysql": f"insert into {{}} ({_COLUMNS}) values (%s, %s, %s, %s) "
    "on duplicate key update next_offset = %s",
}


class OffsetTable(ConsumerTable):
    """The offsets of the consumers with one store."""

    def __init__(self, statements: TransactionStatements) -> None:
        super().__init__(statements, statements.offsets_table, _CREATE, option="--offsets")

    def storing(self, offset: PartitionOffset) -> Statement:
        """The statement by which a handler's transaction writes *offset*."""
        values = (*offset, offset.next) if self._dialect == "mysql" else tuple(offset)
        return Statement(_STORE[self._dialect].format(self.name), values)

    def read(self, group: str) -> dict[tuple[str, int], int]:
        """The offsets of *group*, by topic and partition."""
        place = "?1" if self._dialect == "sqlite" else "%s"
        rows = self._statements.run(
            f"select topic, partition_number, next_offset from {self.name} "
            f"where consumer_group = {place}",
            (group,),
        )
        return {(topic, int(partition)): int(next) for topic, partition, next in rows}
