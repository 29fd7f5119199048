"""What is particular to Redis: URLs, values, what it can forget, its faults, and its three shapes."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

import pytest
import servers.redis
from hypothesis import given
from hypothesis import strategies as st
from laws.records import claim_of, id_of
from redis_scenes import WiredStore, change, claim, claims, fake, sign_oneself
from servers import free_port, until
from servers.redis import Cluster, Redis, Sentinel, SentinelSet, redis_server

from coatcheck import Engine
from coatcheck.cli import main
from coatcheck.core.record import GONE, Record, Swap, completed, renewed
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import Batcher, open_async_store, open_store
from coatcheck.stores import redis_values as values
from coatcheck.stores.batching import call_apart
from coatcheck.stores.contract import Query, Store
from coatcheck.stores.redis_cluster import slot_of
from coatcheck.stores.redis_dangers import Watch
from coatcheck.stores.redis_flow import Flows
from coatcheck.stores.redis_replies import Refusal
from coatcheck.stores.redis_url import Address, target_and_options

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30


@pytest.fixture(params=[open_store, WiredStore], ids=["line", "wire"])
def opened(request) -> Callable[[str], Store]:
    """Opens a store that is asked from threads, or from an event loop."""
    return request.param


@pytest.fixture
def store(opened) -> Iterator[Store]:
    with closing(opened(redis_server().fresh_url())) as store:
        yield store


@pytest.fixture
def server() -> Iterator[Redis]:
    """A server of the test's own, to be hurt."""
    server = Redis(appendfsync="always")  # every second would be a promise of less
    yield server
    server.remove()


def refused(store: Store, swaps: Sequence[Swap]) -> StoreUnavailable:
    """The error of a swap that must fail."""
    with pytest.raises(StoreUnavailable) as caught:
        store.swap(swaps)
    return caught.value


