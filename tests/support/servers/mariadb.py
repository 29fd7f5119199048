"""MariaDB, with a data directory of the tests' own."""

from __future__ import annotations

import getpass
import os
import signal
from functools import cache
from itertools import count
from pathlib import Path

import pymysql

from tests.support.servers import Server, find_program, until

PLACES = ("/usr/sbin", "/usr/local/sbin")
# For PyMySQL, which else reads all certificates there are for each connection, in case the server
# has TLS; and it has none. That takes 25 ms of computing, and a connection a quarter of one.
PLAIN = {"ssl_disabled": True}
SETTINGS = {
    "bind-address": "127.0.0.1",
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-buffer-pool-size": "32M",
    "max-connections": "300",
}
# What a server must have that is followed, or may be one day; nothing of it is lost in a crash.
REPLICATED = {
    "innodb-flush-log-at-trx-commit": "1",
    "log-bin": "binlog",
    "binlog-format": "ROW",
    "sync-binlog": "1",
    "rpl-semi-sync-master-wait-point": "AFTER_SYNC",
    "rpl-semi-sync-master-timeout": "3600000",  # for ever: who has no replica acknowledges nothing
}


class Mariadb(Server):
    """One server, in which every store has a database of its own."""

    def __init__(self, *, on_disk: bool = False, **settings: str) -> None:
        self._program = find_program("mariadbd", *PLACES, package="mariadb-server")
        install = find_program("mariadb-install-db", *PLACES, package="mariadb-server")
        super().__init__("mariadb", on_disk=on_disk)
        self._numbers = count()
        self.data = self.directory / "data"
        self._user = f"--user={getpass.getuser()}" if os.getuid() == 0 else ""
        self.run(["cp", "-a", _made_once(install, self._user), self.data])
        self._settings = {**SETTINGS, **settings}
        self.start()

    def _as(self) -> list[str]:
        return [self._user] if self._user else []

    @property
    def url(self) -> str:
        """The server, without a database."""
        return f"mysql://root@127.0.0.1:{self.port}"

    def fresh_url(self) -> str:
        """A fresh store."""
        name = f"laws_{next(self._numbers)}"
        self.ask(f"create database {name}")
        # Without TLS, which it does not offer: to make ready for it takes longer than a law.
        return f"{self.url}/{name}?ssl=0"

    def ask(self, *statements: str) -> list[dict[str, object]]:
        """Perform *statements* as who may do everything; what the last one has found."""
        cursor = pymysql.cursors.DictCursor
        place = {"host": "127.0.0.1", "port": self.port, "user": "root", "autocommit": True}
        with pymysql.connect(**place, **PLAIN, cursorclass=cursor) as connection:
            for statement in statements:
                asked = connection.cursor()
                asked.execute(statement)
            return list(asked.fetchall())

    def replica(self) -> Mariadb:
        """Another server that has heard of everything before a commit here is acknowledged."""
        replica = Mariadb(**REPLICATED, **{"server-id": "2", "read-only": "1"})
        replica.ask(
            f"change master to master_host='127.0.0.1', master_port={self.port},"
            " master_user='root', master_use_gtid=slave_pos",
            "set global rpl_semi_sync_slave_enabled = 1",
            "start slave",
        )
        self.ask("set global rpl_semi_sync_master_enabled = 1")
        until(lambda: self.status("Rpl_semi_sync_master_clients") == "1")
        return replica

    def promote(self) -> None:
        """Make a replica the one that writes, when it has done all that it has heard of."""
        self.ask("stop slave io_thread")
        until(self._is_caught_up)
        self.ask("stop slave", "reset slave all", "set global read_only = 0")

    def _is_caught_up(self) -> bool:
        (status,) = self.ask("show slave status")
        return str(status["Slave_SQL_Running_State"]).startswith("Slave has read all relay log")

    def status(self, name: str) -> str:
        """One of the numbers that it keeps about itself."""
        (row,) = self.ask(f"show global status like '{name}'")
        return str(row["Value"])

    def start(self) -> None:
        """Start it, again where it has ended."""
        settings = [f"--{name}={value}".rstrip("=") for name, value in self._settings.items()]
        command = [self._program, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}"]
        command += [f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid"]
        self.launch([*command, *self._as(), *settings], self._is_ready)

    def stop(self) -> None:
        """End it as an operator does."""
        self.kill(signal.SIGTERM)

    def _is_ready(self) -> bool:
        return is_answered(self.port)


def is_answered(port: int) -> bool:
    """A server on *port* of the loopback accepts sessions."""
    try:
        pymysql.connect(host="127.0.0.1", port=port, user="root", **PLAIN).close()
    # Not `pymysql.err`: when Django uses PyMySQL as MySQLdb, that name is another module.
    except pymysql.OperationalError:
        return False
    return True


@cache
def _made_once(install: str, user: str) -> Path:
    """What the program *install* makes: a copy is there ten times as quickly as another."""
    place = Server("mariadb")
    options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
    data = place.directory / "made"
    place.run([install, "--no-defaults", *options, f"--datadir={data}", *([user] if user else [])])
    return data


@cache
def mariadb() -> Mariadb:
    """The one of this process."""
    return Mariadb()
