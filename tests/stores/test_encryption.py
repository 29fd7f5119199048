"""What a store keeps of a response, encrypted and compressed."""

import asyncio
import io
import itertools
import sqlite3
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import (
    AsyncEngine,
    Engine,
    KeyRing,
    Misconfigured,
    Policy,
    ResultUnavailable,
    StoreUnavailable,
    Unreadable,
    current_operation,
    open_store,
)
from coatcheck.core.record import Swap, completed
from coatcheck.server.asgi import IdempotencyMiddleware as AsgiGuard
from coatcheck.server.wsgi import IdempotencyMiddleware as WsgiGuard
from coatcheck.stores import Query
from coatcheck.stores.batch_errors import results_of
from coatcheck.stores.encryption import EncryptedStore
from coatcheck.stores.memory import MemoryStore
from tests.stores.laws.records import ID, claim_of, id_of
from tests.support.batches import call_apart

OLD, NEW, OTHER = {"old": b"o" * 32}, {"new": b"n" * 32}, {"new": b"x" * 32}
SECRET = "the card ends in 4242"


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/keys.db"


def stored_bytes(url):
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        (blob,) = connection.execute("select response from coatcheck_records").fetchone()
    return blob


def spoil(url, response):
    """Replace what is stored by *response*."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("update coatcheck_records set response = ?", (response,))
        connection.commit()


def charge(ran):
    ran.append(1)
    return {"answer": SECRET}


def run_once(url, keys, ran):
    with Engine(url, keyring=KeyRing(keys) if keys else None) as engine:
        return engine.run("order-1", lambda: charge(ran), scope="charge")


def test_what_is_stored_cannot_be_read_and_a_retry_gets_it(url):
    """X1."""
    ran = []
    assert run_once(url, NEW, ran) == run_once(url, NEW, ran) == {"answer": SECRET}
    assert len(ran) == 1
    assert SECRET.encode() not in stored_bytes(url)


class Divides(MemoryStore):
    """Of several, the last is on a shard that is away."""

    def swap(self, swaps):
        return results_of([*super().swap(swaps[:-1]), AWAY])

    def get(self, ids):
        return results_of([*super().get(ids[:-1]), AWAY])


AWAY = StoreUnavailable("a shard is away")


def test_the_outcomes_of_a_batch_error_are_decrypted_one_by_one():
    """X1, D2: a shard that is away changes nothing for the others, not even for a lost key."""
    beneath = Divides()
    claims = [claim_of(id_of(number)) for number in range(4)]
    written = [completed(claim, SECRET.encode()) for claim in claims]
    MemoryStore.swap(beneath, [Swap(claim.id, 0, claim) for claim in claims])
    for ring, record in zip((NEW, OTHER), written, strict=False):
        with pytest.raises(StoreUnavailable):
            EncryptedStore(beneath, KeyRing(ring)).swap(
                [Swap(record.id, record.version - 1, record)] * 2
            )
    store = EncryptedStore(beneath, KeyRing(NEW))
    first, second, third, fourth = (claim.id for claim in claims)
    swaps = [Swap(claim.id, 0, claim) for claim in claims]
    for call, asks in ((store.swap, swaps), (store.get, (first, second, third, fourth))):
        results, errors = call_apart(call, asks)
        assert results == [written[0], None, claims[2], None]
        assert [type(error) for error in errors] == [
            *(type(None), Unreadable, type(None), StoreUnavailable)
        ]


def test_a_ring_is_rotated_by_a_new_key_at_its_end(url):
    """X1: what the old key encrypted stays readable as long as the old key is there."""
    ran = []
    run_once(url, OLD, ran)
    assert b"old" in stored_bytes(url)[:8]
    assert run_once(url, OLD | NEW, ran) == {"answer": SECRET}
    with Engine(url, keyring=KeyRing(OLD | NEW)) as engine:
        engine.run("order-2", lambda: charge(ran), scope="charge")
        blobs = [record.response for record in open_store(url).find(Query()).records]
    assert sorted(blob[2 : 2 + blob[1]] for blob in blobs) == [b"new", b"old"]
    assert len(ran) == 2


def can_decrypt(url, keys, others):
    """Whether a node with *keys* can answer what one with *others* has stored."""
    key = f"{[*keys]} {[*others]}"
    ran = []
    with Engine(url, keyring=KeyRing(others)) as there, Engine(url, keyring=KeyRing(keys)) as here:
        there.run(key, lambda: ran.append(1), scope="rolling")
        try:
            here.run(key, lambda: ran.append(2), scope="rolling")
        except Unreadable:
            return False
        finally:
            assert ran == [1]
    return True


def test_a_ring_that_is_rotated_in_two_steps_is_readable_at_every_node(url):
    """X1: while each step is rolled out, nodes of both kinds answer what the other has encrypted."""
    rollouts = [OLD, NEW | OLD, OLD | NEW, NEW]  # the last one when nothing of the old is left
    for before, after in itertools.pairwise(rollouts[:3]):
        assert can_decrypt(url, before, after)
        assert can_decrypt(url, after, before)
    assert can_decrypt(url, OLD | NEW, NEW)
    assert can_decrypt(url, NEW, OLD | NEW)
    assert not can_decrypt(url, OLD, OLD | NEW), "what one step would do"


def test_what_was_stored_before_there_was_a_ring_stays_readable(url):
    """X1."""
    ran = []
    run_once(url, None, ran)
    assert SECRET.encode() in stored_bytes(url)
    assert run_once(url, NEW, ran) == {"answer": SECRET}
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (OLD, "encrypted with the key 'new'; this key ring has old"),
        (OTHER, "does not decrypt the stored value"),
        (None, "no key"),
    ],
)
def test_a_wrong_or_missing_key_is_an_error_and_never_a_second_run(url, keys, said):
    """X1, L1."""
    ran = []
    run_once(url, NEW, ran)
    with pytest.raises((Unreadable, ResultUnavailable), match=said):
        run_once(url, keys, ran)
    assert len(ran) == 1


def test_a_value_that_was_copied_to_another_record_cannot_be_decrypted(url):
    """X1: the operation's id is authenticated with it."""
    with closing(EncryptedStore(open_store(url), KeyRing(NEW))) as store:
        for number in (1, 2):
            claim = claim_of(id_of(number))
            store.swap([Swap(claim.id, 0, claim)])
            store.swap([Swap(claim.id, claim.version, completed(claim, b"%d" % number))])
        spoil(url, stored_bytes(url))  # of the first record, in both
        assert store.get([id_of(1)])[0].response == b"1"
        with pytest.raises(Unreadable):
            store.get([id_of(2)])