def until_written(store: Store, record: Record) -> None:
    """Claim until the store can do it again; a claim that was lost on the way may have got there."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            assert store.swap([claim(record)])[0] in (None, record)
        except StoreUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


# ---------------------------------------------------------------------------------- how to name it


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://a,b/0", "names one server"),
        ("redis://a:port/0", "names no server"),
        ("redis://a/orders", "cannot be meant; write redis://host:6379/0"),
        ("redis://a/0/1", "cannot be meant"),
        ("redis://a/0#1", "cannot be meant"),
        ("redis+sentinel://a:26379", "redis.sentinel://host1:26379,host2:26379/service/0"),
        ("redis+cluster://a/3", "a cluster has none but 0"),
        ("redis://a?sentinel_password=x", "sentinel_password= is for redis.sentinel://"),
        ("redis+cluster://a?sentinel_username=x", "sentinel_username= is for redis.sentinel://"),
        ("redis://a?compakt=1", "compakt=… is no option; there are prefix="),
        ("redis://a?compact=yes", "compact=yes"),
        ("redis://a?prefix={x}", "a prefix holds no braces"),
        ("redis://a?timeout=soon", "timeout: 'soon' is not a duration"),
        ("redis://a?timeout=0s", "leaves no time"),
        ("redis://a?wait=-1", "wait=-1"),
        ("redis://a?allow=everything", "eviction, no-persistence, replica"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_with_words_that_help(url, words):
    """D1."""
    with pytest.raises(Misconfigured, match=words):
        open_store(url)


def test_a_url_says_where_the_servers_are_and_how_to_be_let_in():
    """D1: also where names and passwords hold what a URL has other uses for."""
    target, options = target_and_options(
        "redis+sentinel://ann:p%40ss%3A@one,two:1,[::1]:2/records/5"
        "?prefix=a%3Ab&compact=1&timeout=250ms&wait=2&allow=replica,eviction&tls=1&tls_ca=/x.pem"
        "&sentinel_username=eve&sentinel_password=w%26x"
    )
    assert target.addresses == (("one", 26379), ("two", 1), ("::1", 2))
    assert (target.service, target.database) == ("records", 5)
    assert (target.username, target.password) == ("ann", "p@ss:")
    assert (target.sentinel_username, target.sentinel_password) == ("eve", "w&x")
    assert (target.is_tls, target.tls_ca) == (True, "/x.pem")
    assert target.name == "redis one:26379,two:1,[::1]:2"
    assert options == {
        "prefix": "a:b",
        "compact": True,
        "timeout_s": 0.25,
        "wait": 2,
        "allow": {"replica", "eviction"},
    }
    assert target_and_options("rediss://h")[0].is_tls
    assert target_and_options("redis://")[0].addresses == (Address("localhost", 6379),)
    assert target_and_options("redis+cluster://a,b:7")[0].addresses == (("a", 6379), ("b", 7))


def test_stores_with_different_prefixes_do_not_see_each_other():
    """S1: also where one prefix begins with the other, or looks like a pattern."""
    stores = [
        open_store(f"{redis_server().url}?prefix={p}") for p in ("", "a", "a*", "%5Ba%5D", "ab")
    ]
    records = [claim_of(nonce=number) for number in range(len(stores))]
    for store, record in zip(stores, records, strict=True):
        assert store.swap([claim(record)]) == [None]
    for store, record in zip(stores, records, strict=True):
        assert store.get([record.id]) == [record]
        assert store.find(Query()).records == [record]
        assert store.find(Query(id_prefix=record.id[:3])).records == [record]
        store.close()


def test_a_compact_store_keeps_only_digests(opened):
    """D1, S2: what people read is nowhere in the database."""
    record = claim_of()._replace(label="POST /secret", scope="ann", key="order-of-ann")
    with closing(opened(redis_server().fresh_url() + "&compact=1")) as store:
        assert store.swap([claim(record)]) == [None]
        assert store.get([record.id]) == [record._replace(label="", scope="", key="")]


# ------------------------------------------------------------------------------------- how it is kept

texts = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"])), max_size=20)
numbers = st.integers(0, 2**63 - 1)
blobs = st.one_of(st.none(), st.binary(max_size=20))
all_records = st.builds(
    Record,
    id=st.just(id_of(1)),
    version=numbers,
    state=st.integers(0, 3),
    attempt=st.integers(0, 2**32 - 1),
    fingerprint=st.binary(max_size=32),
    created_ms=numbers,
    lease_until_ms=numbers,
    window_until_ms=numbers,
    expires_ms=numbers,
    nonce=numbers,
    label=texts,
    scope=texts,
    key=texts,
    progress=blobs,
    response=blobs,
)


@given(all_records)
def test_any_record_comes_back_exactly_as_it_was(record: Record):
    """D1, K1: None and empty are different, and a text may be what no Unicode allows."""
    value, _ = values.stored(record, compact=False)
    assert values.record_of(record.id, value) == record


@given(all_records)
def test_a_record_is_not_forgotten_before_a_sweep_could_take_it(record: Record):
    """T1, T3: neither in its retention, nor under its lease, nor before its version has passed."""
    _, at_ms = values.stored(record, compact=False)
    assert at_ms >= record.expires_ms
    assert at_ms >= record.lease_until_ms
    assert at_ms > record.version


def test_a_batch_is_one_call_for_every_64_records(store: Store):
    """L1: and one round trip; the answer to those that win is empty."""
    server = redis_server()
    records = claims(0, 150)
    store.swap([claim(claim_of(id_of(1_000)))])  # the server knows the script from now on
    server.ask("CONFIG", "RESETSTAT")
    assert store.swap([claim(record) for record in records]) == [None] * 150
    stats = server.ask("INFO", "commandstats").decode()
    assert re.findall(r"cmdstat_(eval\w*):calls=(\d+)", stats) == [("evalsha", "3")]
    assert store.get([record.id for record in records]) == records


def test_a_claim_that_is_alone_is_a_command_of_the_servers_own(opened, server: Redis):
    """L1, D1: as soon as the script has run; it wins, loses and lasts as by the script."""
    first, second, third = claims(0, 3)

    def scripts() -> int:
        stats = server.ask("INFO", "commandstats").decode()
        return sum(map(int, re.findall(r"cmdstat_eval\w*:calls=(\d+)", stats)))

    with closing(opened(server.url)) as store:
        assert store.swap([claim(first)]) == [None]
        before = scripts()
        assert store.swap([claim(second)]) == [None]
        assert store.swap([claim(second)]) == [second]
        assert store.swap([claim(first)]) == [first]
        server.ask("SET", values.Keys("coatcheck:").key_of(id_of(9)), b"")
        assert store.swap([claim(claim_of(id_of(9)))]) == [GONE], "as the script says it"
        assert scripts() == before
        assert store.swap([claim(second), claim(third)]) == [second, None]
        assert store.swap([change(second, completed(second, b"201"))]) == [None]
        assert scripts() == before + 2
        key = values.Keys("coatcheck:").key_of(second.id)
        _, at_ms = values.stored(second, compact=False)
        assert server.ask("PEXPIRETIME", key) == at_ms
        server.stop()
        server.start()
        assert store.get([first.id, second.id]) == [first, completed(second, b"201")]


def test_who_may_not_run_the_script_begins_nothing(opened, server: Redis):
    """D3: though a claim could be written without it, its end could not; also if that is new."""
    first, second, third = claims(0, 3)
    server.ask("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all", "-@scripting")
    with closing(opened(f"redis://bob:pw@127.0.0.1:{server.port}/0")) as store:
        assert "NOPERM" in str(refused(store, [claim(first)]))
        assert "NOPERM" in str(refused(store, [claim(first)]))
        server.ask("ACL", "SETUSER", "bob", "+@scripting")
        assert store.swap([claim(first)]) == [None]
        assert store.swap([claim(second)]) == [None]
        server.ask("ACL", "SETUSER", "bob", "-@scripting")
        assert "NOPERM" in str(refused(store, [change(first, completed(first, b""))]))
        assert "NOPERM" in str(refused(store, [claim(third)]))
        assert server.ask("DBSIZE") == 2


def test_a_server_that_has_no_command_for_a_claim_runs_the_script(opened):
    """D1: Redis 6.2, which is asked once; whoever was asking has the same answer."""
    answers = iter([b"*0\r\n", b"-ERR syntax error\r\n", *[b"*1\r\n$0\r\n\r\n"] * 2])
    with fake(lambda: next(answers)) as url, closing(opened(url)) as store:
        first, *others = claims(0, 3)
        assert store.swap([claim(first)]) == [None]
        for record in others:
            assert store.swap([claim(record)]) == [GONE]
        assert next(answers, None) is None


def test_a_server_that_has_forgotten_the_script_is_given_it_again(store: Store):
    """D1: alone and in company, whoever wins and whoever loses."""
    records = claims(0, 130)
    for flushed, answers in enumerate(([None] * 130, records)):
        redis_server().ask("SCRIPT", "FLUSH")
        assert store.swap([claim(record) for record in records]) == answers, flushed
    redis_server().ask("SCRIPT", "FLUSH")
    first = records[0]
    assert store.swap([change(first, completed(first, b"201"))]) == [None]
    assert store.swap([change(first, completed(first, b"201"))]) == [completed(first, b"201")]


def told_in(url: str, *words: bytes | str) -> object:
    """What the database of *url* says to one command."""
    database = url.partition("?")[0].rpartition("/")[2]
    script = f"redis.call('SELECT', {database}) return redis.call(unpack(ARGV))"
    return redis_server().ask("EVAL", script, 0, *words)


@pytest.mark.parametrize(
    ("spoil", "raised"),
    [
        (("SADD", b"not", b"ours"), ValueError),  # the whole call is refused, so each asks alone
        (("SET", b"\x02from the future"), StoreUnavailable),  # and says what became of each
    ],
)
def test_what_cannot_be_read_fails_alone(opened, spoil, raised):
    """D2: whoever shares a batch with it is served."""
    url = redis_server().fresh_url()
    bad, *good = claims(0, 6)
    command, *words = spoil
    told_in(url, command, values.Keys(url.rpartition("=")[2]).key_of(bad.id), *words)
    with closing(opened(url)) as store:
        error = refused(store, [claim(bad)])
        assert not error.is_ambiguous
        with pytest.raises(raised, match=r"WRONGTYPE|not a record"):
            store.swap([claim(bad), *(claim(record) for record in good)])
        batcher = Batcher(store)
        for record in good:
            assert batcher.swap(claim(record)) in (None, record)
        assert store.get([record.id for record in good]) == good
        with pytest.raises(StoreUnavailable):
            batcher.swap(claim(bad))
        assert store.find(Query()).records == good


def test_the_server_itself_forgets_a_record_whose_time_has_come():
    """T3: and its memory is free, though nobody asks for it; what is held, or to be kept, stays."""
    url = redis_server().fresh_url()
    store = open_store(url)
    now_ms = store.now_ms()
    old = completed(claim_of(id_of(1), now_ms=now_ms - 10_000), b"x" * 100)
    old = old._replace(expires_ms=now_ms + 100)
    held = claim_of(id_of(2), now_ms=now_ms - 10_000)
    held = held._replace(expires_ms=now_ms + 100, lease_until_ms=now_ms + 60_000)
    kept = completed(claim_of(id_of(3), now_ms=now_ms), b"")
    ahead = old._replace(id=id_of(4), version=now_ms + 60_000)
    assert store.swap([claim(record) for record in (old, held, kept, ahead)]) == [None] * 4
    until(lambda: told_in(url, "DBSIZE") == 3)
    assert store.swap([change(old, None)]) == [GONE]
    assert store.find(Query()).records == [held, kept, ahead]
    assert store.sweep(now_ms + 10**12) == 0
    store.close()


def test_a_change_of_a_record_changes_when_it_is_forgotten(store: Store):
    """T1, T2: a new life, and a longer lease, last as long as they say."""
    now_ms = store.now_ms()
    first = claim_of(now_ms=now_ms - 1_000)._replace(
        expires_ms=now_ms + 300, lease_until_ms=now_ms + 300
    )
    assert store.swap([claim(first)]) == [None]
    longer = renewed(first, now_ms + 60_000)
    assert store.swap([change(first, longer)]) == [None]
    until(lambda: store.now_ms() > now_ms + 300)
    assert store.get([first.id]) == [longer]


# ------------------------------------------------------------------------------ what could forget


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("eviction", {"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru"),
        ("eviction", {"maxmemory_policy": "volatile-ttl"}, "maxmemory-policy is volatile-ttl"),
        ("no-persistence", {"appendonly": "no"}, "keeps nothing on disk"),
        ("replica", {"replicaof": "127.0.0.1 1"}, "is a replica of 127.0.0.1:1"),
    ],
)
def test_a_server_that_could_forget_is_refused_unless_that_is_allowed_by_name(
    name, settings, words
):
    """D3: and what was allowed is warned of."""
    server = Redis(**settings)
    try:
        others = ",".join({"eviction", "no-persistence", "replica"} - {name})
        for url in (server.url, f"{server.url}?allow={others}"):
            with pytest.raises(Misconfigured, match=f"{words}.*allow={name}"):
                open_store(url)
        with closing(open_store(f"{server.url}?allow={name}")) as store:
            warnings = [f.message for f in store.check() if f.level == "warning"]
            assert any(words in warning for warning in warnings)
    finally:
        server.remove()


def test_a_server_that_changes_its_ways_is_noticed_by_the_doctor(server: Redis):
    """D3: whatever it was like when it was opened."""
    with closing(open_store(server.url)) as store:
        assert [finding.level for finding in store.check()] == ["ok"]
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        server.ask("CONFIG", "SET", "appendonly", "no")
        levels = {finding.message: finding.level for finding in store.check()}
        assert list(levels.values()) == ["error", "error"]
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        server.ask("CONFIG", "SET", "save", "3600 1")
        (finding,) = store.check()
        assert finding.level == "warning"
        assert "a crash forgets" in finding.message
        server.ask("CONFIG", "SET", "maxmemory", server.ask("INFO", "memory").split()[2][12:])
        assert any("when it is full" in finding.message for finding in store.check())
        server.stop()
        (finding,) = store.check()
        assert finding.level == "error"


@pytest.mark.parametrize("appendonly", ["yes", "no"])
def test_a_server_that_does_not_say_is_not_refused(appendonly):
    """D3: a managed Redis forbids CONFIG; INFO tells the most, and the rest is a warning."""
    server = Redis(appendonly=appendonly, rename_command='CONFIG ""')
    try:
        with closing(open_store(server.url)) as store:
            levels = [finding.level for finding in store.check()]
            assert levels == (["ok"] if appendonly == "yes" else ["warning"])
            assert store.swap([claim(claim_of())]) == [None]
        server.ask("ACL", "SETUSER", "ann", "on", ">pw", "~*", "&*", "+@all", "-info")
        with closing(open_store(f"redis://ann:pw@127.0.0.1:{server.port}/0")) as store:
            (finding,) = store.check()
            assert finding.level == "warning"
            assert "INFO" in finding.message
    finally:
        server.remove()


RENAMED = ("TIME", "SCAN", "MGET", "EVALSHA", "SET", "INFO", "CONFIG", "GETRANGE")


@pytest.mark.parametrize("command", RENAMED)
def test_a_command_that_the_server_does_not_know_is_an_outage_and_no_traceback(command, capsys):
    """D2: as behind a proxy, or where it was renamed; whoever asks is told in our words."""
    server = Redis(rename_command=f"{command} MY{command}")
    try:
        with closing(open_store(server.url)) as store:
            calls: list[Callable[[], object]] = [
                store.now_ms,
                lambda: store.find(Query()),
                lambda: store.get([id_of(1), id_of(2)]),
                lambda: store.swap([claim(claim_of(id_of(1)))]),
                lambda: call_apart(store.swap, [claim(record) for record in claims(5, 3)]),
                store.check,
            ]
            for call in calls:
                with suppress(StoreUnavailable):
                    call()
        for words in (["list"], ["lookup", "k"], ["doctor"]):
            assert main([*words, "--store", server.url]) in (0, 1, 2)
            assert "Traceback" not in capsys.readouterr().err
    finally:
        server.remove()


def test_a_request_is_503_where_the_server_does_not_tell_the_time():
    """D2: and nothing runs."""
    server = Redis(rename_command="TIME XTIME")
    ran: list[int] = []
    try:
        with Engine(server.url) as engine, pytest.raises(StoreUnavailable, match="TIME"):
            engine.run("k", lambda: ran.append(1), scope="s")
        assert not ran
    finally:
        server.remove()


@pytest.mark.parametrize("rights", [("~*", "+@all", "-evalsha"), ("~other:*", "+@all")])
def test_the_doctor_says_that_nothing_may_be_written(rights):
    """D3, O1: a user that may not run the script, or not use our keys."""
    server = Redis()
    try:
        server.ask("ACL", "SETUSER", "bob", "on", ">pw", "&*", *rights)
        with closing(open_store(f"redis://bob:pw@127.0.0.1:{server.port}/0")) as store:
            assert [finding.level for finding in store.check()][-1] == "error"
    finally:
        server.remove()


def test_who_is_not_let_in_is_told_so_at_once(opened):
    """D1: and no message tells the password."""
    server = Redis(requirepass="secret")
    try:
        for url in (server.url, f"redis://:wrong@127.0.0.1:{server.port}/0"):
            with pytest.raises(Misconfigured, match="user and password") as caught:
                open_store(url)
            assert "wrong" not in str(caught.value)
        with closing(opened(f"redis://:secret@127.0.0.1:{server.port}/7")) as store:
            assert store.swap([claim(claim_of())]) == [None]
    finally:
        server.remove()


def test_a_server_that_speaks_tls_is_spoken_to_in_tls(opened, tmp_path):
    """X3, D1: with a certificate that was signed by whom we trust, and no other."""
    sign_oneself(tmp_path)
    port = free_port()
    files = {"tls_cert_file": f"{tmp_path}/cert.pem", "tls_key_file": f"{tmp_path}/key.pem"}
    server = Redis(tls_port=str(port), tls_auth_clients="no", **files)
    try:
        with closing(opened(f"rediss://localhost:{port}/0?tls_ca={tmp_path}/cert.pem")) as store:
            assert store.swap([claim(claim_of())]) == [None]
            assert store.get([claim_of().id]) == [claim_of()]
        with pytest.raises(StoreUnavailable, match="certificate"):
            open_store(f"rediss://localhost:{port}/0")
    finally:
        server.remove()


# ------------------------------------------------------------------------------------------ faults


def test_a_restart_is_not_noticed(opened, server: Redis):
    """D1, D2: records are in the append-only file, and nobody has to connect anew."""
    with closing(opened(server.url)) as store:
        before, *_ = claims(0, 1)
        assert store.swap([claim(before)]) == [None]
        assert store.get([before.id]) == [before]
        server.stop()
        error = refused(store, [claim(claim_of(id_of(1)))])
        assert not error.is_ambiguous
        with pytest.raises(StoreUnavailable):
            store.get([before.id])
        server.start()
        assert store.swap([change(before, completed(before, b"201"))]) == [None]
        assert store.get([before.id]) == [completed(before, b"201")]
        server.stop()
        server.start()
        assert store.get([before.id]) == [completed(before, b"201")]
        assert store.swap([claim(before)]) == [completed(before, b"201")]


def test_what_was_acknowledged_survives_the_killing_of_the_server(opened, server: Redis):
    """D1, D2: who was writing is told that it may have taken effect, and can go on later."""
    acknowledged: list[Record] = []
    errors: list[StoreUnavailable] = []
    with closing(opened(server.url)) as store:

        def write() -> None:
            for start in range(0, 1_000_000, 10):
                some = claims(start, 10)
                try:
                    store.swap([claim(record) for record in some])
                except StoreUnavailable as error:
                    errors.append(error)
                    return
                acknowledged.extend(some)

        thread = threading.Thread(target=write)
        thread.start()
        until(lambda: len(acknowledged) > 300)
        server.kill(signal.SIGKILL)
        thread.join(TIMEOUT_S)
        assert len(errors) == 1
        server.start()
        assert list(store.get([record.id for record in acknowledged])) == acknowledged


def test_what_somebody_else_has_put_under_a_key_takes_nobody_with_it(opened, server: Redis):
    """D2: whoever is behind it in a batch is asked for alone, and not told what it was told."""
    records = claims(0, 8)
    ids = [record.id for record in records]
    server.ask("LPUSH", b"coatcheck:{%b}" % ids[2].hex().encode(), "x")
    server.ask("SET", b"coatcheck:{%b}" % ids[5].hex().encode(), "x")
    with closing(opened(server.url)) as store:
        _, errors = call_apart(store.swap, [claim(record) for record in records])
        assert [place for place, error in enumerate(errors) if error] == [2, 5]
        assert all(isinstance(errors[place], StoreUnavailable) for place in (2, 5))
        found, _ = call_apart(store.get, ids)
        assert [place for place, record in enumerate(found) if record is None] == [2, 5]


def test_a_server_that_stops_answering_is_not_waited_for_for_ever(opened, server: Redis):
    """D2: a write that was sent may have taken effect, and a read changes nothing."""
    with closing(opened(f"{server.url}?timeout=200ms")) as store:
        record = claim_of()
        assert store.swap([claim(claim_of(id_of(9)))]) == [None]
        assert store.get([record.id]) == [None]
        server.kill(signal.SIGSTOP)
        begun = time.monotonic()
        assert refused(store, [claim(record)]).is_ambiguous
        with pytest.raises(StoreUnavailable) as caught:
            store.get([record.id])
        assert not caught.value.is_ambiguous
        assert time.monotonic() - begun < 5
        server.kill(signal.SIGCONT)
        # It was in the socket, and so it is done now: repeated, it finds itself.
        until(lambda: store.get([record.id]) == [record])
        assert store.swap([claim(record)]) == [record]


def test_a_server_that_refuses_says_that_nothing_was_written(opened, server: Redis):
    """D2: full, busy, or no longer the master; and it is used again as soon as it can be."""
    with closing(opened(server.url)) as store:
        records = iter(claims(0, 100))
        first = next(records)
        assert store.swap([claim(first)]) == [None]

        def refuses(first: str, then: str) -> None:
            record = next(records)
            both = [claim(record), claim(next(records))]
            for swaps, words in ((both[:1], first), (both, then)):
                error = refused(store, swaps)
                assert words in str(error)
                assert not error.is_ambiguous

        server.ask("CONFIG", "SET", "maxmemory", "1")
        refuses("OOM", "OOM")
        assert store.get([first.id]) == [first]
        server.ask("CONFIG", "SET", "maxmemory", "0")
        server.ask("REPLICAOF", "127.0.0.1", "1")
        refuses("READONLY", "is a replica of")  # a new connection asks who it is
        assert "error" in [finding.level for finding in store.check()]
        server.ask("REPLICAOF", "NO", "ONE")
        assert store.swap([claim(next(records))]) == [None]

        server.ask("CONFIG", "SET", "busy-reply-threshold", "1")
        with socket.create_connection(("127.0.0.1", server.port)) as busy:
            busy.sendall(b"EVAL 'while true do end' 0\r\n")
            until(lambda: is_busy(server))
            refuses("BUSY", "BUSY")
            server.ask("SCRIPT", "KILL")
            until(lambda: not is_busy(server))
        assert store.swap([claim(next(records))]) == [None]
        assert store.find(Query()).records == [first, claim_of(id_of(5)), claim_of(id_of(8))]


def is_busy(server: Redis) -> bool:
    try:
        server.ask("PING")
    except Exception as error:  # noqa: BLE001 - whichever the driver makes of it
        return "BUSY" in str(error)
    return False


@pytest.mark.parametrize(
    "told",
    [
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down",
        "CLUSTERDOWN The cluster is down",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "NOREPLICAS Not enough good replicas to write.",
        "MISCONF Redis is configured to save RDB snapshots",
        "NOPERM this user has no permissions",
        "NOAUTH Authentication required.",
    ],
)
def test_a_refusal_of_the_server_is_no_doubt_about_a_write(opened, told):
    """D2: nothing was written, so nothing has to be looked for."""
    line = b"-%b\r\n" % told.encode()
    with fake(lambda: line) as url, closing(opened(url)) as store:
        error = refused(store, [claim(claim_of())])
        assert not error.is_ambiguous
        assert told.split()[-1].rstrip(".") in str(error)


@pytest.mark.parametrize(
    "other",
    [
        None,
        b"-OOM command not allowed\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-NOAUTH Authentication required.\r\n",
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_batch_that_was_answered_by_half_is_a_doubt_about_all_of_it(opened, other, is_first):
    """D2, L1: whoever tries again finds what was written, also if the server was ready late."""
    written = b"*0\r\n"
    answers = iter([other, written] if is_first else [written, other])
    with fake(lambda: next(answers)) as url, closing(opened(url)) as store:
        assert refused(store, [claim(record) for record in claims(0, 100)]).is_ambiguous


@pytest.mark.parametrize("is_known", [False, True])
def test_a_script_that_could_not_be_sent_again_is_a_doubt_where_some_knew_it(is_known):
    """D2, L1: nothing has become of the one part, and all of the other."""
    packer = values.Packer(values.Keys("x:"), compact=False, is_spread=False)
    flows = Flows("redis", packer, Watch(frozenset(), "single"))
    flow = flows.swap([claim(record) for record in claims(0, 100)])
    assert len(next(flow).commands) == 2
    forgotten = Refusal("NOSCRIPT", "No matching script")
    again = flow.send([[] if is_known else forgotten, forgotten])
    assert len(again.commands) == (1 if is_known else 2)
    with pytest.raises(StoreUnavailable) as caught:
        flow.throw(StoreUnavailable("no connection"))
    assert caught.value.is_ambiguous == is_known


def test_a_server_that_cannot_be_reached_is_unavailable_at_once():
    """D2."""
    port = free_port()
    for scheme, path in (("redis", "/0"), ("redis+cluster", ""), ("redis+sentinel", "/records")):
        with pytest.raises(StoreUnavailable):
            open_store(f"{scheme}://127.0.0.1:{port}{path}?timeout=1s")


def test_a_write_waits_for_as_many_replicas_as_were_asked_for(opened, server: Redis):
    """L1, D2: fewer, and it is not acknowledged; it may have taken effect, and has."""
    one, two, three = claims(0, 3)
    with closing(opened(f"{server.url}?wait=1&timeout=1s")) as store:
        error = refused(store, [claim(one)])
        assert error.is_ambiguous
        assert "wait=1" in str(error)
        assert store.get([one.id]) == [one]
        replica = Redis(replicaof=f"127.0.0.1 {server.port}")
        try:
            until(lambda: b"state=online" in server.ask("INFO", "replication"))
            until_written(store, one)
            until_written(store, two)
            assert store.swap([claim(three), claim(two)]) == [None, two]
            assert replica.ask("DBSIZE") == 3
            with closing(opened(f"{server.url}?wait=2&timeout=1s")) as strict:
                assert refused(strict, [change(two, completed(two, b""))]).is_ambiguous
        finally:
            replica.remove()


def test_who_has_written_nothing_is_not_refused_for_want_of_a_replica(opened, server: Redis):
    """L1, D2: a replay is answered; of a batch only those are refused that have written."""
    one, two, three = claims(0, 3)
    done = completed(one, b"201")
    with closing(open_store(server.url)) as store:
        assert store.swap([claim(one), claim(two)]) == [None, None]
        assert store.swap([change(one, done)]) == [None]
    other = one._replace(nonce=one.nonce + 1)
    with closing(opened(f"{server.url}?wait=1&timeout=1s")) as store:
        for _ in range(2):  # by the script, and by the server's own command
            assert store.swap([claim(other)]) == [done]
        results, errors = call_apart(store.swap, [claim(other), claim(three)])
        assert results[0] == done
        assert [getattr(error, "is_ambiguous", None) for error in errors] == [None, True]
        results, errors = call_apart(store.swap, [claim(other), change(two, None)])
        assert (results[0], errors[0]) == (done, None)
        assert errors[1] is not None


def test_who_comes_again_for_its_own_write_is_refused_until_a_replica_has_it(opened, server: Redis):
    """L1: it would be taken for acknowledged, and is on one server only."""
    one = claim_of(id_of(1))
    with closing(opened(f"{server.url}?wait=1&timeout=1s")) as store:
        for _ in range(3):
            assert refused(store, [claim(one)]).is_ambiguous
        assert refused(store, [change(one, None)]).is_ambiguous
        assert refused(store, [change(one, None)]).is_ambiguous


FORKED = """
import os, sys, threading
from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.stores import open_store

