"""What is particular to WSGI: PEP 3333 in full, on both sides of the middleware."""

import http.client
import io
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import flask
import pytest

from coatcheck import Engine, Policy, current_operation
from coatcheck.core.record import FAILED, IN_DOUBT, Swap
from coatcheck.server.wsgi import IdempotencyMiddleware
from coatcheck.stores import Query
from tests.support.http import NEXT_REQUEST, ORDER, Response, environ_of, exchange_wsgi, with_key
from tests.support.servers.wsgi import Quiet, Wsgiref
from tests.support.times import WAIT_S_MAX

TEXT = [("Content-Type", "text/plain")]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("memory://") as engine:
        yield engine


@pytest.fixture
def guard(engine: Engine):
    return lambda app: validator(IdempotencyMiddleware(validator(app), engine=engine))


def post(
    app, path: str = "/", body: bytes = ORDER, *, key: str | None = "k-1", headers=()
) -> Response:
    return exchange_wsgi(app, environ_of("POST", path, with_key(key, headers), body))


def test_a_request_that_runs_again_is_read_again_also_if_its_input_was_wrapped(tmp_path):
    """L9: middlewares put an input of their own into the environ, which cannot be rewound."""
    read = []

    @validator
    def collide_once(environ, start_response) -> Iterable[bytes]:
        read.append(environ["wsgi.input"].read(len(ORDER)))
        if len(read) == 1:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT  # type: ignore[misc]
            raise error
        start_response("201 Created", TEXT)
        return [b"done"]

    policy = Policy(mode="transaction", transaction_retries=1)
    with Engine(f"sqlite:///{tmp_path}/records.db", policy) as engine:
        answer = post(IdempotencyMiddleware(collide_once, engine=engine))
        assert (answer.status, answer.body, read) == (201, b"done", [ORDER] * 2)
        assert engine.attempts.in_transaction == {}


# --- ways to answer -------------------------------------------------------------------------


def with_write(environ, start_response) -> Iterable[bytes]:
    write = start_response("200 OK", TEXT)
    write(b"one ")
    write(b"two ")
    return [b"three"]


def with_a_generator(environ, start_response) -> Iterable[bytes]:
    start_response("200 OK", TEXT)
    return (part for part in (b"one ", b"two ", b"", b"three"))


def with_a_late_start(environ, start_response) -> Iterable[bytes]:
    def parts() -> Iterator[bytes]:
        start_response("200 OK", TEXT)
        yield b"one "
        yield b"two three"

    return parts()


def with_a_file(environ, start_response) -> Iterable[bytes]:
    start_response("200 OK", TEXT)
    return environ.get("wsgi.file_wrapper", FileWrapper)(io.BytesIO(b"one two three"), 4)


def with_a_list(environ, start_response) -> Iterable[bytes]:
    start_response("200 OK", [*TEXT, ("Content-Length", "13")])
    return [b"one ", b"two ", b"three"]


def with_a_second_thought(environ, start_response) -> Iterable[bytes]:
    start_response("500 Internal Server Error", [*TEXT, ("X-First", "1")])
    try:
        raise ValueError("found later")
    except ValueError:
        start_response("200 OK", TEXT, sys.exc_info())
    return [b"one two three"]


