"""Traps that others fell into, in real servers: streams, codings, tasks, errors in the middle (L2, L12).

Each test uses names of its own. A retry is sent to each of a server's processes: to the one that
may answer from memory, and to the one that has to read the store.
"""

import gzip
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from itertools import count
from typing import Any

import pytest

from tests.server.web_app import BINARY, KEPT_PARTS, PART, STREAMED_PARTS, TAG, TEXT
from tests.support.http import Response
from tests.support.servers import until
from tests.support.web_servers import KINDS, Connection, Server, in_two_processes, request_of

# gunicorn with one thread keeps no connection, by which a retry finds each of its processes.
SERVERS = [kind for kind in KINDS if kind.name != "gunicorn-sync"]
pytestmark = pytest.mark.parametrize(
    "web_server", SERVERS, indirect=True, ids=lambda kind: kind.name, scope="session"
)
NUMBERS = count()


class Traps:
    """A server with the application of `tests/server/web_app.py`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def ask(self, method: str, path: str, headers: str = "", body: bytes = b"") -> "Asking":
        return Asking(self, request_of(method, path, headers, body), method)

    def post(self, path: str, headers: str = "", body: bytes = b"{}") -> "Asking":
        """With a key that is the name of the request."""
        name = path.partition("?name=")[2]
        return self.ask("POST", path, f"Idempotency-Key: {name}\r\n{headers}", body)

    def open_gate(self, name: str) -> None:
        assert self.exchange("POST", f"/bare/open?name={name}").body == b"open"

    def events(self, name: str) -> list[str]:
        lines = [line.split() for line in self.lines_of("events")]
        return [event for found, event in lines if found == name]

    def runs(self, name: str) -> int:
        return self.events(name).count("ran")


class Asking:
    """One request, which can be sent again and again."""

    def __init__(self, server: Traps, request: bytes, method: str) -> None:
        self._server = server
        self._request = request
        self._has_body = method != "HEAD"

    def once(self) -> Response:
        """Its answer, on a connection of its own."""
        with self.begun() as connection:
            return connection.read(has_body=self._has_body)

    @contextmanager
    def begun(self) -> Iterator[Connection]:
        with closing(self._server.connect()) as connection:
            connection.send(self._request)
            yield connection

    def everywhere(self) -> list[Response]:
        """Its answers from every process of the server."""
        if self._server.kind.processes == 1:
            return [self.once(), self.once()]
        one, other = in_two_processes(self._server)
        with closing(one), closing(other):
            return [self._on(one), self._on(other)]

    def _on(self, connection: Connection) -> Response:
        connection.send(self._request)
        return connection.read(has_body=self._has_body)


@pytest.fixture
def server(web_server: Traps) -> Traps:
    return Traps(web_server)


@pytest.fixture
def name() -> str:
    return f"name-{next(NUMBERS)}"


def assert_replays(first: Response, retries: list[Response]) -> None:
    """Each is the first answer, but for what speaks of one message or one client."""
    assert len(retries) == 2
    for retry in retries:
        assert (retry.status, retry.body) == (first.status, first.body)
        assert retry.is_replay
        assert retry.reference == first.reference
        assert retry.header("content-type") == first.header("content-type")
        assert retry.all("set-cookie") == []


# --- answers in parts -----------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["guarded", "base", "based"])
def test_an_answer_in_parts_is_kept_whole(server: Traps, name: str, stack: str):
    """L2, L12: also where a `BaseHTTPMiddleware` inside or outside cuts it; cookies come once."""
    if server.kind.flavour == "wsgi" and stack != "guarded":
        return
    asking = server.post(f"/{stack}/in-parts?name={name}")
    first = asking.once()
    assert (first.status, first.body) == (201, TEXT)
    assert first.all("set-cookie") == ["a=1; Path=/", "b=2; Path=/; HttpOnly"]
    retries = asking.everywhere()
    assert_replays(first, retries)
    assert {tuple(one.all("x-seen")) for one in (first, *retries)} == (
        {()} if stack == "guarded" else {("1",)}
    )
    assert server.runs(name) == 1


def test_binary_bodies_arrive_byte_by_byte(server: Traps, name: str):
    """F1, L2: every byte there is, in both directions; and what looks like the end of a chunk."""
    asking = server.post(f"/guarded/binary?name={name}", body=BINARY[::-1])
    first = asking.once()
    assert first.header("x-sha256") == sha256(BINARY[::-1]).hexdigest()
    assert first.body == BINARY
    assert_replays(first, asking.everywhere())
    other = server.post(f"/guarded/binary?name={name}", body=BINARY).once()
    assert other.code == "key-reused"
    assert server.runs(name) == 1


def test_a_large_body_that_is_made_while_it_is_sent_is_kept(server: Traps, name: str):
    """L2, L12: a megabyte, from a generator."""
    asking = server.post(f"/guarded/large?name={name}")
    first = asking.once()
    assert first.body == PART * KEPT_PARTS
    assert_replays(first, asking.everywhere())
    assert server.runs(name) == 1


def test_what_is_too_large_to_be_kept_is_not_held_up(server: Traps, name: str):
    """L12, X2: it reaches the first client as it is made; a retry gets a clear problem, and runs nothing."""
    asking = server.post(f"/guarded/too-large?name={name}")
    head, body = read_through_the_gate(server, name, asking, PART * STREAMED_PARTS)
    assert (head.status, body) == (201, PART * (STREAMED_PARTS + 1))
    assert head.reference
    assert_over(asking.everywhere(), "result-unavailable")
    assert server.runs(name) == 1


def read_through_the_gate(
    server: Traps, name: str, asking: Asking, before: bytes
) -> tuple[Response, bytes]:
    """Read what comes *before* the gate, open it with another request, and read the rest."""
    with asking.begun() as connection:
        head = connection.read_head()
        parts = connection.parts_of(head)
        read = b""
        while len(read) < len(before):
            read += next(parts)
        assert read == before
        assert server.events(name) == ["ran"], "the rest was made before this arrived"
        server.open_gate(name)
        return head, read + b"".join(parts)


def assert_over(answers: list[Response], code: str) -> None:
    """It is over, and a retry would change nothing."""
    assert len(answers) == 2
    for answer in answers:
        assert (answer.status, answer.code, answer.problem["retry"]) == (409, code, "never")


# --- what is not ours -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "first"), [("events", b"data: 1\n\n"), ("download", PART)], ids=["events", "download"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_streams_that_are_not_guarded_pass_untouched(
    server: Traps, name: str, method: str, what: str, first: bytes
):
    """S3, L12: the first part arrives before the last is made, and all is as without us."""
    key = f"Idempotency-Key: {name}\r\n" if method == "GET" else ""
    asking = server.ask(method, f"/guarded/{what}?name={name}", key)
    head, body = read_through_the_gate(server, name, asking, first)
    bare = server.ask(method, f"/bare/{what}?name={name}", key).once()
    assert (head.status, body) == (200, bare.body)
    assert undated(head) == undated(bare)
    assert server.runs(name) == 2


def undated(response: Response) -> list[tuple[str, str]]:
    return sorted(header for header in response.headers if header[0] != "date")


def test_events_with_a_key_are_not_held_up(server: Traps, name: str):
    """L12: they can never be kept, and the record says so."""
    asking = server.post(f"/guarded/events?name={name}")
    head, body = read_through_the_gate(server, name, asking, b"data: 1\n\n")
    assert (head.status, body) == (200, b"data: 1\n\ndata: 2\n\n")
    assert_over(asking.everywhere(), "result-unavailable")
    assert server.runs(name) == 1


def test_an_endless_stream_ends_when_its_client_leaves(server: Traps, name: str):
    """L11, L12: and nothing runs for a retry."""
    asking = server.post(f"/guarded/endless?name={name}")
    with asking.begun() as connection:
        next(connection.parts_of(connection.read_head()))
        connection.hang_up()
    until(lambda: "left" in server.events(name))
    assert_over(asking.everywhere(), "result-unavailable")
    assert server.runs(name) == 1


def test_head_passes_through_untouched(server: Traps, name: str):
    """S3: with the length of what it does not bring; each time anew."""
    key = f"Idempotency-Key: {name}\r\n"
    asking = server.ask("HEAD", f"/guarded/page?name={name}", key)
    bare = server.ask("HEAD", f"/bare/page?name={name}", key).once()
    assert (bare.status, bare.header("content-length")) == (200, str(len(TEXT)))
    for head in asking.everywhere():
        assert (head.status, undated(head)) == (200, undated(bare))
    assert server.runs(name) == 3
    assert_in_order(server, request_of("HEAD", f"/guarded/page?name={name}", key), has_body=False)


def test_not_modified_passes_through_untouched(server: Traps, name: str):
    """S3: what a cache asks has nothing to do with us, key or not."""
    headers = f"Idempotency-Key: {name}\r\nIf-None-Match: {TAG}\r\n"
    bare = server.ask("GET", f"/bare/page?name={name}", headers).once()
    for response in server.ask("GET", f"/guarded/page?name={name}", headers).everywhere():
        assert (response.status, response.header("etag")) == (304, TAG)
        assert undated(response) == undated(bare)
    assert server.runs(name) == 3


def test_not_modified_is_an_answer_like_any_other(server: Traps, name: str):
    """L2: replayed without a body, and without the length of one."""
    path = f"/guarded/unchanged?name={name}"
    first = server.post(path).once()
    assert (first.status, first.header("etag")) == (304, TAG)
    assert first.header("content-length") == ("0" if server.kind.name == "wsgiref" else None)
    for retry in server.post(path).everywhere():
        assert (retry.status, retry.is_replay, retry.header("etag")) == (304, True, TAG)
        assert retry.all("content-length") == first.all("content-length")
        assert retry.all("transfer-encoding") == []
    assert server.runs(name) == 1
    assert_in_order(server, request_of("POST", path, f"Idempotency-Key: {name}\r\n", b"{}"))


def assert_in_order(server: Traps, request: bytes, *, has_body: bool = True) -> None:
    """What follows *request* on its connection is the next answer, or the connection's end."""
    with closing(server.connect()) as connection:
        connection.send(request)
        response = connection.read(has_body=has_body)
        if response.header("connection") == "close" or not server.kind.keeps_alive:
            assert connection.is_ended()
            return
        connection.send(request_of("GET", "/pid"))
        assert connection.read().body.isdigit()


