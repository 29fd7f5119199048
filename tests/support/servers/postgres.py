"""PostgreSQL, made by `initdb` for the tests alone."""

from __future__ import annotations

import signal
from functools import cache
from itertools import count
from pathlib import Path

import psycopg

from tests.support.servers import Server, find_program, until

PLACES = tuple(f"/usr/lib/postgresql/{version}/bin" for version in range(30, 12, -1))
# Killing the server proves what a crash leaves; a power cut is for its makers to prove.
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "dynamic_shared_memory_type": "mmap",  # in its directory, so that it goes with it
    "fsync": "off",
    "max_connections": "300",
    "shared_buffers": "32MB",
    "unix_socket_directories": "",
}


class Postgres(Server):
    """One cluster with one database, in which every store has a schema of its own."""

    def __init__(self, *, on_disk: bool = False, **settings: str) -> None:
        self._bin = find_program("initdb", *PLACES, package="postgresql").removesuffix("initdb")
        super().__init__("postgres", user="postgres", on_disk=on_disk)
        self._numbers = count()
        self.data = self.directory / "data"
        self._settings = {**SETTINGS, **settings}
        self._make()
        self.start()

    def _make(self) -> None:
        self.run(["cp", "-a", _made_once(self._bin), self.data])

    @property
    def url(self) -> str:
        """The database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def fresh_url(self) -> str:
        """A fresh store."""
        return f"{self.url}?schema=laws_{next(self._numbers)}"

    def fresh_database(self) -> str:
        """The URL of an empty database."""
        name = f"database_{next(self._numbers)}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"create database {name}")
        return self.url.removesuffix("postgres") + name

    def start(self) -> None:
        """Start it, again where it has ended."""
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        command = [f"{self._bin}postgres", "-D", self.data, "-p", str(self.port), *settings]
        self.launch(command, self._is_ready)

    def standby(self) -> Postgres:
        """Another server that has everything before a commit here is acknowledged."""
        return _Standby(self)

    def promote(self) -> None:
        """Make a standby the one that writes."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("select pg_promote()")

    def stop(self) -> None:
        """End it as an operator does who does not wait for clients."""
        self.kill(signal.SIGINT)

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


class _Standby(Postgres):
    """A copy of *primary* that follows it."""

    def __init__(self, primary: Postgres) -> None:
        self._primary = primary
        super().__init__(hot_standby="on")
        with psycopg.connect(primary.url, autocommit=True) as connection:
            connection.execute("alter system set synchronous_standby_names = '*'")
            connection.execute("select pg_reload_conf()")
            until(lambda: sync_states(connection) == ["sync"])

    def _make(self) -> None:
        where = ["-h", "127.0.0.1", "-p", str(self._primary.port), "-U", "postgres"]
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        self.run([f"{self._bin}pg_basebackup", *where, *options, "-D", self.data])


@cache
def _made_once(directory: str) -> Path:
    """What `initdb` of that *directory* makes: a copy is there ten times as quickly as another."""
    place = Server("postgres", user="postgres")
    options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-sync"]
    data = place.directory / "made"
    place.run([f"{directory}initdb", *options, "--locale=C.UTF-8", "-D", data])
    return data


def sync_states(connection: psycopg.Connection) -> list[str]:
    """How each standby follows: only what "sync" ones have is acknowledged."""
    asked = connection.execute("select sync_state from pg_stat_replication")
    return [state for (state,) in asked.fetchall()]


@cache
def postgres() -> Postgres:
    """The one of this process."""
    return Postgres()
