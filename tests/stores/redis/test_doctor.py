"""What the doctor finds by running the commands that requests and operators need."""

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coatcheck import Engine
from coatcheck.core.record import completed
from coatcheck.stores import Query, open_store
from tests.stores.laws.records import claim_of
from tests.stores.redis.scenes import change, claim, claims
from tests.support.servers.redis import Cluster, Redis

PAGE = Path(__file__).parents[3] / "docs" / "stores" / "redis.md"
NEEDED = ("SET", "GET", "GETRANGE", "DEL", "MGET", "EVAL", "EVALSHA", "TIME", "SCAN")


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    """A server for all tests here; each has a user of its own."""
    server = Redis()
    yield server
    server.remove()


def errors_at(url: str) -> list[str]:
    """Return the errors that the doctor finds."""
    with closing(open_store(url)) as store:
        return [finding.message for finding in store.check() if finding.level == "error"]


def as_user(server: Redis, *rights: str) -> str:
    """Create a user with these *rights*; return its URL."""
    name = os.urandom(4).hex()
    server.ask("ACL", "SETUSER", name, "on", ">pw", *rights)
    return f"redis://{name}:pw@127.0.0.1:{server.port}/0"


def documented() -> list[str]:
    """Return the rights of a user, as the page has them."""
    _, _, rest = PAGE.read_text().partition("\nACL SETUSER coatcheck on >PASSWORD ")
    return rest.partition("\n")[0].split()


@pytest.mark.parametrize("command", NEEDED)
def test_a_command_that_the_user_may_not_use_is_named(server, command):
    """D3, O1: and no other; so each right that the page names is needed."""
    rights = documented()
    assert f"+{command.lower()}" in rights
    url = as_user(server, *(right for right in rights if right != f"+{command.lower()}"))
    named = [message.partition(" ")[0] for message in errors_at(url)]
    assert command in named
    # A script that writes needs what is in it.
    assert set(named) <= {command, "EVAL", "EVALSHA"}


def test_keys_that_the_user_may_not_use_are_an_error(server):
    """D3, O1."""
    assert errors_at(as_user(server, "~other:*", "allchannels", "+@all"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_replicas_to_write": "1"}, "SET does not work: .*NOREPLICAS"),
        ({"maxmemory": "1mb"}, "SET does not work: .*OOM"),
        ({"rename_command": "GETRANGE MYGETRANGE"}, "GETRANGE does not work"),
    ],
)
def test_a_server_that_refuses_commands_is_an_error(settings, said):
    """D3, O1: whatever the reason is."""
    server = Redis(**settings)
    try:
        assert re.search(said, "\n".join(errors_at(server.url)))
    finally:
        server.remove()


def test_a_replica_that_does_not_acknowledge_is_an_error(server):
    """D3, O1: once, not for each command."""
    (message,) = errors_at(f"{server.url}?wait=1&timeout=1s")
    assert "the write reached 0 replicas" in message


def test_one_master_of_a_cluster_that_refuses_writes_is_named():
    """D3, O1: the doctor writes to each of them."""
    cluster = Cluster(down_after_ms=60_000)
    try:
        assert errors_at(cluster.url) == []
        full = cluster.masters[2]
        full.ask("CONFIG", "SET", "maxmemory", "1mb")
        messages = errors_at(cluster.url)
        assert any("SET does not work" in m and "OOM" in m for m in messages), messages
        assert sum(node.ask("DBSIZE") for node in cluster.masters) == 0
    finally:
        cluster.remove()


def test_the_doctor_leaves_nothing_behind(server):
    """D3: no record."""
    with closing(open_store(server.url)) as store:
        before = server.ask("DBSIZE")
        assert not [finding for finding in store.check() if finding.level != "ok"]
        assert server.ask("DBSIZE") == before


def test_the_rights_that_the_page_names_are_enough(server, opened):
    """D3: for everything that requests and operators need."""
    url = as_user(server, *documented())
    one, two = claims(0, 2)
    done = completed(one, b"201")
    server.ask("FLUSHALL")
    with closing(opened(url)) as store:
        assert store.swap([claim(one), claim(two)]) == [None, None]
        assert store.swap([claim(claim_of())]) in ([None], [claim_of()])
        assert store.swap([change(one, done), change(two, None)]) == [None, None]
        assert store.get([one.id, two.id]) == [done, None]
        assert done in store.find(Query()).records
        assert store.now_ms()
        assert {finding.level for finding in store.check()} == {"ok"}
    with Engine(url) as engine:
        assert engine.run("k", lambda: 1, scope="s") == engine.run("k", lambda: 2, scope="s") == 1
