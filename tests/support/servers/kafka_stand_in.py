"""Kafka's stand-in as a program: the mock cluster that is part of librdkafka.

python kafka_stand_in.py FILE      # writes its address there

It has groups, rebalances, committed offsets and idempotent producers, and keeps all in memory. It
creates each topic with 4 partitions when that is first used; it has no administration, no ACLs
and no transactions of consumers.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path

import confluent_kafka

PRODUCER = 0
BROKERS = 1


def main(file: str) -> None:
    libraries = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    (path,) = libraries.glob("librdkafka-*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    error = ctypes.create_string_buffer(512)
    client = ctypes.c_void_p(library.rd_kafka_new(PRODUCER, None, error, len(error)))
    assert client, error.value
    cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(client, BROKERS))
    # A real broker, too, waits for 3 s until it gives a new group its partitions.
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 100)
    Path(file).write_text(library.rd_kafka_mock_cluster_bootstraps(cluster).decode())
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