def test_one_record_that_cannot_be_opened_does_not_spoil_its_batch(url):
    """L5: its neighbours' writes took effect, and they must hear so."""
    ran = []
    run_once(url, NEW, ran)

    async def story():
        async with AsyncEngine(url, keyring=KeyRing(OLD)) as engine:

            async def place(number):
                return number

            asked = [engine.run(f"new-{n}", place, n) for n in range(20)]
            stuck = engine.run("order-1", never, scope="charge")
            return await asyncio.gather(*asked, stuck, return_exceptions=True)

    *answers, error = asyncio.run(story())
    assert answers == list(range(20))
    assert isinstance(error, Unreadable)
    assert len(ran) == 1


async def never():
    raise AssertionError


@pytest.mark.parametrize("keyring", [None, KeyRing(NEW)], ids=["plain", "encrypted"])
@given(blob=st.binary(max_size=200) | st.binary(min_size=1, max_size=9).map(lambda b: b * 500))
def test_whatever_is_stored_comes_back(keyring, blob):
    """X1."""
    with closing(EncryptedStore(open_store("memory://"), keyring)) as store:
        claim = claim_of()._replace(progress=blob)
        store.swap([Swap(ID, 0, claim)])
        done = completed(claim, blob)
        store.swap([Swap(ID, claim.version, done)])
        assert store.get([ID]) == [done]
        assert store.find(Query()).records == [done]
        assert store.swap([Swap(ID, 0, claim)]) == [done]


@given(text=st.binary(max_size=80), data=st.data())
def test_an_encrypted_value_that_was_cut_or_changed_is_unreadable(text, data):
    """X1: wherever that was, in the name of the key too."""
    ring = KeyRing(OLD | {"ключ": b"k" * 32})
    blob = ring.encrypt(text, b"context")
    assert ring.decrypt(blob, b"context") == text
    place = data.draw(st.integers(0, len(blob) - 1))
    for spoilt in (blob[:place], flipped(blob, place, data.draw(st.integers(0, 7)))):
        with pytest.raises(Unreadable):
            ring.decrypt(spoilt, b"context")


def flipped(blob, place, bit):
    """*blob*, of which one bit is another."""
    return blob[:place] + bytes([blob[place] ^ 1 << bit]) + blob[place + 1 :]


