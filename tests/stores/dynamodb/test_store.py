"""What only DynamoDB has: one request per swap, items, the table, its limits."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Engine, KeyRing
from coatcheck.core.record import GONE, RUNNING, Record, Swap, completed, is_same_write
from coatcheck.errors import Misconfigured, ResultUnavailable, StoreUnavailable
from coatcheck.stores import (
    Batcher,
    Query,
    migrate_store,
    open_async_store,
    open_store,
)
from coatcheck.stores.dynamodb import records
from coatcheck.stores.dynamodb import store as module
from coatcheck.stores.dynamodb.store import DynamoStore, clock_ms
from coatcheck.stores.encryption import EncryptedStore
from tests.stores.dynamodb.scenes import (
    LARGE,
    NOW_MS,
    TIMEOUT_S,
    claim_of,
    claimed,
    claims,
    completed_with,
    fresh_url,
    on,
    refused,
    requests_of,
    swap,
    without_pauses,
)
from tests.support.batches import call_apart
from tests.support.servers.dynamodb import dynamodb


@pytest.fixture
def store() -> Iterator[DynamoStore]:
    with closing(DynamoStore.from_url(fresh_url())) as store:
        yield store


def beside(store: DynamoStore) -> closing[DynamoStore]:
    """Another node on the same table."""
    return closing(DynamoStore(store.config))


def raw(store: DynamoStore, operation: str, **parameters: Any) -> dict[str, Any]:
    return store._client.call(operation, **parameters)


# --------------------------------------------------------------------------------------- requests


def test_a_claim_and_a_completion_are_one_request_each_even_if_they_conflict(store):
    """L1: DynamoDB bills requests, and a refused write returns the current item."""
    claim = claim_of(1)
    answer = completed(claim, b"201")
    with requests_of(store) as sent:
        assert swap(store, claim.id, 0, claim) is None
        assert swap(store, claim.id, 0, claim._replace(nonce=9)) == claim
        assert swap(store, claim.id, claim.version, answer) is None
        assert swap(store, claim.id, claim.version, answer) == answer
        assert swap(store, claim.id, claim.version, None) == answer
        assert swap(store, claim.id, answer.version, None) is None
        assert swap(store, claim.id, answer.version, None) == GONE
        assert swap(store, claim.id, claim.version, answer) == GONE
    assert sent == ["PutItem"] * 4 + ["DeleteItem"] * 3 + ["PutItem"]


class InFlight:
    """Counts the requests that a store has in flight."""

    def __init__(self, store: DynamoStore) -> None:
        self.most = self._now = 0
        self.threads: set[str] = set()
        self._mutex = threading.Lock()
        on(store, "before-send.dynamodb", self._enter)
        on(store, "after-call.dynamodb", self._leave)

    def _enter(self, **_: Any) -> None:
        with self._mutex:
            self.threads.add(threading.current_thread().name)
            self._now += 1
            self.most = max(self.most, self._now)

    def _leave(self, **_: Any) -> None:
        with self._mutex:
            self._now -= 1


def test_a_batch_is_sent_by_a_few_threads_and_a_single_swap_by_its_caller():
    """L1: as many at a time as the URL says, and no more."""
    with closing(DynamoStore.from_url(fresh_url() + "&concurrency=3")) as store:
        seen = InFlight(store)
        claimed(store)
        assert seen.threads == {threading.current_thread().name}
        assert store.swap(claims(2, 30)) == [None] * 30
    assert 2 <= seen.most <= 3
    assert len(seen.threads) == 4


def test_a_batch_is_ambiguous_if_no_more_threads_start(store, monkeypatch):
    """L1, D2: some swaps may have got a thread; the same batch can be retried."""
    start = threading.Thread.start
    allowed = iter(range(2))
    are_missed = threading.Event()

    def start_two(thread: threading.Thread) -> None:
        if next(allowed, None) is None:
            are_missed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def keep_busy(**_: Any) -> None:
        assert are_missed.wait(TIMEOUT_S)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    on(store, "before-send.dynamodb", keep_busy)
    with pytest.raises(StoreUnavailable, match="can't start new thread") as caught:
        store.swap(claims(0, 6))
    assert caught.value.is_ambiguous
    monkeypatch.undo()
    results, errors = call_apart(store.swap, claims(0, 6))
    assert not any(errors)
    assert all(result in (None, claim_of(n)) for n, result in enumerate(results))


def test_records_are_read_by_the_hundred_and_unprocessed_keys_are_requested_again(store):
    """L2: a waiter sees the newest write, however many records are read at once."""
    asked = claims(0, 120)
    store.swap(asked)
    held_back = [3, 100]  # the first time some, the second time all

    def hold_back(parsed: dict[str, Any], **_: Any) -> None:
        if held_back:
            kept = parsed["Responses"][store.config.table]
            some = [kept.pop() for _ in range(min(held_back.pop(0), len(kept)))]
            left = {"Keys": [{"id": item["id"]} for item in some]}
            parsed["UnprocessedKeys"] = {store.config.table: left}

    on(store, "after-call.dynamodb.BatchGetItem", hold_back)
    records = [swap.record for swap in asked]
    with requests_of(store) as sent:
        ids = [swap.id for swap in asked]
        assert store.get([*ids, ids[0]]) == [*records, records[0]]
    assert sent == ["BatchGetItem"] * 4


def test_reads_of_a_throttled_table_are_retried_for_a_while(store, monkeypatch):
    """D2: after the timeout it is an outage."""
    claim = claimed(store)

    def hold_back(parsed: dict[str, Any], **_: Any) -> None:
        parsed["Responses"] = {}
        parsed["UnprocessedKeys"] = {store.config.table: {"Keys": [{"id": {"B": claim.id}}]}}

    pauses = without_pauses(monkeypatch)
    on(store, "after-call.dynamodb.BatchGetItem", hold_back)
    with pytest.raises(StoreUnavailable, match="throttled while reading"):
        store.get([claim.id])
    assert len(pauses) > 3
    assert max(pauses) <= 1
    assert sum(pauses) <= store.config.timeout_s + 1


def test_a_claim_that_conflicts_with_a_record_that_disappeared_is_retried(store):
    """L1: a caller that gets no conflicting record must have the claim."""
    lost = ["ConditionalCheckFailedException"] * 2
    on(
        store,
        "before-send.dynamodb",
        lambda **_: refused(400, lost.pop()) if lost else None,
    )
    claim = claimed(store)
    assert not lost
    assert store.get([claim.id]) == [claim]
    lost += ["ConditionalCheckFailedException"] * 1_000
    with pytest.raises(StoreUnavailable, match="disappeared each time"):
        claimed(store, 2)


# ------------------------------------------------------------------------------------------ items

TEXTS = st.text(st.characters(exclude_categories=()), max_size=30)
BLOBS = (
    st.none() | st.binary(max_size=40) | st.binary(min_size=1, max_size=9).map(lambda b: b * 999)
)


@given(st.tuples(TEXTS, TEXTS, TEXTS), BLOBS, BLOBS, st.integers(0, 2**63 - 1))
def test_a_record_is_read_back_unchanged_from_its_item(people, progress, response, number):
    """D1: NUL, lone surrogates, None, empty values, large numbers."""
    record = claim_of(1)._replace(nonce=number, progress=progress, response=response)
    record = record._replace(label=people[0], scope=people[1], key=people[2])
    assert records.record_of(records.item_of(record)) == record


def test_a_compact_store_keeps_neither_scope_nor_key():
    """S1: not even empty attributes."""
    with closing(DynamoStore.from_url(fresh_url() + "&compact=1")) as store:
        record = claim_of(1)._replace(label="POST /orders", scope="ann", key="order-1")
        assert swap(store, record.id, 0, record) is None
        (item,) = raw(store, "scan")["Items"]
        assert item["scope"] == {"S": "a"}
        assert not {"key", "progress", "response"} & set(item)


def test_dynamodb_may_delete_a_record_only_when_a_sweep_may(store):
    """T1, T3: never before its expiry, within a lease, or before the clock has passed its version."""
    ended = claim_of(1)._replace(expires_ms=NOW_MS + 1, lease_until_ms=0, version=5)
    for record, expires_s in [
        (ended, NOW_MS // 1_000 + 1),
        (ended._replace(expires_ms=NOW_MS), NOW_MS // 1_000),
        (ended._replace(lease_until_ms=NOW_MS + 60_001), NOW_MS // 1_000 + 61),
        (ended._replace(version=NOW_MS + 2_000), NOW_MS // 1_000 + 3),
    ]:
        assert swap(store, record.id, 0, record) is None
        item = raw(store, "get_item", Key={"id": {"B": record.id}})["Item"]
        assert item["expires_s"] == {"N": str(expires_s)}
        assert swap(store, record.id, record.version, None) is None
    expiry = raw(store, "describe_time_to_live")["TimeToLiveDescription"]
    assert expiry == {"TimeToLiveStatus": "ENABLED", "AttributeName": "expires_s"}


# ------------------------------------------------------------------------------------------- size


def test_a_response_over_400_kb_reaches_its_caller_and_executes_only_once():
    """L12: a retry on another node gets ResultUnavailable."""
    url, runs = fresh_url(), []
    result = os.urandom(LARGE).hex()

    def work() -> str:
        runs.append(1)
        return result

    with Engine(url) as engine, Engine(url) as another:
        assert engine.run("key", work, scope="s") == result
        with pytest.raises(ResultUnavailable):
            another.run("key", work, scope="s")
    assert runs == [1]


def test_a_writer_recognises_its_own_record_without_the_response(store, caplog):
    """L12: after a lost acknowledgement."""
    answer = completed_with(store, os.urandom(LARGE))
    assert store.get([answer.id]) == [answer._replace(response=None)]
    assert "not kept" in caplog.text
    again = swap(store, answer.id, answer.version - 1, answer)
    assert again is not None
    assert is_same_write(again, answer)
    other = answer._replace(nonce=99)
    assert swap(store, answer.id, answer.version - 1, other) == answer._replace(response=None)


@pytest.mark.parametrize("rest", ["", "&compact=1"])
def test_a_writer_recognises_its_own_record_although_it_is_encrypted_again(rest):
    """L12, X1: no two ciphertexts are equal, and the progress is encrypted, too."""
    with closing(
        EncryptedStore(DynamoStore.from_url(fresh_url() + rest), KeyRing({"k": b"k" * 32}))
    ) as store:
        claim = claim_of(1)._replace(progress=b"noted")
        answer = completed(claim, os.urandom(LARGE))
        assert store.swap([Swap(claim.id, 0, claim)]) == [None]
        assert store.swap([Swap(claim.id, claim.version, answer)]) == [None]
        (again,) = store.swap([Swap(claim.id, claim.version, answer)])
        assert again is not None
        assert is_same_write(again, answer)
        (standing,) = store.swap([Swap(claim.id, claim.version, answer._replace(nonce=99))])
        assert standing is not None
        assert (standing.nonce, standing.response) == (answer.nonce, None)


def test_a_response_that_just_fits_is_kept(store):
    """L2: DynamoDB accepts what we estimate to fit."""
    small = records.size_of(records.item_of(completed(claim_of(1), b"x")))
    answer = completed_with(store, os.urandom(records.ITEM_BYTES_MAX - small))
    assert store.get([answer.id]) == [answer]


def test_a_large_response_that_can_be_compressed_is_kept():
    """L2: pages and lists of a megabyte are ordinary responses."""
    url = fresh_url()
    with Engine(url) as engine, Engine(url) as another:
        result = [{"number": n, "name": "coat"} for n in range(40_000)]
        assert engine.run("key", lambda: result, scope="s") == result
        assert another.run("key", lambda: None, scope="s") == result


def test_notes_that_do_not_fit_fail_alone(store):
    """L7: they cannot be left out, but no other swap of the batch fails."""
    batcher = Batcher(store)
    large = claim_of(1)._replace(progress=os.urandom(LARGE))
    with ThreadPoolExecutor(8) as threads:
        claims = [Swap(claim_of(n).id, 0, claim_of(n)) for n in range(2, 9)]
        good = [threads.submit(batcher.swap, claim) for claim in claims]
        bad = threads.submit(batcher.swap, Swap(large.id, 0, large))
        assert [future.exception(TIMEOUT_S) for future in good] == [None] * 7
        with pytest.raises(ValueError, match="400 kB"):
            bad.result(TIMEOUT_S)
    assert store.get([large.id]) == [None]
    with pytest.raises(ValueError, match="400 kB"):
        swap(store, large.id, 0, completed(large, b"small"))


# --------------------------------------------------------------------------------- scans


@pytest.fixture
def pages(store) -> list[Record]:
    """Records that fill three pages of a scan, in id order."""
    noise = os.urandom(290_000)
    records = [claim_of(number)._replace(response=noise) for number in range(9)]
    assert store.swap([Swap(record.id, 0, record) for record in records]) == [None] * 9
    return sorted(records)


def test_operators_get_records_in_order_from_a_table_of_many_pages(store, pages):
    """O1: of records that are not on the page, only ids are transferred."""
    sizes: list[int] = []

    def weigh(http_response: Any, **_: Any) -> None:
        sizes.append(len(http_response.content))

    on(store, "after-call.dynamodb.Scan", weigh)
    page = store.find(Query(limit=2, after_id=pages[2].id))
    assert page.records == pages[3:5]
    assert page.next_after_id == pages[4].id
    assert len(sizes) > 1
    assert max(sizes) < 1_000


def test_a_page_leaves_out_records_that_changed_since_the_scan(store):
    """O1: an operator does not see an operation as running that has just ended."""
    first, second = claimed(store, 1), claimed(store, 2)
    with beside(store) as another:
        end = Swap(first.id, first.version, completed(first, b"201"))
        on(store, "after-call.dynamodb.Scan", lambda **_: another.swap([end]) and None)
        assert store.find(Query(state=RUNNING)).records == [second]


# ------------------------------------------------------------------------------------- the table


def make_table(store: DynamoStore, name: str, **changes: Any) -> str:
    """Create a table as another application would; return its URL."""
    settings: dict[str, Any] = {
        "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
        "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "B"}],
        "BillingMode": "PAY_PER_REQUEST",
    }
    store._client.send("create_table", TableName=name, **{**settings, **changes})
    return f"dynamodb://{name}?{dynamodb().place}"


def test_a_table_with_another_key_is_refused(store):
    """D4: the data of another application is not overwritten."""
    text_id = [{"AttributeName": "id", "AttributeType": "S"}]
    url = make_table(store, "somebody_elses", AttributeDefinitions=text_id)
    with pytest.raises(
        Misconfigured, match=r"was not created by coatcheck: its key is id \(S, HASH\)"
    ):
        open_store(url)
    for only_look in (True, False):
        with pytest.raises(Misconfigured, match="was not created by coatcheck: its key is id"):
            migrate_store(url, only_look=only_look)


def test_a_table_without_a_time_to_live_causes_a_warning(store, caplog):
    """D3: in the log at the start, and from the doctor, which also checks the capacity."""
    assert {finding.level for finding in store.check()} == {"ok"}
    provisioned = {"ReadCapacityUnits": 9, "WriteCapacityUnits": 10}
    url = make_table(store, "by_hand", BillingMode="PROVISIONED", ProvisionedThroughput=provisioned)
    with closing(open_store(url)) as by_hand:
        warnings = [f.message for f in by_hand.check() if f.level == "warning"]
    assert "no time to live on expires_s" in caplog.text
    assert "no time to live on expires_s" in warnings[0]
    assert "about 5 new keys a second" in warnings[1]


def test_a_global_table_causes_a_warning_unless_it_is_strongly_consistent(store):
    """D3, L1: two regions could claim one key at the same time."""
    changes: dict[str, Any] = {"Replicas": [{"RegionName": "us-east-1"}]}
    on(
        store,
        "after-call.dynamodb.DescribeTable",
        lambda parsed, **_: parsed["Table"].update(changes),
    )
    assert any("two regions" in finding.message for finding in store.check())
    changes["MultiRegionConsistency"] = "STRONG"
    assert not any("two regions" in finding.message for finding in store.check())


@pytest.mark.parametrize("operation", ["PutItem", "DeleteItem", "BatchGetItem", "Scan"])
def test_the_doctor_tries_every_operation_that_needs_a_permission(store, operation):
    """D3, O1: a role that may describe the table may not be allowed to use it."""
    kept = claimed(store)
    assert not [finding for finding in store.check() if finding.level == "error"]
    why = f"not authorized to perform: dynamodb:{operation}"
    on(
        store,
        f"before-send.dynamodb.{operation}",
        lambda **_: refused(400, "AccessDeniedException", why),
    )
    (error,) = [finding.message for finding in store.check() if finding.level == "error"]
    assert error.startswith(operation)
    assert why in error
    with beside(store) as other:
        assert other.find(Query()).records == [kept], "the doctor has changed nothing"


def test_the_doctor_reports_a_table_that_was_deleted(store):
    """D3: and a claim fails with the same reason, and is not ambiguous."""
    raw(store, "delete_table")
    assert [finding.level for finding in store.check()] == ["error"]
    with pytest.raises(StoreUnavailable, match="no such table") as caught:
        claimed(store)
    assert not caught.value.is_ambiguous


def test_a_missing_region_or_missing_credentials_are_reported(monkeypatch, tmp_path):
    """D1: an endpoint on this machine needs no credentials, any other does."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(Misconfigured, match="no AWS credentials"):
        open_store("dynamodb://orders?region=eu-west-1")
    with pytest.raises(Misconfigured, match="region"):
        open_store("dynamodb://orders?endpoint=http://127.0.0.1:1")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(Misconfigured, match="nobody"):
        open_store("dynamodb://orders?region=eu-west-1")


