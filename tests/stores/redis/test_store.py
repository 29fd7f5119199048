"""What is particular to Redis: URLs, values, risks, faults, Sentinel and Cluster."""

import asyncio
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import NoScriptError

from coatcheck.cli import main
from coatcheck.core.record import GONE, Record, Swap, completed, renewed
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import Batcher, open_async_store, open_store
from coatcheck.stores.contract import Query, Store
from coatcheck.stores.redis.cluster import slot_of
from coatcheck.stores.redis.records import Commands, Keys, decode, encode
from coatcheck.stores.redis.safety import SafetyMonitor
from coatcheck.stores.redis.swap import Flows
from coatcheck.stores.redis.url import Address, RedisConfig, parse_url
from tests.stores.laws.records import claim_of, id_of
from tests.stores.redis.scenes import change, claim, claims, fake, sign_oneself
from tests.support.batches import call_apart
from tests.support.servers import free_port, until
from tests.support.servers import redis as redis_servers
from tests.support.servers.redis import Cluster, Redis, Sentinel, SentinelSet, redis_server

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30


@pytest.fixture
def store(opened) -> Iterator[Store]:
    with closing(opened(redis_server().fresh_url())) as store:
        yield store


def refused(store: Store, swaps: Sequence[Swap]) -> StoreUnavailable:
    """Return the error of a swap that must fail."""
    with pytest.raises(StoreUnavailable) as caught:
        store.swap(swaps)
    return caught.value


def until_written(store: Store, record: Record) -> None:
    """Claim until the store works again; a claim whose answer was lost may have been applied."""
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


def test_a_url_names_the_servers_and_the_login():
    """D1: also where names and passwords hold what a URL has other uses for."""
    config = parse_url(
        "redis+sentinel://ann:p%40ss%3A@one,two:1,[::1]:2/records/5"
        "?prefix=a%3Ab&compact=1&timeout=250ms&wait=2&allow=replica,eviction&tls=1&tls_ca=/x.pem"
        "&sentinel_username=eve&sentinel_password=w%26x"
    )
    assert config == RedisConfig(
        shape="sentinel",
        addresses=(Address("one", 26379), Address("two", 1), Address("::1", 2)),
        service="records",
        database=5,
        username="ann",
        password="p@ss:",
        is_tls=True,
        tls_ca="/x.pem",
        sentinel_username="eve",
        sentinel_password="w&x",
        prefix="a:b",
        compact=True,
        timeout_s=0.25,
        wait=2,
        allow=frozenset({"replica", "eviction"}),
    )
    assert str(config) == "redis one:26379,two:1,[::1]:2"
    assert parse_url("rediss://h").is_tls
    assert parse_url("redis://").addresses == (("localhost", 6379),)
    assert parse_url("redis+cluster://a,b:7").addresses == (("a", 6379), ("b", 7))


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


def test_a_compact_store_keeps_neither_scope_nor_key(opened):
    """D1, S2."""
    record = claim_of()._replace(label="POST /secret", scope="ann", key="order-of-ann")
    with closing(opened(redis_server().fresh_url() + "&compact=1")) as store:
        assert store.swap([claim(record)]) == [None]
        assert store.get([record.id]) == [record._replace(scope="a", key="")]


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
    value, _ = encode(record)
    assert decode(record.id, value) == record


@given(all_records)
def test_a_record_does_not_expire_before_a_sweep_could_delete_it(record: Record):
    """T1, T3: neither in its retention, nor under its lease, nor before its version has passed."""
    _, at_ms = encode(record)
    assert at_ms >= record.expires_ms
    assert at_ms >= record.lease_until_ms
    assert at_ms > record.version


