"""MySQL and MariaDB: what only this store can do wrong, on a real server that is also killed."""

import asyncio
import multiprocessing
import random
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count

import asyncmy
import pymysql
import pytest
from laws.records import ID, LEASE_MS, NOW_MS, RETENTION_MS, claim_of, id_of
from servers import START_S_MAX, free_port, until
from servers.mariadb import PLAIN, Mariadb, mariadb
from servers.relay import Relay

from coatcheck import AsyncEngine, Engine, KeyRing, Policy, ResultUnavailable, current_operation
from coatcheck.core.record import Swap, completed, failed, is_same_write, renewed
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import Batcher, Query, mysql_schema, open_store
from coatcheck.stores.at_rest import AtRest
from coatcheck.stores.ledger import ledger_of
from coatcheck.stores.mysql_flow import Terms, reads
from coatcheck.stores.mysql_line import Session
from coatcheck.stores.mysql_own import LOCK_WAIT, Ours
from coatcheck.stores.mysql_packets import framed
from coatcheck.stores.mysql_talk import Talk

MANY = [id_of(number) for number in range(1, 65)]
OVER_MS = NOW_MS + RETENTION_MS


@pytest.fixture
def url():
    return mariadb().fresh_url()


@pytest.fixture
def store(url):
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture(scope="module")
def own():
    """A server of this module's own, which its tests may stop, kill and spoil."""
    server = Mariadb(**{"innodb-flush-log-at-trx-commit": "1"})
    yield server
    server.remove()


@pytest.fixture
def own_url(own):
    return own.fresh_url()


@contextmanager
def somebody_else(url, **settings):
    """Another session in the database of *url*."""
    port, _, database = url.partition("?")[0].rpartition(":")[2].partition("/")
    settings = {"user": "root", "database": database, "autocommit": True, **PLAIN, **settings}
    with closing(pymysql.connect(host="127.0.0.1", port=int(port), **settings)) as connection:
        ask(connection, "set session transaction isolation level read committed")
        yield connection


def ask(connection, statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()


def waiting_for_locks(connection):
    ((_, number),) = ask(connection, "show global status like 'innodb_row_lock_current_waits'")
    return int(number)


def claim(id=ID, nonce=1):
    return Swap(id, 0, claim_of(id, nonce=nonce))


def complete(record, response=b"done"):
    return Swap(record.id, record.version, completed(record, response))


@pytest.fixture
def said(monkeypatch):
    """The first word of everything that is sent to a server."""
    words = []
    ask = Session.ask

    def listen(self, sent, *kind):
        is_prepared = sent[4] == 0x17
        words.append("execute" if is_prepared else sent[5:25].decode("latin-1").split(" ")[0])
        return ask(self, sent, *kind)

    monkeypatch.setattr(Session, "ask", listen)
    return words


def answer_to(store, statement):
    """What *store* is answered on the line that writes."""
    return store._writer.run(lambda _: iter(reads(statement))).rows


def in_every_way(url, key, result=None, connection=None):
    """What an operation returns, in both modes, sync and async; the transactions on *connection*."""
    result = result or key
    lent = {} if connection is None else {"connection": connection[0]}
    async_lent = {} if connection is None else {"connection": connection[1]}

    async def work():
        return result

    async def on_loop():
        async with AsyncEngine(url) as engine:
            ran = await engine.run(key, work, scope="async-run")
            done = await engine.transaction(key, work, scope="async", **async_lent)
            return [ran, done]

    with Engine(url) as engine:
        ran = engine.run(key, lambda: result, scope="run")
        done = engine.transaction(key, lambda: result, scope="sync", **lent)
    return [ran, done, *asyncio.run(on_loop())]


# --- how it is named ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://shop", "must be mysql://user"),
        ("mysql:///shop", "must be mysql://user"),
        ("mysql://ann:s3cret@host/shop/orders", "must be mysql://user"),
        ("mysql://ann:s3#cret@host/shop", "'#' as %23"),
        ("mysql://ann:s3cret@host:many/shop", "must be mysql://user"),
        ("mysql://ann:s3cret@host/shop?compakt=1", "compakt=… is no option; there are table="),
        ("mysql://ann:s3cret@host/shop?compact=yes", "compact=yes"),
        ("mysql://ann:s3cret@host/shop?timeout=soon", "timeout: 'soon' is not a duration"),
        ("mysql://ann:s3cret@host/shop?timeout=0s", "leaves no time"),
        ("mysql://ann:s3cret@host/shop?table=a`b", "letters, digits and '_'"),
        ("mysql://ann:s3cret@host/shop?table=coatcheck_meta", "cannot be the name"),
        ("mysql://ann:s3cret@host/shop?ssl_ca=/nowhere.pem", "ssl_ca=/nowhere.pem is no cert"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_with_words_that_help(url, words):
    """D1: before anything is connected, and without the password."""
    with pytest.raises(Misconfigured) as caught:
        open_store(url)
    assert words in str(caught.value)
    assert "s3" not in str(caught.value)
    assert caught.value.__cause__ is None or "s3" not in str(caught.value.__cause__)


def test_what_can_never_work_is_refused_at_the_start(url):
    """D2: and says what to do about it, without the password."""
    bare, _, _ = url.partition("?")
    with somebody_else(url) as root:
        ask(root, "create user nobody identified by 'none'")
    wrong = {
        bare.replace("root@", "root:s3cret@"): "refuses the user or the password",
        bare + "_missing": "there is no such database",
        bare.replace("root@", "nobody:none@"): "may not use this database",
        bare + "?ssl=1": "offers no TLS",
    }
    for other, words in wrong.items():
        with pytest.raises(Misconfigured, match=words) as caught:
            open_store(other)
        assert "s3cret" not in str(caught.value)
        assert bare.rpartition("/")[2] in str(caught.value)
    with somebody_else(url) as root:
        ask(root, "drop user nobody")


def test_a_server_that_is_not_there_is_an_outage(url):
    """D2: it may come; what speaks something else is told apart from what is silent."""
    with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
        open_store(f"mysql://root@127.0.0.1:{free_port()}/shop")
    assert not caught.value.is_ambiguous
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        open_store("mysql://root@no-such-host.invalid/shop")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(StoreUnavailable, match="no answer in time"),
    ):
        open_store(f"mysql://root@127.0.0.1:{silent.getsockname()[1]}/shop?timeout=100ms")


def test_names_and_passwords_may_hold_anything(url):
    """D1: as a URL spells them."""
    port_and_name = url.partition("@")[2]
    with somebody_else(url) as root:
        ask(root, "create user 'ann@home' identified by 'p@ss/wörd#'")
        ask(root, "grant all on *.* to 'ann@home'")
    named = f"mysql://ann%40home:p%40ss%2Fw%C3%B6rd%23@{port_and_name}"
    with closing(open_store(named)) as store:
        assert store.swap([claim()]) == [None]
    assert in_every_way(named, "a") == ["a"] * 4
    with somebody_else(url) as root:
        ask(root, "drop user 'ann@home'")


def test_a_connection_is_encrypted_and_verified_where_that_is_asked_for(tmp_path):
    """X3: by a certificate that is named; a server that cannot show it is not talked to."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [*command, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    server = Mariadb(**{"ssl-key": str(key), "ssl-cert": str(certificate)})
    try:
        bare, _, _ = server.fresh_url().partition("?")
        cipher = "show session status like 'Ssl_cipher'"
        for options, is_encrypted in (
            (f"?ssl_ca={certificate}", True),
            ("", True),
            ("?ssl=0", False),
        ):
            with closing(open_store(bare + options)) as store:
                assert store.swap([claim()]) == ([None] if "ca=" in options else [claim_of()])
                ((_, used),) = answer_to(store, cipher)
                assert bool(used) == is_encrypted
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            open_store(bare + "?ssl=1")
        for options in (f"?ssl_ca={certificate}", "", "?ssl=0"):
            ciphers = asyncio.run(ciphers_of_transactions(bare + options))
            assert list(map(bool, ciphers)) == [options != "?ssl=0"] * 2
    finally:
        server.remove()


async def ciphers_of_transactions(url):
    """What connections of the store's own are encrypted with, for sync and for async code."""
    cipher = "show session status like 'Ssl_cipher'"

    async def work():
        async with current_operation().connection.cursor() as cursor:
            await cursor.execute(cipher)
            return (await cursor.fetchone())[1]

    with Engine(url) as engine:
        found = engine.transaction(
            url, lambda: ask(current_operation().connection, cipher)[0][1], scope="sync"
        )
    async with AsyncEngine(url) as engine:
        return [found, await engine.transaction(url, work, scope="async")]


# --- how it is kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "\ud800", "\ud83d\ude00 😀", "x\0y", "é" * 300, "'\\", "A", "a "]
)
def test_strange_texts_are_stored_found_and_changed(store, text):
    """D1, O1: neither a collation nor a character set comes between."""
    record = claim_of()._replace(label=text, scope=text, key=text)
    alike = claim_of(id_of(2))._replace(label=text.swapcase() + " ", key=text + " ")
    assert store.swap([Swap(ID, 0, record), Swap(alike.id, 0, alike)]) == [None, None]
    assert store.swap([Swap(ID, record.version, failed(record))]) == [None]
    assert store.get([ID]) == [failed(record)]
    assert store.find(Query(key=text, label=text)).records == [failed(record)]


