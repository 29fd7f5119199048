"""A store with records, and the command line on it."""

import json

import pytest

import coatcheck
from coatcheck.cli import main
from coatcheck.core.key import reference_of
from coatcheck.core.record import COMPLETED, Record, Swap
from coatcheck.stores import Query
from tests.support.servers.postgres import postgres

HOUR_MS = 3_600_000


class Records:
    """A store, with the records that a test needs, and commands on it."""

    def __init__(self, url, capsys):
        self.url = url
        self._capsys = capsys
        self.store = coatcheck.open_store(url)
        self.now_ms = self.store.now_ms()

    def put(self, number: int, **changes) -> str:
        """Store a record that is two hours old; return its reference."""
        created_ms = self.now_ms - 2 * HOUR_MS
        record = Record(
            id=bytes([number]) * 16,
            version=created_ms,
            state=COMPLETED,
            attempt=1,
            fingerprint=b"f" * 16,
            created_ms=created_ms,
            lease_until_ms=0,
            window_until_ms=created_ms + 24 * HOUR_MS,
            expires_ms=created_ms + 25 * HOUR_MS,
            nonce=number,
            label="POST /orders",
            scope="5c0be5c0be5c0be0",
            key=f"key-{number}-of-the-client",
            progress=None,
            response=None,
        )._replace(**changes)
        assert list(self.store.swap([Swap(record.id, 0, record)])) == [None]
        return reference_of(record.id)

    def all(self) -> list[Record]:
        return list(self.store.find(Query()).records)

    def only(self) -> Record:
        (record,) = self.all()
        return record

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run a command on this store; return its exit code, standard output and error."""
        code = main([*words, "--store", self.url])
        output = self._capsys.readouterr()
        return code, output.out, output.err

    def json(self, *words: str):
        """Run a command with --json; return the document."""
        return json.loads(self.run(*words, "--json")[1])


@pytest.fixture
def records(tmp_path, capsys):
    opened = Records(f"sqlite:///{tmp_path}/records.db", capsys)
    yield opened
    opened.store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def shared(request, tmp_path, capsys):
    """The same on two stores."""
    url = f"sqlite:///{tmp_path}/records.db"
    opened = Records(postgres().fresh_url() if request.param == "postgres" else url, capsys)
    yield opened
    opened.store.close()