def test_a_batch_is_one_call_for_every_64_records(store: Store):
    """L1: and one round trip."""
    server = redis_server()
    records = claims(0, 150)
    store.swap([claim(claim_of(id_of(1_000)))])  # the server knows the script from now on
    server.ask("CONFIG", "RESETSTAT")
    assert store.swap([claim(record) for record in records]) == [None] * 150
    stats = server.ask("INFO", "commandstats").decode()
    assert re.findall(r"cmdstat_(eval\w*):calls=(\d+)", stats) == [("evalsha", "3")]
    assert store.get([record.id for record in records]) == records


def test_a_user_that_may_not_run_the_script_cannot_claim(opened, server: Redis):
    """D3: nothing is written, and the error names the missing right."""
    first, second = claims(0, 2)
    server.ask("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all", "-@scripting")
    with closing(opened(f"redis://bob:pw@127.0.0.1:{server.port}/0")) as store:
        assert "NOPERM" in str(refused(store, [claim(first)]))
        server.ask("ACL", "SETUSER", "bob", "+@scripting")
        assert store.swap([claim(first)]) == [None]
        server.ask("ACL", "SETUSER", "bob", "-@scripting")
        assert "NOPERM" in str(refused(store, [change(first, completed(first, b""))]))
        assert "NOPERM" in str(refused(store, [claim(second)]))
        assert server.ask("DBSIZE") == 1


def test_a_server_that_lost_the_script_gets_it_again(store: Store):
    """D1: for one swap and for many, applied and in conflict."""
    records = claims(0, 130)
    for flushed, answers in enumerate(([None] * 130, records)):
        redis_server().ask("SCRIPT", "FLUSH")
        assert store.swap([claim(record) for record in records]) == answers, flushed
    redis_server().ask("SCRIPT", "FLUSH")
    first = records[0]
    assert store.swap([change(first, completed(first, b"201"))]) == [None]
    assert store.swap([change(first, completed(first, b"201"))]) == [completed(first, b"201")]


@pytest.mark.parametrize(
    ("spoil", "raised"),
    [
        (("SADD", b"not", b"ours"), ValueError),  # about the whole call: the batcher splits it
        (("SET", b"\x02from the future"), StoreUnavailable),  # with the outcome of each
    ],
)
def test_a_value_that_cannot_be_decoded_fails_alone(opened, server: Redis, spoil, raised):
    """D2: the other members of its batch succeed."""
    bad, *good = claims(0, 6)
    command, *words = spoil
    server.ask(command, Keys("coatcheck:").key_of(bad.id), *words)
    with closing(opened(server.url)) as store:
        assert not refused(store, [claim(bad)]).is_ambiguous
        with pytest.raises(raised, match=r"WRONGTYPE|not a record"):
            store.swap([claim(bad), *(claim(record) for record in good)])
        batcher = Batcher(store)
        for record in good:
            assert batcher.swap(claim(record)) in (None, record)
        found, errors = call_apart(store.get, [bad.id, *(record.id for record in good)])
        assert found[1:] == good
        # MGET returns no value for a key of another type; a claim of it fails, as above.
        assert errors[1:] == [None] * 5
        with pytest.raises(StoreUnavailable):
            batcher.swap(claim(bad))
        assert store.find(Query()).records == good


def test_the_server_deletes_an_expired_record_by_itself(server: Redis):
    """T3: without a request for it; a record under a lease, or in its retention, stays."""
    store = open_store(server.url)
    now_ms = store.now_ms()
    old = completed(claim_of(id_of(1), now_ms=now_ms - 10_000), b"x" * 100)
    old = old._replace(expires_ms=now_ms + 100, lease_until_ms=now_ms)
    held = claim_of(id_of(2), now_ms=now_ms - 10_000)
    held = held._replace(expires_ms=now_ms + 100, lease_until_ms=now_ms + 60_000)
    kept = completed(claim_of(id_of(3), now_ms=now_ms), b"")
    ahead = old._replace(id=id_of(4), version=now_ms + 60_000)
    assert store.swap([claim(record) for record in (old, held, kept, ahead)]) == [None] * 4
    until(lambda: server.ask("DBSIZE") == 3)
    assert store.swap([change(old, None)]) == [GONE]
    assert store.find(Query()).records == [held, kept, ahead]
    assert store.sweep(now_ms + 10**12) == 0
    store.close()