def test_any_bytes_come_back_whatever_the_server_thinks_of_backslashes(own, own_url):
    """D1: short or long, quoted or not; and nothing in them is ever a statement."""
    blobs = [bytes(range(256)) * n for n in (1, 4, 5, 64)]
    blobs += [filler * 1_100 for filler in (b"'", b"\\", b"\\'", b"'\\", b"\xe3'", b"\xbf\\'")]
    blobs += [b"x" * n + end for n in (1_023, 1_024) for end in (b"\\", b"'", b"\\'); --")]
    with somebody_else(own_url) as root:
        (before,) = ask(root, "select @@global.sql_mode")[0]
        ask(root, "set global sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'")
        try:
            with closing(open_store(own_url)) as store:
                for number, blob in enumerate(blobs):
                    held = claim_of(id_of(number))._replace(progress=blob)
                    assert store.swap([Swap(held.id, 0, held)]) == [None]
                    assert store.swap([complete(held, blob)]) == [None]
                    assert store.get([held.id]) == [completed(held, blob)]
                again = [completed(claim_of(MANY[n]), blob) for n, blob in enumerate(blobs[::-1])]
                store.sweep(OVER_MS)
                store.swap([Swap(record.id, 0, record) for record in again])
                assert store.get([record.id for record in again]) == again
        finally:
            ask(root, f"set global sql_mode = '{before}'")


HOSTILE = (
    "x\\', null, null, -5), (sleep(9), 1) -- \\\\'; drop table coatcheck_records; -- \" %s %% é"
)


