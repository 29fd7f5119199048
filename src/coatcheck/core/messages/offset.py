"""How far a consumer group has handled a partition of Kafka."""

from __future__ import annotations

from typing import NamedTuple


class PartitionOffset(NamedTuple):
    """The offset of the next record that a group is to handle; all before it are completed."""

    group: str
    topic: str
    partition: int
    next: int