@pytest.mark.parametrize("keyring", [None, KeyRing(NEW)], ids=["compressed", "encrypted"])
@given(data=st.data())
def test_a_record_that_was_cut_or_changed_is_never_another_answer(keyring, data):
    """X1: its mark tells what it was, so the mark is left; operators see it as it is."""
    beneath = open_store("memory://")
    store = EncryptedStore(beneath, keyring)
    claim = claim_of()
    done = completed(claim, b"\x01" + b"abc" * 1_000)
    store.swap([Swap(ID, 0, claim)])
    store.swap([Swap(ID, claim.version, done)])
    (kept,) = beneath.get([ID])
    place = data.draw(st.integers(1, len(kept.response) - 1))
    flip = flipped(kept.response, place, data.draw(st.integers(0, 7)))
    for spoilt in (flip, kept.response[:place]):
        beneath._records[ID] = kept._replace(response=spoilt)
        try:
            assert store.get([ID]) == [done]  # a bit that nobody reads
            assert keyring is None
            assert spoilt is flip
        except Unreadable:
            assert [record.response for record in store.find(Query()).records] == [spoilt]


def test_an_empty_response_was_not_encrypted_and_is_unreadable():
    """X1: a record that says the work was done, and no longer what came of it."""
    beneath = open_store("memory://")
    store = EncryptedStore(beneath, KeyRing(NEW))
    beneath.swap([Swap(ID, 0, completed(claim_of(), b""))])
    with pytest.raises(Unreadable):
        store.get([ID])


def test_a_key_is_free_after_its_window_also_where_its_old_answer_cannot_be_opened(url):
    """X1, T2: a key may be removed when the window of all that it encrypted is over."""
    clock, policy = [1_800_000_000_000], Policy(window="1h", margin="1h")
    for keys, answer in ((OLD, "first"), (NEW, "second")):
        ring = KeyRing(keys)
        with Engine(url, policy, keyring=ring, clock=lambda: clock[0]) as engine:
            assert engine.run("order-1", lambda: answer, scope="s") == answer  # noqa: B023 - at once
        clock[0] += 3_600_001


def test_large_answers_are_compressed_where_that_saves_something():
    beneath = open_store("memory://")
    store = EncryptedStore(beneath)
    sizes = {}
    for number, blob in enumerate([b"\x01" + b"abc" * 1_000, b"\x01" + random_bytes(3_000)]):
        claim = claim_of(id_of(number))
        store.swap([Swap(claim.id, 0, claim)])
        store.swap([Swap(claim.id, claim.version, completed(claim, blob))])
        sizes[number] = len(beneath.get([claim.id])[0].response)
        assert store.get([claim.id])[0].response == blob
    assert sizes[0] < 100
    assert sizes[1] == 3_001


LARGE = {"lines": ["the same words, again and again"] * 200}


def run_large(url, **options):
    """What a function's large result takes in the store, and what two callers get of it."""
    ran = []

    def work():
        ran.append(1)
        return LARGE

    with Engine(url, **options) as engine:
        results = [engine.run("large", work, scope="s")]
    with Engine(url, **options) as another:
        results.append(another.run("large", work, scope="s"))
    assert ran == [1]
    assert results == [LARGE, LARGE]
    return len(stored_bytes(url))


def test_an_engine_without_a_ring_compresses_where_it_is_told_to(tmp_path):
    """X1: large bodies where it pays; small ones stay as they are."""
    plain, packed = (f"sqlite:///{tmp_path}/{name}.db" for name in ("plain", "packed"))
    assert run_large(packed, compress=True) * 10 < run_large(plain)
    with Engine(packed, compress=True) as engine:
        engine.run("small", lambda: "short", scope="s")
        found = engine.store._store.find(Query(key="small")).records
    assert found[0].response == b'\x02"short"'


def test_an_event_loop_compresses_where_it_is_told_to(url):
    """X1: the same without threads of the caller's."""

    async def work():
        return LARGE

    async def story():
        async with AsyncEngine(url, compress=True) as engine:
            return await engine.run("large", work, scope="s")

    assert asyncio.run(story()) == LARGE
    assert len(stored_bytes(url)) < 500


def test_an_engine_that_compresses_nothing_reads_what_others_compressed(url):
    """X1: so that nodes can be told one after the other."""
    run_large(url, compress=True)
    with Engine(url) as engine:
        assert engine.run("large", lambda: None, scope="s") == LARGE


def test_what_is_compressed_and_damaged_is_an_error_and_never_a_second_run(url):
    """X1, L1: with and without a reader that would compress itself."""
    run_large(url, compress=True)
    ran = []
    spoil(url, stored_bytes(url)[:40])
    for options in ({}, {"compress": True}, {"keyring": KeyRing(NEW)}):
        with (
            Engine(url, **options) as engine,
            pytest.raises((Unreadable, ResultUnavailable), match="damaged"),
        ):
            engine.run("large", lambda: charge(ran), scope="s")
    assert ran == []


