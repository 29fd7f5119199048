"""Bodies: every attempt sends the same bytes, whatever the application gave."""

import asyncio
import io

import pytest

from coatcheck.client import RetryPolicy, body
from coatcheck.client.body import BodyCopy, BodyReader, copied
from coatcheck.client.httpx2 import AsyncClient, Client
from coatcheck.errors import BodyNotRepeatable
from tests.client.drivers import DRIVERS, FakeTime
from tests.support.faulty_server import FaultyServer

on_all = pytest.mark.parametrize("driver", DRIVERS, ids=repr)
SMALL, LARGE = b"a" * 1_000, b"0123456789abcdef" * 100_000


def pieces(content):
    return (content[place : place + 50_000] for place in range(0, len(content), 50_000))


async def async_pieces(content):
    for piece in pieces(content):
        yield piece


@on_all
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_generator_is_read_once_and_sent_again(driver, content):
    """C2: from 1 MiB on it is kept in a temporary file."""
    given = async_pieces(content) if driver.is_async else pieces(content)
    with FaultyServer("lose", "half") as server:
        got = driver.post(f"{server.url}/upload", content=given)
    assert got.status == 201
    assert [seen.body == content for seen in server.seen] == [True] * 3
    assert len(server.effects) == 1


@on_all
@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_is_read_once_and_sent_again(driver, content, tmp_path):
    """C2: also if the file changes between two attempts."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with path.open("rb") as file, FaultyServer("lose") as server:
        options = (
            {"data": file} if driver.is_aiohttp or driver.is_requests else {"files": {"file": file}}
        )
        got = driver.post(f"{server.url}/upload", **options)
    assert got.status == 201
    assert content in server.seen[0].body
    assert server.seen[0].body == server.seen[1].body
    kinds = {seen.headers.get("Content-Type") for seen in server.seen}
    assert len(kinds) == 1


def test_a_request_that_is_sent_once_is_not_copied(monkeypatch):
    monkeypatch.setattr(body, "BODY_BYTES_MAX", 0)
    monkeypatch.setattr(BodyCopy.__init__, "__defaults__", (0,))
    with FaultyServer() as server, Client(base_url=server.url) as client:
        with client.action(send_key=False) as action:
            assert action.post("/upload", content=pieces(SMALL)).status_code == 201
        with client.action(retry=RetryPolicy(attempts_max=1)) as action:
            assert action.post("/upload", content=pieces(SMALL)).status_code == 201
        with pytest.raises(BodyNotRepeatable, match="more than 0 bytes"):
            client.post("/upload", content=pieces(SMALL))
    assert len(server.seen) == 2


def test_a_disk_that_is_full_is_a_clear_error(monkeypatch):
    copy = BodyCopy()

    class Full(io.BytesIO):
        def write(self, _chunk):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(copy, "_file", Full())
    with pytest.raises(BodyNotRepeatable, match="No space left"):
        copy.add(b"x")


def test_a_copy_is_read_in_parts_as_a_file():
    reader = BodyReader(copied(pieces(LARGE)))
    assert reader.read(10) == LARGE[:10]
    assert reader.read(100_000) == LARGE[10:100_010]
    assert reader.read() == LARGE[100_010:]
    assert reader.read(5) == b""


def test_a_streamed_response_reaches_the_caller_as_a_stream():
    time = FakeTime()
    with (
        FaultyServer((503, {}, {})) as server,
        Client(base_url=server.url, clock=time.clock) as client,
        client.stream("POST", "/charges") as response,
    ):
        assert response.status_code == 201
        assert not response.is_stream_consumed
        assert b"".join(response.iter_raw()) == b'{"charge": 1}'

    async def streamed(url):
        client = AsyncClient(base_url=url, clock=time.clock)
        async with client, client.stream("POST", "/charges") as response:
            return await response.aread()

    with FaultyServer((503, {}, {})) as server:
        assert asyncio.run(streamed(server.url)) == b'{"charge": 1}'


@pytest.mark.parametrize("driver", [d for d in DRIVERS if "transport" in d.name], ids=repr)
def test_a_transport_reads_only_what_it_may(driver):
    """A server-sent stream has no end; nor is a response read that the caller wants to stream."""
    events = (200, {"Content-Type": "text/event-stream"}, b"data: 1\n\n")
    for options in ({}, {"buffer": False}):
        with FaultyServer(events) as server:
            got = driver.post(f"{server.url}/events", **options)
        assert (got.status, got.body) == (200, b"data: 1\n\n")