def swap(number):
    id = number.to_bytes(16, "big")
    return [Swap(id, 0, Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1 << 43, 7, "", "", "", None, b""))]

store = open_store(sys.argv[1])
assert store.swap(swap(1)) == [None]
assert store.get([bytes(16)]) == [None]
for line in getattr(store._place, "_nodes", {0: store._place}).values():
    line.writer._mutex.acquire()  # as another thread of the parent's may, at this moment
child = os.fork()
if child == 0:
    for number in range(2, 300):
        assert store.swap(swap(number)) == [None]
    assert store.swap(swap(1)) != [None]
    store.close()
    os._exit(0)
for line in getattr(store._place, "_nodes", {0: store._place}).values():
    line.writer._mutex.release()
for number in range(1002, 1300):
    assert store.swap(swap(number)) == [None]
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.swap(swap(2)) != [None]
store.close()
print("done")
"""


def forked(url: str) -> None:
    """A store that is used before a fork, in the parent and in the child, in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.stderr == ""
    assert (ran.returncode, ran.stdout) == (0, "done\n")


def test_a_store_from_before_the_fork_works_in_parent_and_child():
    """L1: each with connections of its own, whatever other threads held at that moment."""
    forked(redis_server().fresh_url())


# ---------------------------------------------------------------------------------------- Sentinel


