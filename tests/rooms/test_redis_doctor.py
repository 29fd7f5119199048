"""What the doctor finds out about a Redis by doing what requests and operators do."""

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from laws.records import claim_of
from redis_scenes import WiredStore, change, claim, claims
from servers import until
from servers.redis import Cluster, Redis

from coatcheck import Engine
from coatcheck.core.record import completed
from coatcheck.stores import Query, open_store
from coatcheck.stores.contract import bell_of

PAGE = Path(__file__).parents[2] / "docs" / "stores" / "redis.md"
NEEDED = ("SET", "GET", "GETRANGE", "DEL", "MGET", "EVAL", "EVALSHA", "TIME", "SCAN")
OF_THE_BELL = ("SUBSCRIBE", "PUBLISH")


@pytest.fixture
def server() -> Iterator[Redis]:
    server = Redis()
    yield server
    server.remove()


def errors_at(url: str) -> list[str]:
    """What the doctor calls an error."""
    with closing(open_store(url)) as store:
        return [finding.message for finding in store.check() if finding.level == "error"]


def as_user(server: Redis, *rights: str) -> str:
    """The URL of a user with these *rights*."""
    name = os.urandom(4).hex()
    server.ask("ACL", "SETUSER", name, "on", ">pw", *rights)
    return f"redis://{name}:pw@127.0.0.1:{server.port}/0"


def documented() -> list[str]:
    """The rights of a user, as the page has them."""
    _, _, rest = PAGE.read_text().partition("\nACL SETUSER coatcheck on >PASSWORD ")
    return rest.partition("\n")[0].split()


@pytest.mark.parametrize("command", [*NEEDED, *OF_THE_BELL])
def test_a_command_that_the_user_may_not_use_is_named(server, command):
    """D3, O1: as an error, and it is the only one that is named."""
    url = as_user(server, "allkeys", "allchannels", "+@all", f"-{command}")
    named = [message.partition(" ")[0] for message in errors_at(url)]
    assert command in named
    # A script that writes needs what is in it.
    assert set(named) <= {command, "EVAL", "EVALSHA"}


def test_keys_or_channels_that_the_user_may_not_use_are_an_error(server):
    """D3, O1."""
    assert errors_at(as_user(server, "~other:*", "allchannels", "+@all"))
    assert errors_at(as_user(server, "allkeys", "resetchannels", "+@all"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_replicas_to_write": "1"}, "SET does not work: .*NOREPLICAS"),
        ({"maxmemory": "1mb"}, "SET does not work: .*OOM"),
        ({"rename_command": "TIME MYTIME"}, "TIME does not work"),
        ({"rename_command": "GETRANGE MYGETRANGE"}, "GETRANGE does not work"),
    ],
)
def test_a_server_that_would_take_nothing_is_an_error(settings, said):
    """D3, O1: whatever the reason is."""
    server = Redis(**settings)
    try:
        assert re.search(said, "\n".join(errors_at(server.url)))
    finally:
        server.remove()


def test_a_replica_that_is_waited_for_in_vain_is_an_error(server):
    """D3, O1: once, not for each command."""
    (message,) = errors_at(f"{server.url}?wait=1&timeout=1s")
    assert "acknowledged by 0 replicas" in message


def test_one_master_of_a_cluster_that_takes_nothing_is_named():
    """D3, O1: a probe goes to each of them."""
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
    """D3: neither a record nor a subscriber; and it wakes nobody in vain."""
    with closing(open_store(server.url)) as store, closing(open_store(server.url)) as other:
        bell = bell_of(other)
        assert bell is not None
        bell.open()
        assert not [finding for finding in store.check() if finding.level != "ok"]
        assert server.ask("DBSIZE") == 0
        until(lambda: server.ask("PUBSUB", "NUMSUB", "coatcheck:bell:0")[1] == 1)
        assert not "".join(bell.heard())
        bell.close()


@pytest.mark.parametrize("opened", [open_store, WiredStore], ids=["line", "wire"])
def test_the_rights_that_the_page_names_are_enough(server, opened):
    """D3: a user that has just these may do all that requests and operators need."""
    url = as_user(server, *documented())
    one, two = claims(0, 2)
    done = completed(one, b"201")
    with closing(opened(url)) as store:
        assert store.swap([claim(one), claim(two)]) == [None, None]
        assert store.swap([claim(claim_of())]) in ([None], [claim_of()])
        assert store.swap([change(one, done), change(two, None)]) == [None, None]
        assert store.get([one.id, two.id]) == [done, None]
        assert done in store.find(Query()).records
        assert store.now_ms()
        assert {finding.level for finding in store.check()} == {"ok"}
        bell = bell_of(store)
        assert bell is not None
        bell.open()
        bell.ring("words")
        bell.ping()
        assert [*bell.heard()] == ["words"]
        bell.close()
    with Engine(url) as engine:
        assert engine.run("k", lambda: 1, scope="s") == engine.run("k", lambda: 2, scope="s") == 1


@pytest.mark.parametrize("command", [*NEEDED, *OF_THE_BELL])
def test_the_rights_that_the_page_names_are_needed(server, command):
    """D3: who has one of them less is told so by the doctor."""
    rights = documented()
    assert f"+{command.lower()}" in rights
    assert errors_at(
        as_user(server, *(right for right in rights if right != f"+{command.lower()}"))
    )