# ------------------------------------------------------------------------------------- the clock


def test_the_clock_is_this_machines_within_the_second_of_the_server(store, monkeypatch):
    """T1: to the second it is the server's, which all nodes share."""
    header = {"date": "Fri, 15 Jan 2027 08:00:00 GMT"}  # NOW_MS
    assert clock_ms(NOW_MS + 500, NOW_MS + 510, header) == NOW_MS + 510
    assert clock_ms(NOW_MS + 990, NOW_MS + 1_020, header) == NOW_MS + 1_020
    assert clock_ms(NOW_MS - 7_200_000, NOW_MS - 7_199_990, header) == NOW_MS
    assert clock_ms(NOW_MS + 60_000, NOW_MS + 60_010, header) == NOW_MS + 1_009
    assert clock_ms(1, 2, {}) == 2
    true_ms = time.time_ns() // 1_000_000
    monkeypatch.setattr(module, "_local_ms", lambda: true_ms + 3_600_000)
    assert abs(store.now_ms() - true_ms) < TIMEOUT_S * 1_000


# -------------------------------------------------------------------------------------- threads


def test_a_closed_store_has_no_threads_and_refuses_calls(store):
    """D2: single swaps and batches."""
    store.swap(claims(0, 9))
    store.close()
    store.close()
    assert not any("coatcheck-dynamodb" in thread.name for thread in threading.enumerate())
    for count_of_swaps in (1, 2):
        with pytest.raises(StoreUnavailable, match="closed"):
            store.swap([Swap(b"%d" % n, 1, None) for n in range(count_of_swaps)])