WAYS = (
    with_write,
    with_a_generator,
    with_a_late_start,
    with_a_file,
    with_a_list,
    with_a_second_thought,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_answer_is_kept_and_given_whole(guard, way):
    """L2, L12: and a replay cannot be told from it."""
    app = guard(way)
    first, again = post(app), post(app)
    assert (first.status, first.body) == (again.status, again.body) == (200, b"one two three")
    assert first.all("x-first") == again.all("x-first") == []
    assert again.is_replay


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_answer_passes_where_nothing_is_guarded(guard, way):
    """S3."""
    app = guard(way)
    assert post(app, key=None).body == b"one two three"
    get = exchange_wsgi(app, environ_of("GET", "/", with_key("k-1"), b""))
    assert get.body == b"one two three"
    assert get.all("idempotency-reference") == []


def test_a_second_start_response_drops_the_body_before_it(guard):
    """L2: nothing has left yet, so the error page is not mixed with half an answer."""

    def app(environ, start_response) -> Iterable[bytes]:
        start_response("200 OK", TEXT)
        yield b"half an answer"
        try:
            raise ValueError("found in the middle")
        except ValueError:
            start_response("503 Service Unavailable", TEXT, sys.exc_info())
        yield b"sorry"

    response = post(guard(app))
    assert (response.status, response.body) == (503, b"sorry")


def test_start_response_called_twice_is_the_applications_mistake(engine):
    """L4: PEP 3333 wants an error for it."""

    def app(environ, start_response) -> Iterable[bytes]:
        start_response("200 OK", TEXT)
        start_response("200 OK", TEXT)
        return []

    assert isinstance(post(IdempotencyMiddleware(app, engine=engine)).error, AssertionError)


def test_an_application_that_never_starts_its_response_has_failed(engine):
    """L4."""
    response = post(IdempotencyMiddleware(lambda environ, start_response: [], engine=engine))
    assert isinstance(response.error, RuntimeError)


# --- close ----------------------------------------------------------------------------------


class Body:
    """What an application returns; it writes down what becomes of it."""

    def __init__(self, *parts: bytes, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self._parts = iter(parts)
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        for part in self._parts:
            self.events.append("part")
            return part
        if self._error is not None:
            raise self._error
        self.events.append("end")
        raise StopIteration

    def close(self) -> None:
        self.events.append("close")


def returning(body: Body, status: str = "200 OK", headers=TEXT):
    def app(environ, start_response) -> Body:
        start_response(status, list(headers))
        return body

    return app


def test_close_is_called_once_and_after_the_body(guard):
    """L2: as without us, when the server has sent everything."""
    body = Body(b"one", b"two")
    assert post(guard(returning(body))).body == b"onetwo"
    assert body.events == ["part", "part", "end", "close"]


def test_close_waits_until_the_server_has_the_answer(engine):
    """L2: what an application does in close comes after the response, as background tasks do."""
    body = Body(b"one")
    app = IdempotencyMiddleware(returning(body), engine=engine)
    said = app(environ_of("POST", "/", with_key("k-1"), ORDER), lambda *_: lambda _chunk: None)
    assert list(said) == [b"one"]
    assert "close" not in body.events
    said.close()
    assert body.events.count("close") == 1


def test_close_is_called_once_when_the_body_breaks_off(guard):
    """L4: the key is given back, and the error reaches the server."""
    body = Body(b"one", error=OSError("the disk is gone"))
    assert isinstance(post(guard(returning(body))).error, OSError)
    assert body.events == ["part", "close"]
    fresh = Body(b"whole")
    assert post(guard(returning(fresh))).body == b"whole"


def test_an_error_in_close_does_not_hide_the_first_one(guard, engine):
    """L4: nor does it keep the key from being given back."""

    class Broken(Body):
        def close(self) -> None:
            super().close()
            raise OSError("close failed, too")

    body = Broken(b"one", error=ValueError("the first"))
    response = post(guard(returning(body)))
    assert isinstance(response.error, ValueError)
    assert post(guard(returning(Body(b"whole")))).body == b"whole"


def test_close_is_called_once_where_the_answer_is_not_the_applications(engine):
    """L5: where another attempt's answer stands, or the store has gone."""
    body = Body(b"of the zombie")

    def app(environ, start_response) -> Body:
        record = engine.store.get([current_operation().claim.id])[0]
        taken = record._replace(version=record.version + 1, nonce=record.nonce + 1, attempt=2)
        engine.store.swap([Swap(record.id, record.version, taken)])
        start_response("200 OK", list(TEXT))
        return body

    assert post(IdempotencyMiddleware(app, engine=engine)).code == "in-progress"
    assert body.events == ["part", "end", "close"]


def test_a_large_answer_streams_from_the_limit_on_and_is_closed(engine):
    """L12: the second part is made when the server asks for it."""
    engine.policy = Policy(response_bytes_max=10)
    body = Body(b"x" * 11, b"y" * 11, b"z" * 11)
    app = IdempotencyMiddleware(returning(body), engine=engine)
    said = iter(
        iterable := app(environ_of("POST", "/", with_key("k-1"), ORDER), starts := Starts())
    )
    assert next(said) == b"x" * 11
    assert body.events == ["part"]
    assert b"".join(said) == b"y" * 11 + b"z" * 11
    iterable.close()
    assert body.events == ["part", "part", "part", "end", "close"]
    assert starts.status == "200 OK"
    assert post(app).code == "result-unavailable"


class Starts:
    """A start_response that remembers."""

    status = ""

    def __call__(self, status: str, headers: Any, exc_info: Any = None) -> Any:
        self.status = status
        return lambda _chunk: None


def test_an_answer_that_is_written_over_the_limit_is_not_kept(engine):
    """L12, X2: `write` takes it all at once."""
    engine.policy = Policy(response_bytes_max=10)
    app = IdempotencyMiddleware(with_write, engine=engine)
    assert post(app).body == b"one two three"
    assert post(app).code == "result-unavailable"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_first_response_has_a_content_length(guard, way):
    """L2: servers work it out of a list of one, and keep the connection then; so do we."""
    assert post(guard(way)).header("content-length") == "13"


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_an_answer_without_content_has_no_length(guard, status: str):
    """L2."""
    assert post(guard(returning(Body(), status, []))).header("content-length") is None


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unguarded_answer_is_the_applications_own_object(engine, method: str):
    """S3: so that a server can send a file its own way."""
    body = Body(b"one")
    app = IdempotencyMiddleware(returning(body), engine=engine)
    assert app(environ_of(method, "/", [], b""), Starts()) is body
    assert body.events == []


# --- the request ----------------------------------------------------------------------------


class Input:
    """A connection: a request body and what follows it; reading blocks where nothing comes."""

    def __init__(self, body: bytes, *, ends: bool = False) -> None:
        self._stream = io.BytesIO(body)
        self._ends = ends
        self.taken = 0

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self.taken += len(chunk)
        if not chunk and size and not self._ends:
            raise AssertionError("this read would block for ever")
        return chunk

    readline = readlines = __iter__ = read


def echo(environ, start_response) -> Iterable[bytes]:
    start_response("200 OK", list(TEXT))
    return [environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1_048_577, 3_000_000])
def test_not_a_byte_is_read_after_the_body(engine, size: int):
    """L2: what follows on the connection is the next request."""
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    environ = environ_of("POST", "/", with_key("k-1"), body)
    environ["wsgi.input"] = source = Input(body + NEXT_REQUEST)
    assert exchange_wsgi(IdempotencyMiddleware(echo, engine=engine), environ).body == body
    assert source.taken == size


def test_a_body_that_breaks_off_asked_for_nothing(engine):
    """L11: the client is gone; nothing runs and the key is not held."""
    app = IdempotencyMiddleware(echo, engine=engine)
    environ = environ_of("POST", "/", with_key("k-1"), ORDER)
    environ["wsgi.input"] = Input(ORDER[:-1], ends=True)
    refused = exchange_wsgi(app, environ)
    assert (refused.status, refused.code) == (400, "body-incomplete")
    assert refused.problem["retry"] == "same-key"
    assert post(app).body == ORDER
    assert not post(app, key="k-2").is_replay


def test_a_chunked_body_is_read_to_its_end_where_the_server_marks_it(engine):
    """F1: wsgi.input_terminated, as gunicorn and others set it; the application gets a length."""
    app = IdempotencyMiddleware(echo, engine=engine)
    for _ in range(2):
        environ = environ_of("POST", "/", with_key("k-1"), b"")
        del environ["CONTENT_LENGTH"]
        environ |= {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
        environ["wsgi.input"] = Input(ORDER, ends=True)
        response = exchange_wsgi(app, environ)
        assert response.body == ORDER
    assert response.is_replay


@pytest.mark.parametrize("length", [None, "+2", "2.0", "junk", "\xb2"])
def test_a_body_of_unknown_length_is_refused(engine, length: str | None):
    """F1: a chunked one, where the server does not end it; else all of them were equal, and empty."""
    app = IdempotencyMiddleware(echo, engine=engine)
    for body in (b"one", b"another"):
        environ = environ_of("POST", "/", with_key("k-1"), body)
        environ["HTTP_TRANSFER_ENCODING"] = "chunked"
        environ.pop("CONTENT_LENGTH")
        if length is not None:
            environ["CONTENT_LENGTH"] = length
        response = exchange_wsgi(app, environ)
        assert 400 <= response.status < 500


def test_a_chunked_body_over_the_limit_is_refused(engine):
    """X2: its length is not declared, so it is counted while it comes."""
    engine.policy = Policy(body_bytes_max=1_000)
    environ = environ_of("POST", "/", with_key("k-1"), b"")
    del environ["CONTENT_LENGTH"]
    source = Input(b"x" * 1_000_000, ends=True)
    environ |= {"wsgi.input_terminated": True, "wsgi.input": source}
    refused = exchange_wsgi(IdempotencyMiddleware(echo, engine=engine), environ)
    assert (refused.status, refused.code) == (413, "body-too-large")
    assert source.taken < 200_000


def test_a_declared_length_over_the_limit_is_refused_unread(engine):
    """X2."""
    engine.policy = Policy(body_bytes_max=1_000)
    environ = environ_of("POST", "/", with_key("k-1"), b"x" * 1_001)
    environ["wsgi.input"] = source = Input(b"x" * 1_001)
    assert exchange_wsgi(IdempotencyMiddleware(echo, engine=engine), environ).status == 413
    assert source.taken == 0


@pytest.mark.parametrize("declared", [None, "", "0"])
def test_a_request_without_a_length_has_no_body(engine, declared: str | None):
    """F1: reading on would block until the client hangs up."""
    environ = environ_of("POST", "/", with_key("k-1"), b"")
    environ["wsgi.input"] = Input(NEXT_REQUEST)
    environ.pop("CONTENT_LENGTH") if declared is None else environ.update(CONTENT_LENGTH=declared)
    response = exchange_wsgi(IdempotencyMiddleware(echo, engine=engine), environ)
    assert (response.status, response.body) == (200, b"")


def test_the_small_body_of_a_refused_request_is_read(engine):
    """K3: so that the connection can be kept; a large one is the server's to drop."""
    app = IdempotencyMiddleware(echo, engine=engine)
    for size, taken in ((100, 100), (10_000_000, 0)):
        environ = environ_of("POST", "/", with_key("a,b"), b"")
        environ["CONTENT_LENGTH"] = str(size)
        environ["wsgi.input"] = source = Input(b"x" * size + NEXT_REQUEST)
        assert exchange_wsgi(app, environ).status == 400
        assert source.taken == taken


def test_the_application_may_read_its_input_in_any_way(guard):
    """L2: PEP 3333 offers four."""

    def app(environ, start_response) -> Iterable[bytes]:
        start_response("200 OK", list(TEXT))
        source = environ["wsgi.input"]
        return [source.readline(), *source.readlines(), b"|", source.read(5)]

    assert post(guard(app), body=b"a\nb\nc").body == b"a\nb\nc|"


def test_an_answer_may_be_made_from_the_request_while_it_is_sent(engine):
    """L12: a spooled body stays open until the answer is closed."""
    engine.policy = Policy(response_bytes_max=10)

    def app(environ, start_response) -> Iterable[bytes]:
        start_response("200 OK", list(TEXT))
        return iter(lambda: environ["wsgi.input"].read(65_536), b"")

    body = b"x" * 2_000_000
    assert post(IdempotencyMiddleware(app, engine=engine), body=body).body == body


# --- around it ------------------------------------------------------------------------------


def test_a_mounted_application_is_another_place(engine):
    """S1: SCRIPT_NAME is part of the path."""
    app = IdempotencyMiddleware(echo, engine=engine)
    for mount in ("/v1", "/v2"):
        environ = environ_of("POST", "/orders", with_key("k-1"), ORDER)
        environ["SCRIPT_NAME"] = mount
        assert not exchange_wsgi(app, environ).is_replay
    assert engine.store.find(Query()).records[0].label.startswith("POST /v")


def test_the_operation_ends_with_its_request(engine):
    """S2: the next request on the same thread has none, or its own."""
    seen: list[str | None] = []

    def app(environ, start_response) -> Iterable[bytes]:
        operation = current_operation()
        seen.append(operation and operation.key)
        start_response("200 OK", list(TEXT))
        return [b"ok"]

    guarded = IdempotencyMiddleware(app, engine=engine)
    post(guarded, key="k-1")
    post(guarded, key=None)
    post(guarded, key="k-2")
    assert seen == ["k-1", None, "k-2"]
    assert current_operation() is None


def test_an_operation_around_the_request_is_there_again_afterwards(engine):
    """S2: a guarded function may call a guarded application in its own thread."""
    inner = IdempotencyMiddleware(with_a_list, engine=engine)

    def outer() -> list[str | None]:
        found = []
        for _ in range(3):
            operation = current_operation()
            found.append(operation and operation.key)
            post(inner)
        return found

    assert engine.run("outer", outer) == ["outer"] * 3
    assert current_operation() is None


def test_a_handler_that_is_interrupted_leaves_its_lease(engine):
    """L5: a worker that exits in the middle does not know what it did."""

    def app(environ, start_response) -> Iterable[bytes]:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        post(IdempotencyMiddleware(app, engine=engine))
    (record,) = engine.store.find(Query()).records
    assert (record.state, record.attempt) == (0, 1)
    assert engine.attempts.heartbeat.leases == {}


@pytest.mark.parametrize("size", [len(ORDER), 2_000_000])
def test_a_request_that_is_guarded_twice_is_guarded_once(engine, size: int):
    """L1: by accident, or around an application and again around a part of it."""
    inner = IdempotencyMiddleware(echo, engine=engine)
    app = IdempotencyMiddleware(inner, engine=engine)
    first = post(app, body=b"x" * size)
    assert (first.status, first.body) == (200, b"x" * size)
    assert first.reference
    assert post(app, body=b"x" * size).is_replay


def test_flask_is_guarded_by_one_line(engine):
    """L1, L2: the spelling of the design."""
    app = flask.Flask("shop")
    calls: list[Any] = []

    @app.post("/orders")
    def order() -> Any:
        calls.append(flask.request.get_json())
        response = flask.jsonify(number=len(calls))
        response.set_cookie("session", "1")
        return response, 201

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, engine=engine)
    client = app.test_client(use_cookies=False)
    headers = {"Idempotency-Key": "k-1"}
    first = client.post("/orders", json={"item": 1}, headers=headers)
    again = client.post("/orders", json={"item": 1}, headers=headers)
    assert first.get_json() == again.get_json() == {"number": 1}
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Set-Cookie" not in again.headers
    assert calls == [{"item": 1}]


def test_a_replay_spells_its_headers_like_the_first_answer():
    """L2: a record has names in lower case, and some clients compare them letter by letter."""
    names = ["Content-Type", "ETag", "WWW-Authenticate", "X-Coat-Colour", "Location"]

    def answer(environ, start_response) -> Iterable[bytes]:
        start_response("200 OK", [(name, "text/plain") for name in names])
        return [b"done"]

    server = Wsgiref(("127.0.0.1", 0), Quiet)
    policy = Policy(reference_header="X-Reference")
    with Engine("memory://", policy) as engine, server:
        server.set_app(IdempotencyMiddleware(answer, engine=engine))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            first, again = (spelled_by(server.server_port) for _ in range(2))
        finally:
            server.shutdown()
            thread.join()
    assert first == {*names, "Content-Length", "X-Reference"}
    assert again == {*first, "Idempotent-Replayed"}


def spelled_by(port: int) -> set[str]:
    """The names of the headers of an answer, as they come over the wire."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S_MAX)) as client:
        client.request("POST", "/", ORDER, dict(with_key("k-1")))
        names = {name for name, _ in client.getresponse().getheaders()}
    return names - {"Date", "Server"}  # wsgiref's own


# --- answers that are none ------------------------------------------------------------------


class Chunks:
    """The body of a response, and whether it was closed."""

    def __init__(self, *chunks: Any) -> None:
        self._chunks = chunks
        self.is_closed = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self._chunks)

    def close(self) -> None:
        self.is_closed = True


NO_ANSWERS = {
    "a header beyond Latin-1": ("201 Created", [("X-Name", "\u20ac")], ()),
    "a text for a chunk": ("201 Created", TEXT, ("text",)),
    "a status without a number": ("Created", TEXT, (b"x",)),
}


@pytest.mark.parametrize("settings", [{}, {"in_flight": "202"}], ids=["record", "202"])
@pytest.mark.parametrize("answer", NO_ANSWERS.values(), ids=NO_ANSWERS)
@pytest.mark.parametrize(("recovery", "state"), [("retry", FAILED), ("manual", IN_DOUBT)])
def test_an_answer_that_cannot_be_read_is_an_error_like_any_other(
    settings, answer, recovery, state
):
    """L4, L12: the claim is not held for its lease, and what was said is closed, as over ASGI."""
    status, headers, chunks = answer
    body = Chunks(*chunks)

    def app(environ, start_response) -> Iterable[bytes]:
        start_response(status, headers)
        return body

    with Engine("memory://", Policy(wait=0, recovery=recovery, **settings)) as engine:
        assert post(IdempotencyMiddleware(app, engine=engine)).error is not None
        assert body.is_closed
        (record,) = engine.store.find(Query()).records
    assert record.state == state


def test_in_a_transaction_a_wrong_response_is_undone_and_closed(tmp_path):
    """L9."""
    body = Chunks("text")

    def app(environ, start_response) -> Iterable[bytes]:
        start_response("201 Created", TEXT)
        return body

    with Engine(f"sqlite:///{tmp_path}/a.db", Policy(wait=0, mode="transaction")) as engine:
        assert isinstance(post(IdempotencyMiddleware(app, engine=engine)).error, TypeError)
        assert body.is_closed
        assert not engine.store.find(Query()).records