MODES = ("", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES", "EMPTY_STRING_IS_NULL", "MSSQL")


@pytest.mark.parametrize(
    ("mode", "is_lent"),
    # In the mode ORACLE `begin` begins no transaction, so that nobody can lend us any.
    [*((mode, is_lent) for mode in MODES for is_lent in (False, True)), ("ORACLE", False)],
)
def test_no_key_is_ever_a_statement_whatever_the_server_thinks(own, own_url, mode, is_lent):
    """D1, L9: in both modes, sync and async, on our own connections and on lent ones."""
    port, _, database = own_url.partition("?")[0].rpartition(":")[2].partition("/")
    place = {"host": "127.0.0.1", "port": int(port), "user": "root", "database": database}
    lent = (
        (lambda: pymysql.connect(**place, **PLAIN), lambda: asyncmy.connect(**place))
        if is_lent
        else None
    )
    with somebody_else(own_url) as root:
        (before,) = ask(root, "select @@global.sql_mode")[0]
        ask(root, f"set global sql_mode = '{mode}'")
        try:
            for result in (HOSTILE, HOSTILE * 100):
                key = f"{len(result)}{HOSTILE}"
                for _ in range(2):
                    assert in_every_way(own_url, key, result, lent) == [result] * 4
            with Engine(own_url + "&compact=1") as engine:  # whose texts are empty
                for _ in range(2):
                    assert engine.transaction("k", lambda: "", scope="compact") == ""
        finally:
            ask(root, f"set global sql_mode = '{before}'")
        keys = {key.decode() for (key,) in ask(root, "select `key` from coatcheck_records")}
        assert keys == {"", *(f"{len(HOSTILE * n)}{HOSTILE}" for n in (1, 100))}


def test_a_compact_store_keeps_only_digests(url):
    """D1, S2: what people read is nowhere in the table."""
    record = claim_of()._replace(key="order-of-ann", label="POST /secret", scope="ann")
    with closing(open_store(url + "&compact=1")) as store:
        store.swap([Swap(ID, 0, record)])
        assert store.get([ID]) == [record._replace(key="", label="", scope="")]
    with somebody_else(url) as other:
        assert ask(other, "select label, scope, `key` from coatcheck_records") == ((b"",) * 3,)


# --- how it is written ----------------------------------------------------------------------------


def test_a_swap_alone_is_one_plain_statement_where_it_wins(store, said):
    """L1: no transaction around it, nothing read; whoever loses costs one read."""
    assert store.swap([claim(id_of(9))]) == [None]  # connects
    said.clear()
    assert store.swap([claim()]) == [None]
    assert store.swap([claim()]) == [claim_of()]
    assert store.swap([complete(claim_of())]) == [None]
    assert store.swap([Swap(ID, claim_of().version + 1, None)]) == [None]
    assert said == ["execute", "execute", "select", "execute", "delete"]


CAUTIOUS = "set sql_safe_updates=1, sql_select_limit=1, sql_big_selects=0, max_join_size=1"


def test_what_a_server_tells_new_sessions_for_the_sake_of_people_is_not_for_us(own, own_url):
    """T3, D2: that they change and read few rows."""
    with somebody_else(own_url) as root:
        ask(root, "create or replace user app")
        ask(root, "grant all on *.* to app")
        ask(root, "revoke super, connection admin on *.* from app")  # who has them is told nothing
        ask(root, f"set global init_connect = '{CAUTIOUS}'")
        try:
            url = own_url.replace("root@", "app@")
            with closing(open_store(url)) as store:
                assert store.swap([claim(id) for id in MANY]) == [None] * len(MANY)
                assert all(store.get(MANY))
                assert len(store.find(Query()).records) == len(MANY)
                assert {finding.level for finding in store.check()} == {"ok"}
                assert store.sweep(OVER_MS) == len(MANY)
            assert in_every_way(url, "key") == ["key"] * 4
        finally:
            ask(root, "set global init_connect = ''")
            ask(root, "drop user app")


def test_a_server_that_prepares_nothing_more_is_told_in_plain_words(own, own_url, said):
    """L1, D2: its limit is for all who use it, and somebody may have used it up."""
    with somebody_else(own_url) as root:
        ask(root, "set global max_prepared_stmt_count = 0")
        try:
            with closing(open_store(own_url)) as store:
                assert store.swap([claim()]) == [None]
                assert store.swap([complete(claim_of())]) == [None]
        finally:
            ask(root, "set global max_prepared_stmt_count = 16382")
    assert said[-2:] == ["insert", "update"]


def test_a_statement_that_the_server_has_forgotten_is_prepared_again(store):
    """D2: nothing was written, and we know it."""
    store.swap([claim()])
    session = store._writer._lines[0]._session
    for number in session.terms.kept:
        session.socket.sendall(framed(b"\x19" + number.to_bytes(4, "little")))  # is not answered
    with pytest.raises(StoreUnavailable, match="it has forgotten what was prepared") as caught:
        store.swap([complete(claim_of())])
    assert not caught.value.is_ambiguous
    assert store.swap([complete(claim_of())]) == [None]


def test_versions_are_compared_to_the_last_digit(store):
    """L5: as numbers, and not as what a fraction holds of them."""
    for size in (1, 2):
        old = [claim_of(id_of(10 * size + n))._replace(version=2**62 + n) for n in range(size)]
        store.swap([Swap(record.id, 0, record) for record in old])
        late = [Swap(r.id, r.version + 1, r._replace(version=r.version + 2)) for r in old]
        assert store.swap(late) == old
        assert store.swap([complete(record) for record in old]) == [None] * size


@pytest.mark.parametrize("size", [2, 64, 300])
def test_a_batch_of_any_size_is_one_command(store, said, size):
    """L1: and what loses in it is one more, however much it is."""
    claims = [claim_of(id_of(number)) for number in range(size)]
    store.swap([claim(id_of(999))])
    said.clear()
    assert store.swap([Swap(r.id, 0, r) for r in claims[1:]]) == [None] * (size - 1)
    assert said == (["insert"] if size > 2 else ["execute"])
    said.clear()
    assert store.swap([Swap(r.id, 0, r) for r in claims]) == [None, *claims[1:]]
    assert said == ["insert", "select"]
    said.clear()
    assert store.swap([complete(r) for r in claims]) == [None] * size
    assert said == ["update"]
    said.clear()
    more = [claim(id_of(number)) for number in range(1_000, 1_002)]
    again = [Swap(r.id, r.version + 1, r._replace(version=r.version + 2)) for r in claims]
    assert store.swap([*more, *again]) == [None] * (size + 2)
    assert said == ["begin;"]


def test_a_batch_of_winners_and_losers_is_answered_in_every_mixture(store):
    """L1, L5: late claims, zombies, gone ones, deletes, new lives and repetitions among winners."""
    for size in (2, 3, 7, 64, 257):
        old = [claim_of(id_of(1_000 * size + n)) for n in range(size)]
        kinds = [n % 7 for n in range(size)]
        store.swap(
            [Swap(r.id, 0, r) for r, kind in zip(old, kinds, strict=True) if kind not in (0, 1)]
        )
        lives = [r._replace(version=r.version + 1, expires_ms=r.expires_ms + 1) for r in old]
        swaps, wanted, after = [], [], []
        for record, life, kind in zip(old, lives, kinds, strict=True):
            swap, answer, stands = (
                (Swap(record.id, 0, record), None, record),
                (complete(record), GONE_VERSION, None),
                (Swap(record.id, 0, record._replace(nonce=7)), record, record),
                (complete(record), None, completed(record, b"done")),
                (Swap(record.id, record.version, life), None, life),
                (Swap(record.id, record.version - 1, life), record, record),
                (Swap(record.id, record.version, None), None, None),
            )[kind]
            swaps.append(swap)
            wanted.append(answer)
            after.append(stands)
        answers = [a if a is None or a.version else GONE_VERSION for a in store.swap(swaps)]
        assert answers == wanted
        assert store.get([record.id for record in old]) == after
        # An equal swap of a second caller loses to its twin, whose traces are the same.
        repeated = [swap for swap in swaps if swap.record is not None]
        standing = [r for r, swap in zip(after, swaps, strict=True) if swap.record is not None]
        answers = store.swap(repeated)
        assert [answer if answer and answer.version else None for answer in answers] == standing


GONE_VERSION = 0


def test_equal_claims_that_meet_in_batches_have_one_winner(url):
    """L1: also where nothing but the store's own mark tells the two apart."""
    with closing(open_store(url)) as one, closing(open_store(url)) as other:
        start = threading.Barrier(2)

        def swap(store, ids):
            start.wait(START_S_MAX)
            return dict(zip(ids, store.swap([claim(id) for id in ids]), strict=True))

        with ThreadPoolExecutor(2) as threads:
            for round in range(20):
                ids = [id_of(100 * round + n) for n in range(40)]
                told = list(threads.map(swap, (one, other), (ids, ids[::-1])))
                for id in ids:
                    assert sorted(answers[id] is None for answers in told) == [False, True]


@pytest.mark.parametrize("is_change", [False, True])
def test_a_batch_locks_its_rows_in_the_order_of_their_ids(is_change):
    """D2: in whatever order they came; two batches in different ones would wait for each other."""
    swaps = [complete(claim_of(id)) if is_change else claim(id) for id in MANY]
    random.Random(1).shuffle(swaps)
    talk = Talk("kept", "here", compact=False)
    said = next(talk.swap(Terms(1 << 24), swaps)).command
    places = [said.index(id.hex().encode()) for id in sorted(MANY)]
    assert places == sorted(places)


def test_no_swap_and_no_sweep_ever_scans_the_table(store, url):
    """T3: what they cost does not grow with the number of records."""
    store.swap([claim(id) for id in MANY])
    texts = store._talk.statements
    changes = [complete(claim_of(id)) for id in MANY[:3]]
    plans = {
        next(texts.read(MANY[:3])): "PRIMARY",
        texts.alone(complete(claim_of()), 1).decode(): "PRIMARY",
        texts.alone(Swap(ID, 5, None), 1).decode(): "PRIMARY",
        texts.together(changes, 1).decode(): "PRIMARY",
        texts.sweep(MANY[:50], OVER_MS).decode(): "PRIMARY",
        texts.expired(OVER_MS, 10): "expires",
        texts.find(Query(id_prefix=b"\0\0\0\1"), 60).partition(" for */ ")[2]: "PRIMARY",
    }
    with somebody_else(url) as other:
        for text, key in plans.items():
            ((_, _, _, way, _, used, *_),) = ask(other, f"explain {text}".replace("%", "%%"))
            assert (way, used) == ("range", key), text


# --- among others ---------------------------------------------------------------------------------


def test_a_claim_does_not_wait_for_a_sweep_of_others(url):
    """T3: a sweep locks what it takes, and no gap where another node was faster."""
    # 20 s: who waits for the sweep does so for as long, and nobody else does on a busy machine.
    with closing(open_store(url + "&timeout=20s")) as store:
        store.swap([claim(id) for id in MANY[::2]])

        with somebody_else(url) as sweeper:
            ask(sweeper, "begin")
            assert sweeper.query(store._talk.statements.sweep(MANY, OVER_MS)) == len(MANY) // 2
            started = time.monotonic()
            assert store.swap([claim(MANY[1])]) == [None]
            assert store.swap([claim(id) for id in MANY[3::2]]) == [None] * (len(MANY) // 2 - 1)
            assert store.swap([complete(claim_of(id)) for id in MANY[1::2]]) == [None] * 32
            assert time.monotonic() - started < 10
            ask(sweeper, "rollback")
        assert store.sweep(OVER_MS, 1_000) == len(MANY)


def test_a_sweep_does_not_wait_for_records_that_are_kept(url):
    """T3: nor does it take one that was renewed since it looked."""
    with closing(open_store(url + "&timeout=1s")) as store, somebody_else(url) as holder:
        kept = claim_of(id_of(99), now_ms=NOW_MS + 1)
        store.swap([claim(id) for id in MANY] + [Swap(kept.id, 0, kept)])
        ask(holder, "begin")
        ask(holder, f"select 1 from coatcheck_records where id = x'{kept.id.hex()}' for update")
        ids = [row[0] for row in ask(holder, store._talk.statements.expired(OVER_MS, 500))]
        store.swap([Swap(MANY[0], NOW_MS, renewed(claim_of(MANY[0]), OVER_MS + 1))])
        assert store.sweep(OVER_MS, 10) == 10
        assert holder.query(store._talk.statements.sweep(ids, OVER_MS)) == len(MANY) - 11
        ask(holder, "commit")
        assert [r.id for r in store.find(Query()).records] == [MANY[0], kept.id]


def test_a_swap_that_meets_a_deadlock_is_done_again(store, url):
    """L1, D2: a real one, and the server undoes ours, because the other has written more."""
    first, second = MANY[:2]
    store.swap([claim(first), claim(second)])
    deadlocks = "select variable_value from information_schema.global_status"
    deadlocks += " where variable_name = 'innodb_deadlocks'"
    lock = "select 1 from coatcheck_records where id = x'{}' for update"
    with somebody_else(url) as other, somebody_else(url) as watcher:
        before = int(ask(watcher, deadlocks)[0][0])
        ask(other, "create table heavy (n int) engine = innodb")
        ask(other, "begin")
        ask(other, "insert into heavy select seq from seq_1_to_500")
        ask(other, lock.format(second.hex()))
        with ThreadPoolExecutor(1) as threads:
            swaps = [complete(claim_of(second)), complete(claim_of(first)), claim(MANY[2])]
            asked = threads.submit(store.swap, swaps)
            until(lambda: waiting_for_locks(watcher))
            ask(other, lock.format(first.hex()))
            assert int(ask(watcher, deadlocks)[0][0]) == before + 1
            ask(other, "commit")
            assert asked.result(START_S_MAX) == [None, None, None]
    done = [completed(claim_of(id), b"done") for id in (first, second)]
    assert store.get(MANY[:3]) == [*done, claim_of(MANY[2])]


@pytest.mark.parametrize(
    ("lock", "unlock"),
    [
        ("select * from coatcheck_records for update", "rollback"),
        ("lock tables coatcheck_records write", "unlock tables"),
    ],
    ids=["rows", "the table"],
)
def test_what_stays_locked_is_an_outage_until_it_is_free(url, lock, unlock):
    """D2: nothing was written, and we know it."""
    with closing(open_store(url + "&timeout=2s")) as store, somebody_else(url) as other:
        store.swap([claim()])
        if unlock == "rollback":
            ask(other, "begin")
        ask(other, lock)
        for swaps in ([complete(claim_of())], [complete(claim_of()), claim(id_of(2))]):
            with pytest.raises(StoreUnavailable, match="somebody keeps rows") as caught:
                store.swap(swaps)
            assert not caught.value.is_ambiguous
        ask(other, unlock)
        assert store.swap([complete(claim_of()), claim(id_of(2))]) == [None, None]


def test_a_record_that_does_not_fit_fails_alone(own, own_url, said, caplog):
    """D2, L12: with its own error, or without its response; its neighbours are written."""
    with (
        packets_of(own_url, 1_048_576),
        closing(open_store(own_url)) as store,
        ThreadPoolExecutor(8) as threads,
    ):
        store.swap([claim(id) for id in MANY[:8]])
        store.get(MANY[:1])  # connects, too
        large = {2: renewed(claim_of(MANY[2]), NOW_MS)._replace(progress=b"'" * 1_100_000)}
        large[3] = completed(claim_of(MANY[3]), b"'" * 1_100_000)
        swaps = [complete(claim_of(id), b"x" * 300_000) for id in MANY[:8]]
        for number, record in large.items():
            swaps[number] = Swap(record.id, NOW_MS, record)
        said.clear()
        batcher = Batcher(store)
        asked = [threads.submit(batcher.swap, swap) for swap in swaps]
        for number, answer in enumerate(asked):
            if number == 2:
                with pytest.raises(ValueError, match="raise its max_allowed_packet"):
                    answer.result(START_S_MAX)
            else:
                assert answer.result(START_S_MAX) is None
        assert store.get([MANY[3]]) == [large[3]._replace(response=None)]
        assert "its response of 1100000 bytes is over" in caplog.text
        # Whoever asks again, because an answer was lost, is shown what it has written.
        assert store.swap([swaps[3]]) == [large[3]]
        assert store.swap([swaps[3], swaps[4]]) == [large[3], swaps[4].record]
        # Together they are too large for one statement, and not for one transaction.
        held = [swap.record for swap in swaps if swap.id not in (MANY[2], MANY[3])]
        again = [Swap(r.id, r.version, r._replace(version=r.version + 1)) for r in held]
        assert store.swap(again) == [None] * 6
        claims = [Swap(id, 0, completed(claim_of(id), b"y" * 300_000)) for id in MANY[8:16]]
        assert store.swap(claims) == [None] * 8
        assert store.swap(claims) == [swap.record for swap in claims]
        assert "set" not in said, "it has connected anew"
        assert any("max_allowed_packet" in f.message for f in store.check())


def test_a_line_on_which_a_statement_was_too_large_is_not_used_any_more(own, own_url, said):
    """D2: the server hangs up behind its refusal; the next write finds another line, and wins."""
    with packets_of(own_url, 16_384), closing(open_store(own_url)) as store:
        store.swap([claim()])
        session = store._writer._lines[0]._session
        session.terms = replace(session.terms, statement_bytes_max=1 << 20)  # it has shrunk since
        large = renewed(claim_of(), NOW_MS)._replace(progress=b"x" * 20_000)
        said.clear()
        with pytest.raises(ValueError, match="bigger than 'max_allowed_packet'"):
            store.swap([Swap(ID, NOW_MS, large)])
        assert said == ["execute"], "nothing is said to who has hung up"
        assert store.swap([claim(id_of(2))]) == [None]
        assert store.get([ID, id_of(2)]) == [claim_of(), claim_of(id_of(2))]


@pytest.mark.parametrize("rest", ["", "&compact=1"])
@pytest.mark.parametrize("keys", [None, {"k": b"k" * 32}])
def test_a_writer_whose_answer_did_not_fit_knows_its_own_record_again(own_url, rest, keys):
    """L12, X1: though texts for people are not kept, and no two seals are the same."""
    with (
        packets_of(own_url, 1_048_576),
        closing(AtRest(open_store(own_url + rest), KeyRing(keys) if keys else None)) as store,
    ):
        held = claim_of()._replace(progress=b"noted", label="orders", scope="s", key="order-1")
        answer = completed(held, random.Random(1).randbytes(1_100_000))
        assert store.swap([Swap(ID, 0, held)]) == [None]
        assert store.swap([Swap(ID, held.version, answer)]) == [None]
        assert is_same_write(*store.swap([Swap(ID, held.version, answer)]), answer)
        (standing,) = store.swap([Swap(ID, held.version, answer._replace(nonce=99))])
        assert (standing.nonce, standing.response) == (answer.nonce, None)


@contextmanager
def packets_of(url, bytes_max):
    """A server that takes no larger ones."""
    with somebody_else(url) as root:
        ask(root, f"set global max_allowed_packet = {bytes_max}")
        try:
            yield
        finally:
            ask(root, "set global max_allowed_packet = 16777216")


@pytest.mark.parametrize("way", ["run", "transaction"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_response_that_does_not_fit_is_not_kept_and_never_runs_twice(
    own, own_url, way, is_async, caplog
):
    """L12, L1: as with one over `response_bytes_max`; the work was done, and that is to be known."""
    ran = []

    def work():
        ran.append(1)
        return "'" * 2_000_000

    async def awork():
        return work()

    async def on_loop():
        async with AsyncEngine(own_url, clock=lambda: clock[0]) as engine:
            return await getattr(engine, way)("large", awork, scope="s")

    def attempt():
        if is_async:
            return asyncio.run(on_loop())
        with Engine(own_url, clock=lambda: clock[0]) as engine:
            return getattr(engine, way)("large", work, scope="s")

    clock = [NOW_MS]
    with packets_of(own_url, 1_048_576):
        assert len(attempt()) == 2_000_000
        for _ in range(2):
            clock[0] += 10 * LEASE_MS
            with pytest.raises(ResultUnavailable):
                attempt()
    assert len(ran) == 1
    assert "is over what max_allowed_packet lets through" in caplog.text


@pytest.mark.parametrize("filler", [b"'", b"\\", b"\0", b"\xff"])
def test_the_largest_response_fits_into_what_the_doctor_asks_for(own, own_url, filler):
    """L12, D3: whatever it is made of, alone, in a batch, and in a transaction."""
    body = filler * (8 * 1_024 * 1_024)
    with (
        packets_of(own_url, mysql_schema._PACKET_BYTES_MIN),
        closing(open_store(own_url)) as store,
    ):
        assert not any("max_allowed_packet" in f.message for f in store.check())
        store.swap([claim(id) for id in MANY[:3]])
        swaps = [complete(claim_of(id), body) for id in MANY[:3]]
        assert store.swap(swaps[:1]) == [None]
        assert store.swap(swaps[1:]) == [None, None]
        assert store.get(MANY[:3]) == [swap.record for swap in swaps]
        with somebody_else(own_url) as lent:
            held = claim_of(MANY[3])
            for written in (*store.ledger.claim(Swap(held.id, 0, held), 1_000), None):
                text, values, _ = written or store.ledger.change(complete(held, body))
                with lent.cursor() as cursor:
                    assert cursor.execute(text, values) == 1
        assert store.get([MANY[3]]) == [completed(held, body)]


@pytest.mark.parametrize(
    "wrong", [{"nonce": 2**64}, {"attempt": 2**31}, {"fingerprint": b"x" * 17}, {"id": b"x" * 17}]
)
def test_a_record_that_cannot_be_written_fails_with_its_own_error(store, url, wrong):
    """D2: is not cut to size, is no outage, and leaves nothing locked."""
    bad = claim_of(id_of(2))._replace(**wrong)
    attempts = ([Swap(bad.id, 0, bad)], [claim(), Swap(bad.id, 0, bad), claim(id_of(3))])
    changes = [complete(claim_of(id_of(3))), Swap(bad.id, 0, bad)]
    for swaps in (*attempts, changes):
        with pytest.raises(ValueError, match="a record cannot be written"):
            store.swap(swaps)
    with closing(open_store(url + "&timeout=1s")) as other:
        assert other.swap([claim(), claim(id_of(3))]) == [None, None]


# --- its schema -----------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_with_both_versions(url):
    """D4: and left as it is."""
    open_store(url).close()
    with somebody_else(url) as other:
        ask(other, "update coatcheck_meta set value = 7")
        words = f"schema 7, but .* up to {len(mysql_schema.MIGRATIONS)}"
        with pytest.raises(Misconfigured, match=words):
            open_store(url)
        assert ask(other, "select value from coatcheck_meta") == ((7,),)


def test_who_only_looks_makes_nothing(url):
    """D4: and finds what is there, with nothing but the right to read it."""
    with pytest.raises(Misconfigured, match="there is no table coatcheck_records"):
        open_store(url, create=False)
    with somebody_else(url) as other:
        assert ask(other, "show tables") == ()
        with closing(open_store(url)) as store:
            store.swap([claim()])
        ask(other, "create user reader")
        ask(other, "grant select on *.* to reader")
    with closing(open_store(url.replace("root@", "reader@"), create=False)) as store:
        assert store.get([ID]) == [claim_of()]
        with pytest.raises(StoreUnavailable, match="the user may not do this") as caught:
            store.swap([claim(id_of(2))])
        assert not caught.value.is_ambiguous
        errors = [finding.message for finding in store.check() if finding.level == "error"]
        for right in ("insert", "update", "delete"):
            assert any(f"the user may not {right} in coatcheck_records" in e for e in errors)
    with pytest.raises(Misconfigured, match="the user may not do this"):
        open_store(url.replace("root@", "reader@") + "&table=another")
    with somebody_else(url) as other:
        ask(other, "drop user reader")


def test_several_tables_share_a_database_with_those_of_an_application(url):
    """D4: a table of the application's is not taken for ours."""
    with somebody_else(url) as other:
        ask(other, "create table orders (id int, version int)")
        with pytest.raises(Misconfigured, match="not of our making"):
            open_store(url + "&table=orders")
        with closing(open_store(url)) as one, closing(open_store(url + "&table=more")) as two:
            assert one.swap([claim()]) == two.swap([claim()]) == [None]
        tables = {name for (name,) in ask(other, "show tables")}
        assert tables == {"orders", "coatcheck_meta", "coatcheck_records", "more"}
        ask(other, "drop table more")
        with (
            closing(open_store(url + "&table=more")) as two,
            pytest.raises(StoreUnavailable, match="a table of ours is gone"),
        ):
            two.swap([claim()])


def open_and_claim(url, start, answers):
    start.wait()
    with closing(open_store(url)) as store:
        answers.put(store.swap([claim(id, nonce=id[-1]) for id in MANY]).count(None))


def test_processes_that_start_at_once_share_one_schema(url):
    """D4, L1: whoever creates it, all go on, and every key has one winner."""
    fork = multiprocessing.get_context("fork")
    start, answers = fork.Barrier(6, timeout=START_S_MAX), fork.Queue()
    started = [fork.Process(target=open_and_claim, args=(url, start, answers)) for _ in range(6)]
    for process in started:
        process.start()
    won = [answers.get(timeout=START_S_MAX) for _ in started]
    for process in started:
        process.join(START_S_MAX)
        assert process.exitcode == 0
    assert sum(won) == len(MANY)
    with somebody_else(url) as other:
        assert ask(other, "select * from coatcheck_meta") == ((b"coatcheck_records", 1),)


# --- its faults -----------------------------------------------------------------------------------


def connection_of(store):
    ((number,),) = answer_to(store, "select connection_id()")
    return int(number)


def use_in_child(store, said):
    said.put((connection_of(store), store.swap([claim(), claim(id_of(2))])))
    store.close()


def test_a_store_goes_on_in_a_forked_child_and_in_its_parent(store):
    """D2: each with connections of its own, and the child's goodbye ends only its own."""
    assert store.swap([claim()]) == [None]
    mine = connection_of(store)
    fork = multiprocessing.get_context("fork")
    said = fork.Queue()
    child = fork.Process(target=use_in_child, args=(store, said))
    child.start()
    its, answers = said.get(timeout=START_S_MAX)
    child.join(START_S_MAX)
    assert child.exitcode == 0
    assert its != mine
    assert answers == [claim_of(), None]
    assert connection_of(store) == mine
    assert store.swap([claim(id_of(2)), claim(id_of(3))]) == [claim_of(id_of(2)), None]


def test_a_connection_that_was_closed_while_nobody_used_it_is_replaced(store, url):
    """D2: nothing was on its way, so nobody needs to know."""
    store.swap([claim()])
    with somebody_else(url) as root:
        ask(root, f"kill connection {connection_of(store)}")
        until(store._writer._lines[0]._session.is_stale)
    assert store.swap([claim()]) == [claim_of()]


@pytest.mark.parametrize("size", [1, 2])
def test_a_write_that_is_cut_off_may_have_taken_effect(store, url, size):
    """L1, D2: one alone, or several, which commit in the same breath."""
    records = [claim_of(id) for id in MANY[:size]]
    store.swap([Swap(r.id, 0, r) for r in records])
    with somebody_else(url) as other, somebody_else(url) as root, ThreadPoolExecutor(1) as threads:
        number = connection_of(store)
        ask(other, "begin")
        ask(other, "select * from coatcheck_records for update")
        asked = threads.submit(store.swap, [complete(record) for record in records])
        until(lambda: waiting_for_locks(root))
        ask(root, f"kill connection {number}")
        with pytest.raises(StoreUnavailable) as caught:
            asked.result(START_S_MAX)
        assert caught.value.is_ambiguous
        ask(other, "rollback")
    assert store.swap([complete(record) for record in records]) == [None] * size


def test_claims_that_were_won_before_a_failure_may_have_taken_effect(store, url, monkeypatch):
    """L1, D2: some won and that is committed; who lost could not be read any more."""
    store.swap([claim(MANY[0], nonce=7)])
    number = connection_of(store)
    ask_server = Session.ask

    def hang_up_and_read(session, sent):
        if sent[5:].startswith(b"select"):
            with somebody_else(url) as root:
                ask(root, f"kill connection {number}")
                until(session.is_stale)
        return ask_server(session, sent)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "ask", hang_up_and_read)
        with pytest.raises(StoreUnavailable) as caught:
            store.swap([claim(MANY[0]), claim(MANY[1])])
        assert caught.value.is_ambiguous
    assert store.get(MANY[:2]) == [claim_of(MANY[0], nonce=7), claim_of(MANY[1])]


def test_who_has_won_is_a_doubt_where_the_rival_is_swept_before_the_look(store, url, monkeypatch):
    """L1, D2: one of two won, and nothing tells any more which; never are both told that they did."""
    store.swap([claim(MANY[0], nonce=7)])
    ask_server = Session.ask

    def sweep_and_read(session, sent):
        if sent[5:].startswith(b"select"):
            with somebody_else(url) as other:
                ask(other, f"delete from coatcheck_records where id = x'{MANY[0].hex()}'")
        return ask_server(session, sent)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "ask", sweep_and_read)
        with pytest.raises(StoreUnavailable, match="came or went") as caught:
            store.swap([claim(MANY[0]), claim(MANY[1])])
        assert caught.value.is_ambiguous
    assert store.swap([claim(MANY[0]), claim(MANY[1])]) == [None, claim_of(MANY[1])]


def test_a_server_that_stops_answering_is_an_outage_until_it_does(own, own_url):
    """D2: within the time that the URL allows; what was sent may have taken effect."""
    with closing(open_store(own_url + "&timeout=300ms")) as store:
        store.swap([claim()])
        store.get([ID])
        own.kill(signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no answer in time") as caught:
                store.swap([complete(claim_of())])
            assert caught.value.is_ambiguous
            with pytest.raises(StoreUnavailable, match="no answer in time") as caught:
                store.swap([claim(id_of(2))])  # on a new connection, which nobody answers
            assert not caught.value.is_ambiguous
            with pytest.raises(StoreUnavailable) as caught:
                store.get([ID])
            assert not caught.value.is_ambiguous
            assert [finding.level for finding in store.check()] == ["error"]
            assert time.monotonic() - started < 5
        finally:
            own.kill(signal.SIGCONT)
        done = completed(claim_of(), b"done")
        assert until(lambda: store.swap([complete(claim_of())])) in ([None], [done])
        assert store.get([ID]) == [done]


@pytest.mark.parametrize(
    ("statement", "limit_s"),
    [
        ("BEGIN", 2),
        ("savepoint coatcheck_claim", 2),
        ("release savepoint coatcheck_claim", 2),
        ("update `kept` set version = 1", 2),
        (LOCK_WAIT.format(7) + "insert into `kept` (id) values (1)", 9),
        ("set session sql_mode = 'STRICT_ALL_TABLES'", 2),
        ("set statement max_statement_time = 60 for select 1", None),
        ("begin not atomic select sleep(60); end", None),
        ("rollback to savepoint mine", None),
        ("update `keptx` set version = 1", None),
        ("insert into orders values ('update `kept` ')", None),
    ],
)
def test_what_we_say_in_a_transaction_is_told_from_what_a_handler_says(statement, limit_s):
    """D2, L9: only our own words have a limit, which allows for the lock that they wait for."""
    assert Ours("kept", 2).limit_s(statement) == limit_s


SLOW = "select sleep(0.5)"  # longer than we would wait, but a handler may


@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_transaction_does_not_wait_for_a_server_that_stops_answering(own, own_url, is_at_the_end):
    """D2, L9: neither its claim nor its commit, on a connection of the store's own."""
    with Engine(own_url + "&timeout=300ms") as engine:
        engine.transaction("a", lambda: ask(current_operation().connection, SLOW), scope="s")
        with stopped(own, own_url) as stop, pytest.raises(StoreUnavailable, match="timed out"):
            engine.transaction("b", stop if is_at_the_end else stop() or int, scope="s")


@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_an_async_transaction_does_not_wait_for_a_server_that_stops_answering(
    own, own_url, is_at_the_end
):
    """D2, L9: the same on an event loop, whose driver has no such limit for a statement."""

    async def slow():
        async with current_operation().connection.cursor() as cursor:
            await cursor.execute(SLOW)

    async def story():
        async def work():
            if is_at_the_end:
                stop()

        async with AsyncEngine(own_url + "&timeout=300ms") as engine:
            await engine.transaction("a", slow, scope="s")
            with stopped(own, own_url) as stop:
                if not is_at_the_end:
                    stop()
                with pytest.raises(StoreUnavailable, match="no answer in time"):
                    await engine.transaction("b", work, scope="s")

    asyncio.run(story())


@contextmanager
def a_way_to(url):
    """Another way to the server of *url*: a relay, and the URL that leads over it."""
    port = int(url.partition("?")[0].rpartition(":")[2].partition("/")[0])
    with closing(Relay(port)) as relay:
        started = time.monotonic()
        yield relay, url.replace(f":{port}/", f":{relay.port}/") + "&timeout=300ms"
        assert time.monotonic() - started < 15


def test_a_commit_that_nobody_answers_is_an_outage_in_time_and_is_replayed(own_url):
    """D2, L9: it has taken effect, and whoever asks again is given its answer."""

    def work():
        relay.fall_silent_after(b"COMMIT")
        return "done"

    with a_way_to(own_url) as (relay, url), Engine(url) as engine:
        with pytest.raises(StoreUnavailable, match="timed out") as caught:
            engine.transaction("a", work, scope="s")
        assert caught.value.is_ambiguous
    with Engine(own_url) as engine:
        assert engine.transaction("a", lambda: "again", scope="s") == "done"


@pytest.mark.parametrize("word", ["commit", "rollback"])
def test_the_end_of_a_transaction_has_a_limit_whatever_was_said_before(own_url, word):
    """D2, L9: a handler's own statement has none, and may have been the last."""
    with a_way_to(own_url) as (relay, url), closing(open_store(url)) as store:
        connection = ledger_of(store).connect()
        assert ask(connection, SLOW) == ((0,),)
        relay.fall_silent_after(word.upper().encode())
        with pytest.raises(pymysql.err.OperationalError, match="timed out"):
            getattr(connection, word)()


def test_a_commit_of_an_event_loop_that_nobody_answers_is_an_outage_in_time(own_url):
    """D2, L9: the same, with a driver that has no such limit by itself."""

    async def again():
        return "again"

    async def story():
        async def work():
            relay.fall_silent_after(b"COMMIT")
            return "done"

        with a_way_to(own_url) as (relay, url):
            async with AsyncEngine(url) as engine:
                with pytest.raises(StoreUnavailable, match="no answer in time") as caught:
                    await engine.transaction("a", work, scope="s")
            assert caught.value.is_ambiguous
        async with AsyncEngine(own_url) as engine:
            assert await engine.transaction("a", again, scope="s") == "done"

    asyncio.run(story())


def test_a_handler_that_fails_with_its_server_comes_back(own, own_url):
    """D2, L9: what it did cannot be undone by anybody who answers, and its own error is told."""

    def fail():
        ask(
            current_operation().connection, "select 1"
        )  # which might have taken as long as it likes
        stop()
        raise ZeroDivisionError

    with Engine(own_url + "&timeout=300ms") as engine:
        with stopped(own, own_url) as stop, pytest.raises(ZeroDivisionError):
            engine.transaction("a", fail, scope="s")
        assert engine.transaction("a", lambda: "done", scope="s") == "done"


def test_an_async_handler_that_fails_with_its_server_comes_back(own, own_url):
    """D2, L9."""

    async def done():
        return "done"

    async def story():
        async def fail():
            stop()
            raise ZeroDivisionError

        patient = Policy(mode="transaction", wait="30s")  # who cannot undo is not given that long
        async with AsyncEngine(own_url + "&timeout=300ms", patient) as engine:
            with stopped(own, own_url) as stop, pytest.raises(ZeroDivisionError):
                await engine.transaction("a", fail, scope="s")
            assert await engine.transaction("a", done, scope="s") == "done"

    asyncio.run(story())


@contextmanager
def stopped(server, url):
    """A function that stops *server*; it goes on at the end, which must not be far."""
    started = time.monotonic()
    try:
        yield lambda: server.kill(signal.SIGSTOP)
        assert time.monotonic() - started < 15
    finally:
        server.kill(signal.SIGCONT)
        until(lambda: answers(url))


def answers(url):
    with somebody_else(url) as root:
        return ask(root, "select 1")


def test_a_restart_of_the_server_needs_no_restart_of_ours(own, own_url):
    """D2: an outage meanwhile, and everything as before afterwards."""
    with closing(open_store(own_url)) as store:
        store.swap([claim()])
        own.stop()
        for call in (lambda: store.swap([claim(id_of(2))]), lambda: store.get([ID]), store.now_ms):
            with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
                call()
            assert not caught.value.is_ambiguous
        own.start()
        assert store.swap([claim(), claim(id_of(2))]) == [claim_of(), None]
        assert store.get([ID]) == [claim_of()]


class Writer:
    """A thread that claims and completes until it is told to end, and remembers what it was told."""

    numbers = count(1)

    def __init__(self, store, size):
        self.store, self.size = store, size
        self.acknowledged, self.refused, self.unsure = [], [], []
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self):
        while not self.ends.is_set():
            claims = [claim_of(id_of(next(self.numbers))) for _ in range(self.size)]
            swaps = [Swap(record.id, 0, record) for record in claims]
            if self.attempt(swaps) and self.attempt([complete(record) for record in claims]):
                continue
            self.ends.wait(0.01)

    def attempt(self, swaps):
        try:
            assert self.store.swap(swaps) == [None] * len(swaps)
        except StoreUnavailable as error:
            (self.unsure if error.is_ambiguous else self.refused).extend(swaps)
            return False
        self.acknowledged.extend(swaps)
        return True


def test_what_was_acknowledged_survives_a_kill_of_the_server(own, own_url):
    """D1, D2, L5: nothing acknowledged is lost, and nothing refused was written."""
    with closing(open_store(own_url)) as one, closing(open_store(own_url)) as other:
        writers = [Writer(one, 1), Writer(other, 1), Writer(other, 5)]
        try:
            for _ in range(2):
                told = [len(writer.acknowledged) + 60 for writer in writers]
                until(lambda told=told: all(map(is_past, writers, told)))
                own.kill()
                refused = [len(writer.refused) for writer in writers]
                until(
                    lambda refused=refused: all(
                        len(w.refused) > n for w, n in zip(writers, refused, strict=True)
                    )
                )
                own.start()
            told = [len(writer.acknowledged) + 60 for writer in writers]
            until(lambda: all(map(is_past, writers, told)))
        finally:
            for writer in writers:
                writer.ends.set()
                writer.thread.join(START_S_MAX)
        for writer in writers:
            last = {swap.id: swap.record for swap in writer.acknowledged}
            unsure = {swap.id: swap.record for swap in writer.unsure}
            for record, found in zip(last.values(), one.get(list(last)), strict=True):
                assert found in (record, unsure.get(record.id, record))
            never = [swap.id for swap in writer.refused if swap.expected == 0]
            assert one.get(never) == [None] * len(never)


def is_past(writer, count):
    return len(writer.acknowledged) > count


def test_a_search_does_not_wait_for_a_server_that_was_frozen_before(own, own_url):
    """D2: it may take a minute, but not to find out that nobody is there."""
    with closing(open_store(f"{own_url}&timeout=1s")) as store:
        store.swap([claim()])
        assert len(store.find(Query()).records) == 1
        own.kill(signal.SIGSTOP)
        begun_s = time.monotonic()
        try:
            with pytest.raises(StoreUnavailable):
                store.find(Query())
        finally:
            own.kill(signal.SIGCONT)
        assert time.monotonic() - begun_s < 20
        until(lambda: len(store.find(Query()).records) == 1)


def test_a_server_that_becomes_read_only_is_an_outage_that_the_doctor_sees(own, own_url):
    """D2, D3: after a failover the old primary still answers, and knows nothing of the new one."""
    with somebody_else(own_url) as root:
        ask(root, "create or replace user app")
        ask(root, "grant all on *.* to app")
        ask(root, "revoke super, read_only admin on *.* from app")
        with closing(open_store(own_url.replace("root@", "app@"))) as store:
            store.swap([claim()])
            assert store.get([ID]) == [claim_of()]
            ask(root, "set global read_only = 1")
            try:
                for call in (
                    lambda: store.swap([claim(id_of(2))]),
                    lambda: store.swap([complete(claim_of()), claim(id_of(2))]),
                    lambda: store.get([ID]),
                    lambda: store.get([id_of(2)]),  # on a new connection, which is refused
                    lambda: store.find(Query()),
                ):
                    with pytest.raises(StoreUnavailable, match="it is read-only") as caught:
                        call()
                    assert not caught.value.is_ambiguous
                ((level, words),) = store.check()
                assert (level, "it is read-only; is it a replica?" in words) == ("error", True)
            finally:
                ask(root, "set global read_only = 0")
            assert store.swap([complete(claim_of()), claim(id_of(2))]) == [None, None]
            assert {finding.level for finding in store.check()} == {"ok"}
        ask(root, "drop user app")


def test_a_replica_is_refused_also_where_we_could_write_to_it(own, own_url):
    """D2, D3: whoever may do everything may write there, and nobody would ever see it."""
    with somebody_else(own_url) as root:
        ask(root, "set global read_only = 1")
        try:
            with pytest.raises(StoreUnavailable, match="it is read-only; is it a replica"):
                open_store(own_url)
        finally:
            ask(root, "set global read_only = 0")
        assert ask(root, "show tables") == ()


# --- what the doctor sees -------------------------------------------------------------------------

SAFE = {
    "innodb_flush_log_at_trx_commit": "1",
    "max_allowed_packet": "16777216",
    "log_bin": "ON",
    "sync_binlog": "1",
    "binlog_format": "ROW",
    "read_only": "OFF",
}


@pytest.mark.parametrize(
    ("setting", "level", "words"),
    [
        ({}, "ok", "on disk"),
        ({"innodb_flush_log_at_trx_commit": "0"}, "warning", "crash of the server forgets"),
        ({"innodb_flush_log_at_trx_commit": "2"}, "warning", "a power cut forgets"),
        ({"sync_binlog": "0"}, "warning", "sync_binlog = 0"),
        ({"sync_binlog": "0", "log_bin": "OFF"}, "ok", "on disk"),
        ({"innodb_doublewrite": "OFF"}, "warning", "torn pages"),
        ({"super_read_only": "ON"}, "error", "no record can be written"),
        ({"binlog_format": "STATEMENT"}, "error", "set it to ROW"),
        ({"max_allowed_packet": "4194304"}, "warning", "of it are not kept"),
    ],
)
def test_the_doctor_warns_of_settings_that_forget(setting, level, words):
    """D3: each with what to do about it."""
    settings = {**SAFE, **setting}
    told = [
        *mysql_schema._about_writing(settings),
        *mysql_schema._about_durability(settings),
    ]
    assert any(found == level and words in text for found, text in told)
    assert sum(found != "ok" for found, _ in told) == (level != "ok")


def test_a_server_that_could_forget_is_warned_of_when_it_is_opened(own, own_url, caplog):
    """D3: what its settings or its table may lose is said at the start, and else nothing."""
    with somebody_else(own_url) as root:
        open_store(own_url).close()
        assert caplog.text == ""
        ask(root, "set global innodb_flush_log_at_trx_commit = 2")
        ask(root, "alter table coatcheck_records engine = aria")
        try:
            open_store(own_url).close()
        finally:
            ask(root, "set global innodb_flush_log_at_trx_commit = 1")
    assert "a power cut forgets the last second" in caplog.text
    assert "which has no transactions" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert all("mysql://root@127.0.0.1" in record.message for record in caplog.records)


def test_the_doctor_sees_what_became_of_the_table(store, url, monkeypatch):
    """D3: an engine without transactions, another schema, no table at all, a clock that is off."""
    with somebody_else(url) as other:
        ask(other, "alter table coatcheck_records engine = aria")
        ask(other, "update coatcheck_meta set value = 2")
        errors = [f.message for f in store.check() if f.level == "error"]
        assert ["no transactions" in errors[0], "schema 2" in errors[1]] == [True, True]
        ask(other, "drop table coatcheck_records")
        assert any("all records are gone" in finding.message for finding in store.check())
    monkeypatch.setattr(mysql_schema, "_CLOCK", "select 0")
    assert any("its clock is -" in finding.message for finding in store.check())


def errors_of(store):
    """What the doctor calls an error."""
    return [finding.message for finding in store.check() if finding.level == "error"]


@pytest.mark.parametrize(
    "key", ["", ", add primary key (id, version)", ", add primary key (id(8))"]
)
def test_a_table_without_its_key_is_refused_and_the_doctor_says_so(store, url, key):
    """L1, D3: as in a restore that is not over; there every claim of one key would win."""
    with somebody_else(url) as other:
        ask(other, f"alter table coatcheck_records drop primary key{key}")
        (error,) = errors_of(store)
        assert "has no primary key" in error
        with pytest.raises(Misconfigured, match="has no primary key"):
            open_store(url)


def test_who_has_opened_a_table_before_it_lost_its_key_claims_nothing_either(url):
    """L1: on a new connection, and in no transaction."""
    runs = []
    with somebody_else(url) as other, closing(Engine(url)) as engine:
        ask(other, "alter table coatcheck_records drop primary key")
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="lost an index"):
                engine.run("order-1", runs.append, 1, scope="orders")
            with pytest.raises(pymysql.MySQLError, match="PRIMARY"):
                engine.transaction("order-2", lambda: None, scope="orders")
        assert not runs
        assert ask(other, "select * from coatcheck_records") == ()
        ask(other, "alter table coatcheck_records add primary key (id)")
        for _ in range(2):
            engine.run("order-1", runs.append, 1, scope="orders")
            engine.transaction("order-2", runs.append, 2, scope="orders")
    assert runs == [1, 2]


def test_a_table_that_cannot_be_swept_is_an_error_to_the_doctor(store, url):
    """T3, O1: it would only grow."""
    with somebody_else(url) as other:
        ask(other, "alter table coatcheck_records drop key expires")
    (error,) = errors_of(store)
    assert "nothing is swept" in error
    with pytest.raises(StoreUnavailable, match="lost an index"):
        store.sweep(OVER_MS)


def test_a_view_in_place_of_the_table_is_refused(store, url):
    """D3, O1: some of what is said to a table cannot be said to it."""
    with somebody_else(url) as other:
        ask(other, "rename table coatcheck_records to elsewhere")
        ask(other, "create view coatcheck_records as select * from elsewhere")
    (error,) = errors_of(store)
    assert "but a view" in error
    with pytest.raises(Misconfigured, match="but a view"):
        open_store(url)


@pytest.mark.parametrize("move", ["insert", "update", "delete"])
def test_the_doctor_tries_what_triggers_make_of_a_record(store, url, move):
    """O1, D2: and leaves nothing behind."""
    assert not [finding for finding in store.check() if finding.level == "error"]
    with somebody_else(url) as other:
        assert ask(other, "select * from coatcheck_records") == ()
        ask(
            other,
            f"create trigger meddling before {move} on coatcheck_records for each row"
            " signal sqlstate '45000' set message_text = 'not today'",
        )
        (error,) = [finding.message for finding in store.check() if finding.level == "error"]
        assert f"lets nobody {move} in coatcheck_records: not today" in error
        assert ask(other, "select * from coatcheck_records") == ()
    assert store._keeper._session.is_fit


def test_the_clock_is_the_servers_whatever_its_time_zone(own, own_url):
    """T1: windows do not jump when summer begins."""
    with somebody_else(own_url) as root:
        ask(root, "set global time_zone = '+11:00'")
        try:
            with closing(open_store(own_url)) as store:
                before = time.time_ns() // 1_000_000
                assert before - 2 <= store.now_ms() <= time.time_ns() // 1_000_000 + 2
        finally:
            ask(root, "set global time_zone = 'SYSTEM'")
