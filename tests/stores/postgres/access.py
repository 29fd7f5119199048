"""One PostgreSQL store, used by threads or from an event loop, behind the same methods."""

import asyncio
from contextlib import contextmanager

import psycopg

from coatcheck.stores import open_store
from tests.support.servers import START_S_MAX


@contextmanager
def session(url, **settings):
    """A session of another client, on the same tables."""
    bare, _, schema = url.partition("?schema=")
    with psycopg.connect(bare, **settings) as connection:
        connection.execute(f"set search_path to {schema.partition('&')[0] or 'public'}")
        connection.commit()
        yield connection


def sessions_of(url, application_name):
    """The process ids of the sessions that a store has at the server."""
    with session(url) as other:
        named = "select pid from pg_stat_activity where application_name = %s"
        return {pid for (pid,) in other.execute(named, (application_name,)).fetchall()}


def the_error(store):
    """The one finding of the doctor that is an error."""
    (message,) = [finding.message for finding in store.check() if finding.level == "error"]
    return message


class FromThread:
    """A store that is used in this thread."""

    def __init__(self, url):
        self.store = open_store(url)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.store.close()

    def swap(self, *swaps):
        return list(self.store.swap(swaps))

    def get(self, *ids):
        return list(self.store.get(ids))

    def fetch_on_writer(self, statement):
        """The rows of *statement*, in the session that the last swap has used."""
        with self.store._writer as connection:
            return connection.fetch(statement)

    def execute_on_writer(self, statement):
        """The same for what the driver must not notice."""
        with self.store._writer as connection:
            connection.execute(statement)


class FromLoop(FromThread):
    """A store that is used from an event loop, which runs only during a call."""

    def __init__(self, url, new_loop=asyncio.new_event_loop):
        super().__init__(url)
        self.runner = asyncio.Runner(loop_factory=new_loop)
        self.backend = self.runner.run(self._backend())

    async def _backend(self):
        return self.store.async_backend()

    def __exit__(self, *_error):
        self.runner.run(self.backend.close())
        self.runner.close()
        self.store.close()

    def run(self, call):
        async def bounded():
            async with asyncio.timeout(START_S_MAX):
                return list(await call)

        return self.runner.run(bounded())

    def swap(self, *swaps):
        return self.run(self.backend.swap(swaps))

    def get(self, *ids):
        return self.run(self.backend.get(ids))

    def fetch_on_writer(self, statement):
        return self.run(self.backend._idle[-1].fetch(statement))

    def execute_on_writer(self, statement):
        return self.run(self.backend._idle[-1].execute(statement))


WAYS = {"thread": FromThread, "loop": FromLoop}
