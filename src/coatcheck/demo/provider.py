"""The payment provider: POST /charges takes money, and its ledger is what the demo counts.

    python -m coatcheck.demo.provider DIRECTORY GUARD

Every charge that is executed becomes one row, and nothing else does; whether an order was charged
twice is read from there and from nowhere else.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from coatcheck.demo.serving import endpoint, guarded, serve

DATABASE = "provider.db"

# 20 ms: what a card network that answers at once would take.
CARD_S = 0.02
# 30 s: the provider lives through the whole demo, so nobody ever has to take over from it.
LEASE = "30s"
# 10 s: as patient as whoever waits for the answer.
_BUSY_S_MAX = 10.0


class Ledger:
    """The table of charges, in the same file in which the guard keeps its records."""

    def __init__(self, directory: Path) -> None:
        self._mutex = threading.Lock()
        self._connection = sqlite3.connect(
            directory / DATABASE, timeout=_BUSY_S_MAX, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = full")
        self._connection.execute(
            "create table if not exists charges"
            " (id integer primary key, order_name text not null, cents integer not null)"
        )

    def charge(self, order_name: str, cents: int) -> int:
        """Take the money; the number of the charge."""
        statement = "insert into charges (order_name, cents) values (?, ?)"
        with self._mutex:
            number = self._connection.execute(statement, (order_name, cents)).lastrowid
        assert number is not None
        return number

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


def charges_in(directory: Path) -> list[tuple[str, int]]:
    """Every charge in the ledger of *directory*, as (order, cents), in the order they happened."""
    address = f"{(directory / DATABASE).resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=_BUSY_S_MAX)) as connection:
        return connection.execute("select order_name, cents from charges order by id").fetchall()


def main(directory: Path, guard: str) -> None:
    """Serve POST /charges."""
    ledger = Ledger(directory)

    def charge(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        time.sleep(CARD_S)
        return 201, {"charge": ledger.charge(asked["order"], asked["cents"])}

    serve(guarded(endpoint("/charges", charge), guard, directory / DATABASE, lease=LEASE))
    ledger.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