# --- codings --------------------------------------------------------------------------------

CODED = "Accept-Encoding: gzip\r\n"


def test_gzip_inside_is_undone_for_a_client_that_does_not_take_it(server: Traps, name: str):
    """L12: kept as it was coded, and given as each retry wants it."""
    path = f"/zipped/text?name={name}"
    first = server.post(path, CODED).once()
    assert (first.header("content-encoding"), gzip.decompress(first.body)) == ("gzip", TEXT)
    coded = server.post(path, CODED).everywhere()
    assert_replays(first, coded)
    assert {retry.header("content-encoding") for retry in coded} == {"gzip"}
    for accepts in ("identity", "gzip;q=0", "br"):
        for plain in server.post(path, f"Accept-Encoding: {accepts}\r\n").everywhere():
            assert (plain.status, plain.body, plain.is_replay) == (201, TEXT, True)
            assert plain.all("content-encoding") == []
            assert plain.header("content-length") == str(len(TEXT))
    assert server.runs(name) == 1


@pytest.mark.parametrize("first", [CODED, ""], ids=["coded", "plain"])
def test_gzip_outside_codes_for_each_client(server: Traps, name: str, first: str):
    """L12: kept plain, whatever the first client accepts."""
    path = f"/zipping/text?name={name}"
    assert decoded(server.post(path, first).once()) == TEXT
    for coded in server.post(path, CODED).everywhere():
        assert (coded.header("content-encoding"), coded.is_replay) == ("gzip", True)
        assert decoded(coded) == TEXT
    for plain in server.post(path).everywhere():
        assert (plain.all("content-encoding"), plain.is_replay) == ([], True)
        assert plain.body == TEXT
    assert server.runs(name) == 1