def test_a_change_of_a_record_changes_when_it_expires(store: Store):
    """T1, T2: a longer lease lasts as long as it says."""
    now_ms = store.now_ms()
    first = claim_of(now_ms=now_ms - 1_000)._replace(
        expires_ms=now_ms + 300, lease_until_ms=now_ms + 300
    )
    assert store.swap([claim(first)]) == [None]
    longer = renewed(first, now_ms + 60_000)
    assert store.swap([change(first, longer)]) == [None]
    until(lambda: store.now_ms() > now_ms + 300)
    assert store.get([first.id]) == [longer]


# ------------------------------------------------------------------------------------------- risks


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("eviction", {"maxmemory_policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru"),
        ("eviction", {"maxmemory_policy": "volatile-ttl"}, "maxmemory-policy is volatile-ttl"),
        ("no-persistence", {"appendonly": "no"}, "keeps nothing on disk"),
        ("replica", {"replicaof": "127.0.0.1 1"}, "is a replica of 127.0.0.1:1"),
    ],
)
def test_a_server_that_could_lose_records_is_refused_unless_the_url_allows_it(
    name, settings, words
):
    """D3: an allowed risk is a warning of the doctor."""
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


def test_the_doctor_notices_changed_settings(server: Redis):
    """D3: whatever they were when the store was opened."""
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
        assert "a crash loses" in finding.message
        server.ask("CONFIG", "SET", "maxmemory", server.ask("INFO", "memory").split()[2][12:])
        assert any("when it is full" in finding.message for finding in store.check())
        server.stop()
        (finding,) = store.check()
        assert finding.level == "error"


@pytest.mark.parametrize("appendonly", ["yes", "no"])
def test_a_server_that_forbids_config_is_not_refused(appendonly):
    """D3: as managed services do; what INFO does not show is a warning."""
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
    """D2: as behind a proxy, or if it was renamed."""
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


def test_a_wrong_password_is_refused_when_the_store_is_opened(opened):
    """D1: and no message shows the password."""
    server = Redis(requirepass="secret")
    try:
        for url in (server.url, f"redis://:wrong@127.0.0.1:{server.port}/0"):
            with pytest.raises(Misconfigured, match="check the user and password") as caught:
                open_store(url)
            assert "wrong" not in str(caught.value)
        with closing(opened(f"redis://:secret@127.0.0.1:{server.port}/7")) as store:
            assert store.swap([claim(claim_of())]) == [None]
    finally:
        server.remove()


def test_tls_needs_a_trusted_certificate(opened, tmp_path):
    """X3, D1: from the system, or from `tls_ca=`."""
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


def test_a_write_that_the_server_refuses_is_not_ambiguous(opened, server: Redis):
    """D2: it is full, busy, or a replica now; the store uses it again when that is over."""
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
        refuses("READONLY", "is a replica of")  # a new connection checks the role
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
def test_an_error_of_the_server_is_not_ambiguous(opened, told):
    """D2: nothing was written."""
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
def test_a_batch_of_which_one_half_failed_is_ambiguous(opened, other, is_first):
    """D2, L1: a retry finds what was written."""
    written = b"*0\r\n"
    answers = iter([other, written] if is_first else [written, other])
    with fake(lambda: next(answers)) as url, closing(opened(url)) as store:
        assert refused(store, [claim(record) for record in claims(0, 100)]).is_ambiguous