def test_the_master_is_found_again_after_a_failover(opened):
    """D1, D2: what was on the replica is there, and nobody has to open the store again."""
    watched = SentinelSet()
    try:
        with closing(opened(f"{watched.url}?timeout=1s")) as store:
            before = claim_of(id_of(1))
            assert store.swap([claim(before)]) == [None]
            assert store.get([before.id]) == [before]
            until(lambda: watched.replica.ask("DBSIZE") == 1)
            watched.sentinels[0].kill(signal.SIGKILL)
            watched.master.kill(signal.SIGKILL)
            with pytest.raises(StoreUnavailable):
                store.swap([claim(claim_of(id_of(2)))])
            until_written(store, claim_of(id_of(2)))
            assert watched.replica.is_master()
            assert store.get([before.id]) == [before]
            assert store.swap([change(before, completed(before, b"201"))]) == [None]
            assert [finding.level for finding in store.check()] == ["ok"]
        wrong = watched.url.replace("records", "orders")
        with pytest.raises(StoreUnavailable, match="orders"):
            open_store(wrong)
    finally:
        watched.remove()


@pytest.mark.parametrize(
    ("settings", "login"),
    [
        (("requirepass watcher&",), "sentinel_password=watcher%26"),
        (
            ("user default off", "user eve on >w ~* +@all"),
            "sentinel_username=eve&sentinel_password=w",
        ),
    ],
)
def test_sentinels_are_asked_with_a_login_of_their_own(opened, settings, login):
    """D1: which is another one than the data servers'; without it they name no master."""
    master = Redis(requirepass="data")
    auth = f"sentinel auth-pass {Sentinel.SERVICE} data"
    sentinel = Sentinel(master, servers.redis.PATIENT_MS, auth, *settings)
    url = f"redis+sentinel://:data@127.0.0.1:{sentinel.port}/{Sentinel.SERVICE}/0"
    try:
        record = claim_of(id_of(1))
        with closing(opened(f"{url}?{login}")) as store:
            assert store.swap([claim(record)]) == [None]
            assert store.get([record.id]) == [record]
        for wrong in ("", "?sentinel_password=data"):
            with pytest.raises(StoreUnavailable, match="No master found") as refused:
                open_store(url + wrong)
            assert "data@" not in str(refused.value)
    finally:
        sentinel.remove()
        master.remove()