def decoded(response: Response) -> bytes:
    is_coded = response.header("content-encoding") == "gzip"
    return gzip.decompress(response.body) if is_coded else response.body


# --- after the answer -----------------------------------------------------------------------


def test_what_is_done_after_the_answer_does_not_delay_it(server: Traps, name: str):
    """L2: a background task, or `close`; it ends without a client, and is not repeated."""
    asking = server.post(f"/guarded/task?name={name}")
    first = asking.once()
    assert (first.status, first.body) == (201, TEXT)
    assert_replays(first, asking.everywhere())
    assert "done" not in server.events(name)
    server.open_gate(name)
    until(lambda: "done" in server.events(name))
    assert_replays(first, asking.everywhere())
    assert server.events(name).count("done") == server.runs(name) == 1


# --- errors ---------------------------------------------------------------------------------


def test_an_error_after_the_first_bytes_left_breaks_the_answer_off(server: Traps, name: str):
    """L4, L12: its client sees that it is not whole; a retry gets a clear problem, and runs nothing."""
    asking = server.post(f"/guarded/breaks?name={name}")
    with asking.begun() as connection:
        head = connection.read_head()
        assert head.status == 201
        with pytest.raises(ConnectionError):
            b"".join(connection.parts_of(head))
    assert_over(asking.everywhere(), "result-unavailable")
    assert server.runs(name) == 1


def test_an_error_before_anything_left_is_an_error_as_always(server: Traps, name: str):
    """L4: not half an answer; the key is given back, and the retry runs, once."""
    asking = server.post(f"/guarded/breaks-early?name={name}")
    first = asking.once()
    assert first.status == 500
    assert b"half" not in first.body
    server.open_gate(name)
    second = asking.once()
    assert (second.status, second.body, second.is_replay) == (201, b"whole", False)
    assert_replays(second, asking.everywhere())
    assert server.runs(name) == 2


def test_an_error_after_the_answer_changes_nothing_of_it(server: Traps, name: str):
    """L4: of a background task, or of `close`; it is for the server's log."""
    asking = server.post(f"/guarded/breaks-late?name={name}")
    first = asking.once()
    assert (first.status, first.body) == (201, TEXT)
    assert_replays(first, asking.everywhere())
    until(lambda: "too late" in server.log())
    assert server.runs(name) == 1