@pytest.mark.parametrize("is_known", [False, True])
def test_a_script_that_could_not_be_sent_again_is_ambiguous_if_some_calls_ran(is_known):
    """D2, L1: a part of the batch was written, the other was not."""
    commands = Commands(Keys("x:"), is_cluster=False)
    flows = Flows("redis", commands, SafetyMonitor(frozenset(), "single"))
    flow = flows.swap([claim(record) for record in claims(0, 100)])
    assert len(next(flow).commands) == 2
    missing = NoScriptError("No matching script")
    again = flow.send([[] if is_known else missing, missing])
    assert len(again.commands) == (1 if is_known else 2)
    with pytest.raises(StoreUnavailable) as caught:
        flow.throw(StoreUnavailable("no connection"))
    assert caught.value.is_ambiguous == is_known


def test_a_write_waits_for_as_many_replicas_as_the_url_says(opened, server: Redis):
    """L1, D2: with fewer replicas it fails as ambiguous, though the master has it."""
    one, two, three = claims(0, 3)
    with closing(open_store(server.url)) as store:
        assert store.swap([change(one, None)]) == [GONE]  # the server has the script now
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


def test_a_missing_replica_fails_only_the_members_that_wrote(opened, server: Redis):
    """L1, D2: a replay is answered, also in a batch with a claim that fails."""
    one, two, three = claims(0, 3)
    done = completed(one, b"201")
    with closing(open_store(server.url)) as store:
        assert store.swap([claim(one), claim(two)]) == [None, None]
        assert store.swap([change(one, done)]) == [None]
    other = one._replace(nonce=one.nonce + 1)
    with closing(opened(f"{server.url}?wait=1&timeout=1s")) as store:
        assert store.swap([claim(other)]) == [done]
        results, errors = call_apart(store.swap, [claim(other), claim(three)])
        assert results[0] == done
        assert [getattr(error, "is_ambiguous", None) for error in errors] == [None, True]
        results, errors = call_apart(store.swap, [claim(other), change(two, None)])
        assert (results[0], errors[0]) == (done, None)
        assert errors[1] is not None
        # Finding the own record on the master does not mean that a replica has it.
        assert refused(store, [claim(three)]).is_ambiguous
        assert refused(store, [change(two, None)]).is_ambiguous


# ---------------------------------------------------------------------------------------- Sentinel


def test_the_master_is_found_again_after_a_failover(opened):
    """D1, D2: with the records of the replica, and without opening the store again."""
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
def test_sentinels_have_a_login_of_their_own(opened, settings, login):
    """D1: without it they name no master."""
    master = Redis(requirepass="data")
    auth = f"sentinel auth-pass {Sentinel.SERVICE} data"
    sentinel = Sentinel(master, redis_servers.PATIENT_MS, auth, *settings)
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
    """The cluster of the laws; a test must not stop its servers."""
    return redis_servers.cluster()


def test_an_event_loop_uses_a_cluster_through_threads(cluster: Cluster):
    """L1: the store has no native backend then."""
    records = claims(0, 50)
    with closing(open_store(cluster.url)) as blocking, pytest.raises(NotImplementedError):
        blocking.async_backend()

    async def story() -> None:
        store = open_async_store(cluster.fresh_url())
        assert await store.swap([claim(record) for record in records]) == [None] * 50
        assert await store.get([record.id for record in records]) == records
        await store.close()

    asyncio.run(story())


@pytest.fixture(params=["ip", "unknown-endpoint", "hostname"])
def endpoint_type(request, cluster: Cluster) -> Iterator[str]:
    """How the nodes name each other: by address, not at all, or by a host name they do not have."""
    try:
        cluster.say("CONFIG SET", "cluster-preferred-endpoint-type", request.param)
        yield request.param
    finally:
        cluster.say("CONFIG SET", "cluster-preferred-endpoint-type", "ip")


def test_records_are_found_before_while_and_after_their_slot_moves(
    cluster: Cluster, endpoint_type: str
):
    """D1, L1: also in a batch with records whose slots stay."""
    url = cluster.fresh_url()
    first = 10_000 * len(endpoint_type)  # another slot each time: it stays where it has moved
    keys = Keys(url.rpartition("=")[2])
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
        assert store.get([record.id]) == [record], "read from the server that imports the slot"
        after = completed(record, b"on the way")
        others = [claim(claim_of(id_of(number))) for number in range(first + 5_000, first + 5_020)]
        assert store.swap([*others[:10], change(record, after), *others[10:]]) == [None] * 21
        for node in cluster.masters:
            node.ask("CLUSTER SETSLOT", slot, "NODE", names[target])
        assert store.swap([claim(record)]) == [after], "moved"
        assert len(store.find(Query(limit=5_000)).records) == 2_020