# ----------------------------------------------------------------------------------------- Cluster


@pytest.fixture
def cluster() -> Cluster:
    """The one that the laws are kept on; nobody may hurt it."""
    return servers.redis.cluster()


def test_an_event_loop_asks_a_cluster_through_a_thread(cluster: Cluster):
    """L1: because it asks all its servers at once."""
    records = claims(0, 50)

    async def story() -> None:
        store = open_async_store(cluster.fresh_url())
        assert await store.swap([claim(record) for record in records]) == [None] * 50
        assert await store.get([record.id for record in records]) == records
        await store.close()

    asyncio.run(story())


def test_a_store_in_a_cluster_works_in_parent_and_child(cluster: Cluster):
    """L1: on every node."""
    forked(cluster.fresh_url())


@pytest.fixture(params=["ip", "unknown-endpoint", "hostname"])
def endpoint_type(request, cluster: Cluster) -> Iterator[str]:
    """How the nodes call each other: by address, not at all, or by a name that nobody gave them."""
    try:
        cluster.say("CONFIG SET", "cluster-preferred-endpoint-type", request.param)
        yield request.param
    finally:
        cluster.say("CONFIG SET", "cluster-preferred-endpoint-type", "ip")


def test_records_are_found_before_while_and_after_their_slot_moves(
    cluster: Cluster, endpoint_type: str
):
    """D1, L1: and those in the same batch whose slots stay, too."""
    url = cluster.fresh_url()
    first = 10_000 * len(endpoint_type)  # another slot each time: it stays where it has moved
    keys = values.Keys(url.rpartition("=")[2])
    source, target, _ = cluster.masters
    records = claims(first, 2_000)
    slots = [slot_of(record.id) for record in records]
    assert [source.ask("CLUSTER KEYSLOT", keys.key_of(r.id)) for r in records[:9]] == slots[:9]
    record, slot = min(zip(records, slots, strict=True), key=lambda pair: pair[1])
    names = {node: node.ask("CLUSTER MYID") for node in cluster.masters}
    with closing(open_store(url)) as store:
        assert store.swap([claim(record) for record in records]) == [None] * 2_000
        target.ask("CLUSTER SETSLOT", slot, "IMPORTING", names[source])
        source.ask("CLUSTER SETSLOT", slot, "MIGRATING", names[target])
        assert store.swap([claim(record)]) == [record], "not moved yet"
        moved = source.ask("CLUSTER GETKEYSINSLOT", slot, 1_000)
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 1_000, "KEYS", *moved)
        assert store.get([record.id]) == [record], "asked for at its new place"
        after = completed(record, b"on the way")
        others = [claim(claim_of(id_of(number))) for number in range(first + 5_000, first + 5_020)]
        assert store.swap([*others[:10], change(record, after), *others[10:]]) == [None] * 21
        for node in cluster.masters:
            node.ask("CLUSTER SETSLOT", slot, "NODE", names[target])
        assert store.swap([claim(record)]) == [after], "moved"
        assert len(store.find(Query(limit=5_000)).records) == 2_020


