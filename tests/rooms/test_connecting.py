"""Which event loops have connections of their own."""

import asyncio

import pytest
from laws.records import ID, claim_of
from servers.mariadb import mariadb
from servers.postgres import postgres
from servers.redis import redis_server

from coatcheck.core.record import Swap
from coatcheck.stores import open_async_store


class Deaf(asyncio.SelectorEventLoop):
    """A loop that tells nobody when a socket can be read, as Windows has it."""

    add_reader = asyncio.AbstractEventLoop.add_reader


@pytest.mark.parametrize("server", [redis_server, mariadb, postgres])
def test_a_loop_that_cannot_watch_sockets_has_a_thread(server):
    """L1: and nobody notices."""

    async def story() -> None:
        store = open_async_store(server().fresh_url())
        assert await store.swap([Swap(ID, 0, claim_of())]) == [None]
        assert await store.get([ID]) == [claim_of()]
        await store.close()

    with asyncio.Runner(loop_factory=Deaf) as runner:
        runner.run(story())
