"""Durable database servers for the benchmarks: on a disk, with every commit synced.

Each benchmark has its own server, whose tables no other benchmark has grown. In a quick run all
benchmarks share one server of each kind, because starting one takes as long as a quick benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from tests.support.servers import Server
from tests.support.servers.mariadb import Mariadb
from tests.support.servers.postgres import Postgres

AnyServer = TypeVar("AnyServer", bound=Server)


def durable_postgres() -> Postgres:
    """Start a server that syncs its log at each commit."""
    return Postgres(on_disk=True, fsync="on", shared_buffers="128MB")


def durable_mariadb() -> Mariadb:
    """Start a server that flushes its log at each commit; without a binary log."""
    settings = {"innodb-flush-log-at-trx-commit": "1", "innodb-buffer-pool-size": "128M"}
    return Mariadb(on_disk=True, **settings)


@contextmanager
def server_for(make: Callable[[], AnyServer], *, quick: bool) -> Iterator[AnyServer]:
    """Start a server for one benchmark; a shared one runs until this process ends."""
    server: AnyServer = _shared(make) if quick else make()
    try:
        yield server
    finally:
        if not quick:
            server.remove()


@cache
def _shared(make: Callable[[], Any]) -> Any:  # noqa: ANN401 - a cache knows no type variables
    return make()