def test_a_replica_that_takes_the_place_of_its_master_is_found():
    """D1, D2: with all that it had acknowledged, and nobody has to open the store again."""
    cluster = Cluster()
    records = claims(0, 100)
    ids = [record.id for record in records]
    try:
        with closing(open_store(f"{cluster.url}?wait=1")) as careful:
            assert careful.swap([claim(record) for record in records]) == [None] * 100
        with closing(open_store(f"{cluster.url}?timeout=2s")) as store:
            assert store.get(ids) == records
            cluster.masters[0].kill(signal.SIGKILL)
            with pytest.raises(StoreUnavailable):
                store.get(ids)
            assert "error" in [finding.level for finding in store.check()]
            for record in claims(100, 50):
                until_written(store, record)
            assert store.get(ids) == records
    finally:
        cluster.remove()


def test_a_master_that_is_away_takes_nobody_with_it_who_lives_elsewhere():
    """L1, D2: each is told what became of its own, and no claim stands whose caller was refused."""
    cluster = Cluster(down_after_ms=60_000)  # nobody takes its place
    records = claims(0, 60)
    ids = [record.id for record in records]
    share = 16_384 // cluster.MASTERS + 1  # the first master's slots
    try:
        with closing(open_store(f"{cluster.url}?timeout=2s")) as store:
            away = [slot_of(id) < share for id in ids]
            assert 10 < sum(away) < 50
            store.get(ids)  # all are connected, and find out by what they send
            cluster.masters[0].kill(signal.SIGKILL)
            _, errors = call_apart(store.swap, [claim(record) for record in records])
            assert [error is not None for error in errors] == away
            assert {type(error) for error in errors if error} == {StoreUnavailable}
            assert len({id(error) for error in errors if error}) == sum(away)
            found, errors = call_apart(store.get, ids)
            assert [error is not None for error in errors] == away
            wanted = [None if is_away else r for r, is_away in zip(records, away, strict=True)]
            assert found == wanted
            # Who is refused before anything was sent is in no doubt.
            _, errors = call_apart(store.swap, [claim(record) for record in claims(60, 60)])
            assert not any(error.is_ambiguous for error in errors if error)
            with pytest.raises(StoreUnavailable) as caught:
                store.swap([claim(record) for record in claims(120, 60)])
            assert caught.value.is_ambiguous, "some of them have got there"
    finally:
        cluster.remove()


