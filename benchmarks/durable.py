"""Durable servers: on a disk, and what they have acknowledged is written.

Each question has a server of its own, which nobody else's tables have grown. Where it must be
quick, all of them share one of each kind: to make one takes as long as to ask some questions.
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
    """A server that syncs its log at each commit."""
    return Postgres(on_disk=True, fsync="on", shared_buffers="128MB")


def durable_mariadb() -> Mariadb:
    """A server that flushes its log at each commit; without a binary log."""
    settings = {"innodb-flush-log-at-trx-commit": "1", "innodb-buffer-pool-size": "128M"}
    return Mariadb(on_disk=True, **settings)


@contextmanager
def lent(make: Callable[[], AnyServer], *, quick: bool) -> Iterator[AnyServer]:
    """A server that *make* has made, for one question; the shared one ends with this process."""
    server: AnyServer = _shared(make) if quick else make()
    try:
        yield server
    finally:
        if not quick:
            server.remove()


@cache
def _shared(make: Callable[[], Any]) -> Any:  # noqa: ANN401 - a cache knows no type variables
    return make()