def test_a_promoted_replica_of_a_cluster_is_found():
    """D1, D2: with all acknowledged records, and without opening the store again."""
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


def test_an_unreachable_master_fails_only_its_own_records():
    """L1, D2: each member has its own outcome, and a claim that failed is not in the store."""
    cluster = Cluster(down_after_ms=60_000)  # no replica is promoted
    records = claims(0, 60)
    ids = [record.id for record in records]
    share = 16_384 // cluster.MASTERS + 1  # the first master's slots
    try:
        with closing(open_store(f"{cluster.url}?timeout=2s")) as store:
            away = [slot_of(id) < share for id in ids]
            assert 10 < sum(away) < 50
            store.get(ids)  # all servers are connected
            cluster.masters[0].kill(signal.SIGKILL)
            _, errors = call_apart(store.swap, [claim(record) for record in records])
            assert [error is not None for error in errors] == away
            assert {type(error) for error in errors if error} == {StoreUnavailable}
            assert len({id(error) for error in errors if error}) == sum(away)
            found, errors = call_apart(store.get, ids)
            assert [error is not None for error in errors] == away
            wanted = [None if is_away else r for r, is_away in zip(records, away, strict=True)]
            assert found == wanted
            # What fails before anything was sent is not ambiguous.
            _, errors = call_apart(store.swap, [claim(record) for record in claims(60, 60)])
            assert not any(error.is_ambiguous for error in errors if error)
            with pytest.raises(StoreUnavailable) as caught:
                store.swap([claim(record) for record in claims(120, 60)])
            assert caught.value.is_ambiguous, "some of them were written"
    finally:
        cluster.remove()


def test_a_frozen_master_does_not_delay_records_of_other_masters_each_time():
    """D2: requests for its records make the map outdated again and again."""
    cluster = Cluster(down_after_ms=60_000)  # no replica is promoted
    frozen = min(cluster.masters, key=lambda node: node.port)  # the store asks it first for the map
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
            for one, other in zip(away[:4], elsewhere[:4], strict=True):
                with pytest.raises(StoreUnavailable):
                    store.swap([claim(one)])
                begun = time.monotonic()
                assert store.swap([claim(other)]) == [None]
                waited_s += time.monotonic() - begun
            assert waited_s < 1
    finally:
        frozen.kill(signal.SIGCONT)
        cluster.remove()


def test_a_url_of_another_kind_than_the_server_is_refused(server: Redis):
    """D1."""
    with pytest.raises(Misconfigured, match="redis:// for a single server"):
        open_store(f"redis+cluster://127.0.0.1:{server.port}")
    node = Redis(cluster_enabled="yes", databases="1", cluster_port=str(free_port()))
    try:
        with pytest.raises(Misconfigured, match=r"write redis\+cluster://"):
            open_store(node.url)
        with pytest.raises(StoreUnavailable, match="no server of the cluster serves slot"):
            open_store(f"redis+cluster://127.0.0.1:{node.port}").swap([claim(claim_of())])
    finally:
        node.remove()


def test_a_sentinel_behind_the_url_of_a_server_is_refused(server: Redis):
    """D1: it holds no records; the message shows what to write."""
    watching = Sentinel(server, 60_000)
    try:
        for scheme in ("redis", "redis+cluster"):
            with pytest.raises(Misconfigured, match=r"redis\+sentinel://host1:26379,.*/service/0"):
                open_store(f"{scheme}://127.0.0.1:{watching.port}")
    finally:
        watching.remove()
