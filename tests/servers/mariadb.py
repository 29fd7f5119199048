"""MariaDB, with a data directory of the tests' own."""

from __future__ import annotations

import getpass
import os
import signal
from functools import cache
from itertools import count

import pymysql

from servers import Server, find_program

PLACES = ("/usr/sbin", "/usr/local/sbin")
SETTINGS = {
    "bind-address": "127.0.0.1",
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-buffer-pool-size": "32M",
    "max-connections": "300",
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
        options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        self.run([install, "--no-defaults", *options, f"--datadir={self.data}", *self._as()])
        self._settings = {**SETTINGS, **settings}
        self.start()

    def _as(self) -> list[str]:
        return [self._user] if self._user else []

    @property
    def url(self) -> str:
        """The server, without a database."""
        return f"mysql://root@127.0.0.1:{self.port}"

    def fresh_url(self) -> str:
        """A store that nobody has used."""
        name = f"laws_{next(self._numbers)}"
        with pymysql.connect(host="127.0.0.1", port=self.port, user="root") as connection:
            connection.cursor().execute(f"create database {name}")
        # Without TLS, which it does not offer: to make ready for it takes longer than a law.
        return f"{self.url}/{name}?ssl=0"

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
        try:
            pymysql.connect(host="127.0.0.1", port=self.port, user="root").close()
        except pymysql.err.OperationalError:
            return False
        return True


@cache
def mariadb() -> Mariadb:
    """The one of this process."""
    return Mariadb()
