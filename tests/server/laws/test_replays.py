"""L2, L12: every retry gets the first response, verbatim."""

import gzip
import zlib

import pytest

from coatcheck.core.record import Swap
from coatcheck.server import responses as answers

from .api import Api, OpenApi
from .shop import JSON, TEXT, Call, Said, in_turn, says

EVERY_BYTE = bytes(range(256))
# Not compressible to nothing, so that coded and plain bytes differ in more than length.
PLAIN = b"".join(b"line %d\n" % n for n in range(200))
GZIPPED = gzip.compress(PLAIN, mtime=0)


@pytest.mark.served
@pytest.mark.persists
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"plain"),
        (200, b""),
        (201, EVERY_BYTE),
        (202, b"\x00" * 100_000),
        (203, "ünïcode".encode()),
        (204, b""),
        (206, b"part"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_replay_has_the_status_and_every_byte_of_the_first_answer(
    api: Api, status: int, body: bytes
):
    """L2."""
    api.shop.answers["/orders"] = says(status, *([body] if body else []))
    first, again = api.post(), api.post()
    assert (first.status, first.body) == (status, body)
    assert (again.status, again.body) == (status, body)
    assert again.is_replay
    assert api.effects() == 1


@pytest.mark.persists
def test_a_replay_after_a_restart_is_the_same(open_api: OpenApi):
    """L2: from the store, where no memory helps."""
    api = open_api()
    api.shop.answers["/orders"] = says(201, EVERY_BYTE, headers=[("ETag", '"v1"')])
    first = api.post()
    again = open_api(shop=api.shop).post()
    assert again.is_replay
    assert (again.status, again.body) == (first.status, first.body)
    assert again.header("etag") == '"v1"'
    assert api.effects() == 1


@pytest.mark.served
def test_headers_about_the_response_are_replayed(api: Api):
    """L2."""
    headers = [
        ("Content-Type", "application/vnd.shop+json; charset=utf-8"),
        ("Location", "/orders/7"),
        ("ETag", '"abc"'),
    ]
    api.shop.answers["/orders"] = says(201, b"{}", headers=headers)
    first, again = api.post(), api.post()
    for name, value in headers:
        assert again.all(name.lower()) == first.all(name.lower()) == [value]


def test_headers_with_several_lines_and_without_ascii_are_replayed(api: Api):
    """L2: not every framework can send them."""
    headers = [
        ("Link", "</a>; rel=next"),
        ("Link", "</b>; rel=prev"),
        ("X-Shop", "caf\xe9"),
    ]
    api.shop.answers["/orders"] = says(201, b"{}", headers=headers)
    first, again = api.post(), api.post()
    for name in ("link", "x-shop"):
        assert again.all(name) == first.all(name) == [v for n, v in headers if n.lower() == name]


def test_headers_of_one_message_or_one_moment_are_not_replayed(api: Api):
    """L2: the first client gets them; the server makes fresh ones for the next."""
    moment = [
        ("Date", "Mon, 01 Jan 2024 00:00:00 GMT"),
        ("Age", "3"),
        ("Server", "shop"),
        ("Via", "1.1 x"),
        ("X-Request-ID", "r-1"),
    ]
    api.shop.answers["/orders"] = says(201, b"{}", headers=moment)
    first, again = api.post(), api.post()
    for name, value in moment:
        assert first.all(name.lower()) == [value]
        assert again.all(name.lower()) == []


def test_headers_of_one_connection_are_not_replayed(api: Api):
    """L2: neither those that are always of that kind nor those that Connection lists."""
    hop = [
        ("Connection", "X-Hop, Keep-Alive"),
        ("Connection", "x-other"),
        ("Keep-Alive", "timeout=5"),
        ("X-Hop", "1"),
        ("X-Other", "2"),
        ("Trailer", "X-Sum"),
    ]
    api.shop.answers["/orders"] = says(201, b"{}", headers=[*hop, ("X-Kept", "3")])
    api.post()
    again = api.post()
    for name, _ in hop:
        assert again.all(name.lower()) == []
    assert again.header("x-kept") == "3"


@pytest.mark.served
@pytest.mark.persists
def test_cookies_reach_the_first_client_only(api: Api):
    """L2: all of them, each in a line of its own; none on a replay."""
    cookies = [("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2; HttpOnly")]
    api.shop.answers["/orders"] = says(200, b"{}", headers=cookies)
    first, again = api.post(), api.post()
    assert first.all("set-cookie") == ["a=1; Path=/", "b=2; HttpOnly"]
    assert again.all("set-cookie") == []
    assert "a=1" not in repr(api.records())


@pytest.mark.persists
@pytest.mark.parametrize("in_flight", ["wait", "202"])
def test_a_retried_login_gets_its_session_if_the_policy_says_so(open_api: OpenApi, in_flight):
    """L2: its first response may be lost, and with it the only copy of the cookie."""
    api = open_api(replay_cookies=True, in_flight=in_flight)
    cookies = [("Set-Cookie", "session=1; HttpOnly"), ("Set-Cookie", "theme=dark")]
    api.shop.answers["/login"] = says(200, b"{}", headers=cookies)
    answers = [api.post(path="/login") for _ in range(3)]
    assert [answer.is_replay for answer in answers] == [False, True, True]
    for answer in answers:
        assert answer.all("set-cookie") == ["session=1; HttpOnly", "theme=dark"]
    assert api.effects("/login") == 1


@pytest.mark.served
def test_a_replay_has_a_content_length(api: Api):
    """L2: whatever the first answer said, and nothing where there is no content."""
    api.shop.answers["/orders"] = says(201, b"in ", b"several ", b"pieces")
    api.post()
    assert api.post().header("content-length") == "17"
    api.shop.answers["/none"] = says(204)
    api.post(path="/none")
    assert api.post(path="/none").header("content-length") is None


@pytest.mark.served
def test_the_first_answer_keeps_its_own_length(api: Api):
    """L2: one content-length, not two."""
    api.shop.answers["/orders"] = says(201, b"12345", headers=[("Content-Length", "5")])
    assert api.post().header("content-length") == "5"
    assert api.post().header("content-length") == "5"


@pytest.mark.served
def test_an_answer_in_many_pieces_is_kept_whole(api: Api):
    """L12: any middleware underneath may cut it up."""
    pieces = [b"%d," % n for n in range(1_000)] + [b""]
    api.shop.answers["/orders"] = says(201, *pieces)
    first, again = api.post(), api.post()
    assert first.body == again.body == b"".join(pieces)
    assert api.effects() == 1


def test_an_answer_that_breaks_off_is_not_kept(api: Api):
    """L4: the client got nothing, so the next retry runs again."""

    def broken(_call: Call) -> Said:
        def chunks():
            yield b"half"
            raise OSError("the disk is gone")

        return Said(200, (TEXT,), chunks())

    api.shop.answers["/orders"] = in_turn(broken, says(200, b"whole"))
    assert isinstance(api.post().error, OSError)
    assert api.post().body == b"whole"
    assert api.effects() == 2


# --- codings --------------------------------------------------------------------------------

CODED = [("Content-Encoding", "gzip"), ("ETag", '"v1"'), ("Vary", "Accept-Encoding"), TEXT]


def coded_if_accepted(call: Call) -> Said:
    if "gzip" in call.headers.get("accept-encoding", ""):
        return Said(200, CODED, [GZIPPED])
    return Said(200, (TEXT,), [PLAIN])


def test_a_client_that_takes_the_coding_gets_the_coded_bytes(api: Api):
    """L12: verbatim."""
    api.shop.answers["/orders"] = coded_if_accepted
    api.post(headers=[("Accept-Encoding", "gzip")])
    again = api.post(headers=[("Accept-Encoding", "br, gzip;q=0.5")])
    assert again.header("content-encoding") == "gzip"
    assert again.body == GZIPPED
    assert again.header("etag") == '"v1"'


def test_a_retry_without_accept_encoding_gets_the_stored_bytes(api: Api):
    """L2, L12: no header means that any coding is acceptable (RFC 9110 section 12.5.3)."""
    api.shop.answers["/orders"] = coded_if_accepted
    first = api.post(headers=[("Accept-Encoding", "gzip")])
    again = api.post()
    assert (again.is_replay, again.body) == (True, first.body)
    assert (again.header("content-encoding"), again.header("etag")) == ("gzip", '"v1"')


@pytest.mark.parametrize("accepts", ["", "identity", "br", "gzip;q=0", "gzip; q=0.0, *"])
def test_a_client_that_does_not_take_the_coding_gets_plain_bytes(api: Api, accepts: str):
    """L12: the coding fits the retry, not the first request."""
    api.shop.answers["/orders"] = coded_if_accepted
    api.post(headers=[("Accept-Encoding", "gzip")])
    again = api.post(headers=[("Accept-Encoding", accepts)])
    assert again.is_replay
    assert again.all("content-encoding") == []
    assert again.body == PLAIN
    assert again.header("content-length") == str(len(PLAIN))
    assert again.header("etag") == 'W/"v1"'
    assert api.effects() == 1


def test_a_plain_answer_is_fine_for_a_client_that_takes_codings(api: Api):
    """L12: the other way round."""
    api.shop.answers["/orders"] = coded_if_accepted
    api.post(headers=[("Accept-Encoding", "identity")])
    again = api.post(headers=[("Accept-Encoding", "gzip")])
    assert again.all("content-encoding") == []
    assert again.body == PLAIN


@pytest.mark.parametrize(
    "coded", [zlib.compress(PLAIN), zlib.compress(PLAIN, wbits=-15)], ids=["zlib", "bare"]
)
def test_deflate_is_understood_in_both_of_its_forms(api: Api, coded: bytes):
    """L12."""
    headers = [("Content-Encoding", "deflate"), TEXT]
    api.shop.answers["/orders"] = says(200, coded, headers=headers)
    api.post(headers=[("Accept-Encoding", "deflate")])
    assert api.post(headers=[("Accept-Encoding", "identity")]).body == PLAIN


def test_a_coding_that_cannot_be_decoded_here_is_refused(api: Api):
    """L12: never a second execution, and never bytes the client cannot read."""
    headers = [("Content-Encoding", "br"), TEXT]
    api.shop.answers["/orders"] = says(200, b"\x0b\x02\x80", headers=headers)
    api.post(headers=[("Accept-Encoding", "br")])
    refused = api.post(headers=[("Accept-Encoding", "gzip")])
    assert (refused.status, refused.code) == (409, "result-unavailable")
    assert api.post(headers=[("Accept-Encoding", "br")]).body == b"\x0b\x02\x80"
    assert api.effects() == 1


# --- too large to keep ----------------------------------------------------------------------


@pytest.mark.served
@pytest.mark.parametrize("pieces", [1, 7], ids=["at once", "in pieces"])
def test_an_answer_over_the_limit_reaches_the_first_caller_in_full(open_api: OpenApi, pieces: int):
    """L12, X2: retries learn that it happened, and it does not happen again."""
    api = open_api(response_bytes_max=10_000)
    body = EVERY_BYTE * 100
    size = -(-len(body) // pieces)
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    api.shop.answers["/orders"] = says(201, *chunks, headers=[("Set-Cookie", "a=1")])
    first = api.post()
    assert (first.status, first.body) == (201, body)
    assert first.all("set-cookie") == ["a=1"]
    refused = api.post()
    assert (refused.status, refused.code) == (409, "result-unavailable")
    assert refused.problem["retry"] == "never"
    assert refused.reference == first.reference
    assert api.effects() == 1


def test_an_answer_of_exactly_the_limit_is_kept(open_api: OpenApi):
    """L12, X2."""
    api = open_api(response_bytes_max=100)
    api.shop.answers["/orders"] = says(201, b"x" * 100)
    api.post()
    assert api.post().body == b"x" * 100


def test_an_error_over_the_limit_is_still_an_error(open_api: OpenApi):
    """L4, L12: its size does not turn a 500 into a success."""
    api = open_api(response_bytes_max=100)
    big = says(500, b"x" * 80, b"y" * 80, b"z" * 80)
    api.shop.answers["/orders"] = in_turn(big, says(201, b"done"))
    first = api.post()
    assert (first.status, len(first.body)) == (500, 240)
    assert api.post().body == b"done"
    assert api.effects() == 2


@pytest.mark.served
def test_a_stream_of_events_with_a_key_is_passed_on_and_not_kept(api: Api):
    """L12: it is never whole, so the record says so."""
    events = says(
        200, b"data: 1\n\n", b"data: 2\n\n", headers=[("Content-Type", "text/event-stream")]
    )
    api.shop.answers["/orders"] = events
    first = api.post()
    assert first.body == b"data: 1\n\ndata: 2\n\n"
    assert api.post().code == "result-unavailable"
    assert api.effects() == 1


def test_a_replay_shows_nothing_to_shared_caches_that_the_first_did_not(api: Api):
    """L2: cache-control is replayed as it was, and refusals are never cached."""
    api.shop.answers["/orders"] = says(200, b"{}", headers=[JSON, ("Cache-Control", "private")])
    first, again = api.post(), api.post()
    assert first.header("cache-control") == again.header("cache-control") == "private"
    assert api.post(body=b"{}").header("cache-control") == "no-store"


@pytest.mark.parametrize(
    ("coding", "accepted"),
    [("br", None), ("gzip, br", "gzip, br"), ("aes128gcm", None)],
)
def test_the_same_request_gets_the_same_coding(api: Api, coding: str, accepted: str | None):
    """L2, L12: what its first answer was in its retry can read as well (RFC 9110 section 12.5.3)."""
    api.shop.answers["/orders"] = says(201, b"coded", headers=[("Content-Encoding", coding)])
    headers = [] if accepted is None else [("Accept-Encoding", accepted)]
    api.post(headers=headers)
    again = api.post(headers=headers)
    assert (again.status, again.body, again.is_replay) == (201, b"coded", True)


@pytest.mark.persists
@pytest.mark.parametrize("kept", [b"\x01", b"\x01\x00\xc9\x05", b"\x02null", b"\x7f"])
def test_an_answer_that_is_damaged_at_rest_is_refused_and_nothing_runs(open_api: OpenApi, kept):
    """L12: the record still says that the work was done; asked where memory does not know it."""
    open_api().post()
    fresh = open_api()
    (record,) = fresh.records()
    spoilt = record._replace(version=record.version + 1, response=kept)
    assert list(fresh.store.swap([Swap(record.id, record.version, spoilt)])) == [None]
    refused = fresh.post()
    assert (refused.status, refused.code) == (409, "result-unavailable")
    assert fresh.effects() == 0


def test_no_long_header_is_remembered_with_a_replay(api: Api):
    """X2: a client may send any number of them."""
    api.post()
    answers._remembered.cache_clear()
    assert api.post(headers=[("Accept-Encoding", "x" * 3_000)]).is_replay
    assert answers._remembered.cache_info().currsize == 0
    assert api.post(headers=[("Accept-Encoding", "gzip")]).is_replay
    assert answers._remembered.cache_info().currsize == 1