@pytest.mark.parametrize("left", [0, 1, 5])
def test_an_answer_that_was_emptied_or_cut_is_an_error_and_never_a_second_run(url, left):
    """X1, L1: also without a ring, for whom there is nothing to be opened."""
    ran = []
    run_once(url, None, ran)
    spoil(url, stored_bytes(url)[:left])
    for options in ({}, {"compress": True}, {"keyring": KeyRing(NEW)}):
        with Engine(url, **options) as engine, pytest.raises(Unreadable):
            engine.run("order-1", lambda: charge(ran), scope="charge")
    assert ran == [1]


def test_what_steps_remember_is_compressed_only_if_it_is_encrypted():
    """X1: every engine must be able to go on where an attempt has died."""
    beneath = open_store("memory://")
    claim = claim_of()._replace(progress=b"\x01" + b"abc" * 1_000)
    EncryptedStore(beneath).swap([Swap(ID, 0, claim)])
    assert beneath.get([ID]) == [claim]


def test_who_cannot_open_what_steps_remember_does_not_begin(url):
    """X1, L7: an engine without a ring, while nodes are given one by one."""
    begun = []

    def work():
        begun.append(1)
        current_operation().step("charge", lambda: 1)
        raise ValueError("after the step")

    with Engine(url, keyring=KeyRing(NEW)) as engine, pytest.raises(ValueError, match="after"):
        engine.run("order-1", work, scope="s")
    with Engine(url) as engine, pytest.raises((Unreadable, ResultUnavailable)):
        engine.run("order-1", work, scope="s")
    assert begun == [1]


def random_bytes(count):
    number, made = 1, bytearray()
    while len(made) < count:
        number = number * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407 & (1 << 64) - 1
        made += (number >> 33).to_bytes(4, "big")
    return bytes(made[:count])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "at least one key"),
        ({"a": b"short"}, "5 bytes"),
        ({"": b"k" * 32}, "1 to 255 bytes"),
        ({"n" * 256: b"k" * 32}, "1 to 255 bytes"),
        ({"a": "k" * 32}, "is text, not bytes"),
        ({"a": None}, "is None, not bytes"),
        ({1: b"k" * 32}, "names are text"),
        (None, "at least one key"),
        ("text", "name → 32 random bytes"),
    ],
)
def test_a_ring_that_cannot_work_is_refused_when_it_is_made(keys, said):
    with pytest.raises(Misconfigured, match=said):
        KeyRing(keys)


def test_a_ring_shows_no_key():
    assert repr(KeyRing(OLD | NEW)) == "KeyRing(old, new)"


# --- over HTTP ---------------------------------------------------------------------------------

ENVIRON = {
    "REQUEST_METHOD": "POST",
    "PATH_INFO": "/orders",
    "HTTP_IDEMPOTENCY_KEY": "k-1",
    "CONTENT_LENGTH": "0",
}


def asked_over_wsgi(url, keys, ran):
    """The status of a request to an application that holds *keys*."""
    statuses = []

    def app(environ, start_response):
        ran.append(1)
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [b"secret"]

    with Engine(url, keyring=KeyRing(keys)) as engine:
        environ = {**ENVIRON, "wsgi.input": io.BytesIO()}
        body = WsgiGuard(app, engine=engine)(
            environ, lambda status, headers, _info=None: statuses.append(status)
        )
        b"".join(body)
        getattr(body, "close", bool)()
    return statuses[0][:3]


def test_over_wsgi_an_answer_that_cannot_be_opened_is_503(url):
    """X1, D2."""
    ran = []
    assert [asked_over_wsgi(url, keys, ran) for keys in (NEW, OLD, NEW)] == ["201", "503", "201"]
    assert len(ran) == 1


@pytest.mark.parametrize("bit", range(8))
def test_over_wsgi_an_answer_of_which_any_bit_was_changed_is_refused(url, bit):
    """X1: the first byte, too, which says that it is encrypted."""
    ran = []
    assert asked_over_wsgi(url, NEW, ran) == "201"
    spoil(url, flipped(stored_bytes(url), 0, bit))
    assert asked_over_wsgi(url, NEW, ran) in ("409", "503")
    assert len(ran) == 1


def test_over_asgi_an_answer_that_cannot_be_opened_is_503(url):
    """X1, D2."""
    ran, statuses = [], []

    async def app(asgi_scope, receive, send):
        ran.append(1)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def story():
        for keys in (NEW, OLD, NEW):
            async with AsyncEngine(url, keyring=KeyRing(keys)) as engine:
                headers = [(b"idempotency-key", b"k-1")]
                scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
                await AsgiGuard(app, engine=engine)(scope, receive, send)

    asyncio.run(story())
    assert statuses == [201, 503, 201]
    assert len(ran) == 1