# ------------------------------------------------------------------------------------ event loops


def test_the_slowest_request_of_an_event_loop_delays_no_other():
    """L1: there is no bulk write, so each swap is a request that ends on its own."""

    async def main() -> None:
        store = open_async_store(fresh_url())
        gate = threading.Event()

        def hold(request: Any, **_: Any) -> None:
            if b"order-0" in request.body:
                assert gate.wait(TIMEOUT_S)

        assert isinstance(store.blocking, DynamoStore)
        on(store.blocking, "before-send.dynamodb", hold)
        first, *others = [asyncio.ensure_future(store.swap([claim])) for claim in claims(0, 20)]
        try:
            async with asyncio.timeout(TIMEOUT_S / 2):
                assert await asyncio.gather(*others) == [[None]] * 19
                assert await store.swap(claims(20, 1)) == [None]
            assert not first.done()
        finally:
            gate.set()
        assert await first == [None]
        await store.close()

    asyncio.run(main())


def test_an_event_loop_has_no_more_requests_in_flight_than_the_url_allows():
    """L1: single swaps and those of one call."""

    async def main() -> int:
        store = open_async_store(fresh_url() + "&concurrency=3")
        assert isinstance(store.blocking, DynamoStore)
        seen = InFlight(store.blocking)
        calls = [store.swap([claim]) for claim in claims(0, 30)]
        calls.append(store.swap(claims(30, 30)))
        assert await asyncio.gather(*calls) == [[None]] * 30 + [[None] * 30]
        await store.close()
        return seen.most

    assert 2 <= asyncio.run(main()) <= 3