def test_who_lives_elsewhere_does_not_wait_each_time_for_a_master_that_is_frozen():
    """D2: somebody asks for what it holds all the time, and the map is then asked for anew."""
    cluster = Cluster(down_after_ms=60_000)  # nobody takes its place
    frozen = min(cluster.masters, key=lambda node: node.port)  # of whom the map is asked first
    share = 16_384 // cluster.MASTERS + 1
    slots = range(
        cluster.masters.index(frozen) * share, cluster.masters.index(frozen) * share + share
    )
    records = claims(0, 60)
    away = [record for record in records if slot_of(record.id) in slots]
    elsewhere = [record for record in records if slot_of(record.id) not in slots]
    try:
        with closing(open_store(f"{cluster.url}?timeout=500ms")) as store:
            store.get([record.id for record in records])
            frozen.kill(signal.SIGSTOP)
            waited_s = 0.0
            for one, other in zip(away[:8], elsewhere[:8], strict=True):
                with pytest.raises(StoreUnavailable):
                    store.swap([claim(one)])
                begun = time.monotonic()
                assert store.swap([claim(other)]) == [None]
                waited_s += time.monotonic() - begun
            assert waited_s < 2
    finally:
        frozen.kill(signal.SIGCONT)
        cluster.remove()


def test_a_shape_that_the_server_does_not_have_is_refused_by_name(server: Redis):
    """D1."""
    with pytest.raises(Misconfigured, match="redis:// is for a single server"):
        open_store(f"redis+cluster://127.0.0.1:{server.port}")
    node = Redis(cluster_enabled="yes", databases="1", cluster_port=str(free_port()))
    try:
        with pytest.raises(Misconfigured, match=r"write redis\+cluster://"):
            open_store(node.url)
        with pytest.raises(StoreUnavailable, match="nobody serves"):
            open_store(f"redis+cluster://127.0.0.1:{node.port}").swap([claim(claim_of())])
    finally:
        node.remove()


def test_a_sentinel_behind_the_url_of_a_server_is_refused_by_name(server: Redis):
    """D1: it holds no records; the sentence says what the URL should be."""
    watching = Sentinel(server, 60_000)
    try:
        for scheme in ("redis", "redis+cluster"):
            with pytest.raises(Misconfigured, match=r"redis\+sentinel://host1:26379,.*/service/0"):
                open_store(f"{scheme}://127.0.0.1:{watching.port}")
    finally:
        watching.remove()
