"""PgBouncer in transaction mode, before a PostgreSQL of the tests'."""

from __future__ import annotations

import psycopg

from tests.support.servers import Server, find_program
from tests.support.servers.postgres import Postgres


class Pgbouncer(Server):
    """Few sessions for many clients: a client's next statement may meet another session."""

    def __init__(self, behind: Postgres, sessions: int) -> None:
        program = find_program("pgbouncer", "/usr/sbin", package="pgbouncer")
        super().__init__("pgbouncer", user="postgres")
        (self.directory / "users").write_text('"postgres" ""\n')
        settings = self.directory / "settings.ini"
        settings.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={behind.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\n"
            "unix_socket_dir =\npool_mode = transaction\nauth_type = trust\n"
            f"auth_file = {self.directory}/users\ndefault_pool_size = {sessions}\n"
            "ignore_startup_parameters = extra_float_digits\n"
        )
        self.launch([program, settings], self._is_ready)

    @property
    def url(self) -> str:
        """The database behind it."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True
