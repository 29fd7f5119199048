"""Outboxes for the tests: in a SQLite file and in PostgreSQL, with a clock that tests move."""

import asyncio
import sqlite3

import psycopg
import pytest

import coatcheck.client.httpx
import coatcheck.client.httpx2
import coatcheck.client.requests
from coatcheck.client import Clock, RetryPolicy
from coatcheck.client.outbox import Outbox
from tests.support.servers.postgres import postgres

CLIENTS = {
    "httpx2": coatcheck.client.httpx2.Client,
    "httpx": coatcheck.client.httpx.Client,
    "requests": coatcheck.client.requests.Session,
}


def rows_of(url):
    """Every row of an outbox."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        try:
            return connection.execute("select * from coatcheck_outbox").fetchall()
        finally:
            connection.close()
    bare, _, schema = url.partition("?schema=")
    with psycopg.connect(bare) as connection:
        return connection.execute(f"select * from {schema}.coatcheck_outbox").fetchall()


def stored_bytes(url):
    """Everything that an outbox has stored."""
    return b" ".join(
        value if isinstance(value, bytes) else str(value).encode()
        for row in rows_of(url)
        for value in row
    )


class WallTime:
    """A clock that only pauses and tests move."""

    def __init__(self):
        self.now_s = 1_700_000_000.0
        self.clock = Clock(
            lambda: self.now_s, lambda: self.now_s, lambda: 1.0, self.advance, self.async_sleep
        )

    def advance(self, seconds):
        self.now_s += seconds

    async def async_sleep(self, seconds):
        self.now_s += seconds
        await asyncio.sleep(0)


@pytest.fixture
def time():
    return WallTime()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return postgres().fresh_url()
    return f"sqlite:///{tmp_path}/outbox.db"


@pytest.fixture
def make(url, time):
    """Makes an outbox of the file, with a client of one library."""
    opened = []

    def made(kind="httpx2", *, retry=None, **options):
        retry = retry or RetryPolicy(attempts_max=2)
        client = CLIENTS[kind](clock=time.clock, retry=retry)
        outbox = Outbox(url, client=client, **options)
        opened.extend([client, outbox])
        return outbox

    yield made
    for one in opened:
        one.close()
