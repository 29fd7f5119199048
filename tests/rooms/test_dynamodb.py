"""What is particular to DynamoDB: requests, items, the table, its limits, its faults."""

import io
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from hypothesis import given
from hypothesis import strategies as st
from servers.dynamodb import Dynamodb, dynamodb

from coatcheck import Engine
from coatcheck.core.record import GONE, RUNNING, Record, Swap, completed, is_same_write, renewed
from coatcheck.errors import Misconfigured, ResultUnavailable, StoreUnavailable
from coatcheck.stores import Batcher, Query, open_store
from coatcheck.stores import dynamodb as module
from coatcheck.stores import dynamodb_items as items
from coatcheck.stores.dynamodb import DynamoStore
from coatcheck.stores.dynamodb_line import CONFLICT_TRIES_MAX
from coatcheck.stores.dynamodb_table import clock_ms

# 2 s: less than a request may take in all.
TRIED_AGAIN_S_MAX = 2
# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30
NUMBERS = count()
LARGE = 700_000  # bytes of noise: over the limit, and cannot be deflated below it

NOW_MS = 1_800_000_000_000


def claim_of(number: int) -> Record:
    """A claim as a server makes it; ids come in no order, as digests do."""
    id = (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "big")
    ends = (NOW_MS + 60_000, NOW_MS + 86_400_000, NOW_MS + 90_000_000)
    people = ("POST /orders", id[:8].hex(), f"order-{number}")
    return Record(id, NOW_MS, RUNNING, 1, id[::-1], NOW_MS, *ends, 7, *people, None, None)


def fresh_url() -> str:
    return f"dynamodb://rooms_{next(NUMBERS)}?{dynamodb().place}"


@pytest.fixture
def store() -> Iterator[DynamoStore]:
    with closing(DynamoStore.from_url(fresh_url())) as store:
        yield store


def beside(store: DynamoStore) -> closing[DynamoStore]:
    """Another node on the same table."""
    return closing(DynamoStore(store._place))


def swap(store: Any, id: bytes, expected: int, record: Record | None) -> Record | None:
    return store.swap([Swap(id, expected, record)])[0]


def claimed(store: DynamoStore, number: int = 1) -> Record:
    claim = claim_of(number)
    assert swap(store, claim.id, 0, claim) is None
    return claim


def answered(store: DynamoStore, response: bytes, number: int = 1) -> Record:
    claim = claimed(store, number)
    answer = completed(claim, response)
    assert swap(store, claim.id, claim.version, answer) is None
    return answer


def raw(store: DynamoStore, operation: str, **parameters: Any) -> dict[str, Any]:
    return store._line.call(operation, TableName=store.name, **parameters)


def on(store: DynamoStore, event: str, handler: Any) -> None:
    """Have *handler* called by the store's client."""
    store._line._connected().meta.events.register(event, handler)


@contextmanager
def requests_of(store: DynamoStore) -> Iterator[list[str]]:
    """The names of all requests that *store* sends, every try."""
    sent: list[str] = []
    events = store._line._connected().meta.events
    target = "X-Amz-Target"

    def note(request: Any, **_: Any) -> None:
        sent.append(request.headers[target].decode().partition(".")[2])

    events.register("before-send.dynamodb", note)
    yield sent
    events.unregister("before-send.dynamodb", note)


class Said(io.BytesIO):
    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.read()


def answer(store: DynamoStore, status: int, code: str, text: str = "no") -> None:
    """Have every request answered like this, without asking anybody."""
    body = json.dumps({"__type": f"com.amazonaws.dynamodb#{code}", "message": text}).encode()
    on(store, "before-send.dynamodb", lambda **_: AWSResponse("", status, {}, Said(body)))


# --------------------------------------------------------------------------------------- requests


def test_a_claim_and_a_completion_are_one_request_each_also_when_they_lose(store):
    """L1: DynamoDB bills requests, and the loser's answer brings the record that stands."""
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


def test_a_guarded_call_is_two_writes_and_a_retry_is_one():
    """L1: through the engine, after it has looked at the clock."""
    url = fresh_url()
    with Engine(url) as engine, Engine(url) as another:
        assert isinstance(engine.store, DynamoStore)
        assert isinstance(another.store, DynamoStore)
        engine.start()
        another.start()
        with requests_of(engine.store) as sent:
            assert engine.run("key", lambda: "done", scope="s") == "done"
        assert sent == ["PutItem", "PutItem"]
        with requests_of(another.store) as sent:
            assert another.run("key", lambda: "again", scope="s") == "done"
        assert sent == ["PutItem"]


def test_a_batch_is_sent_by_a_few_threads_and_one_alone_by_its_caller():
    """L1: as many at a time as the URL says, and no more."""
    at_once, most = [0], [0]
    threads: set[str] = set()
    mutex = threading.Lock()

    def enter(**_: Any) -> None:
        with mutex:
            threads.add(threading.current_thread().name)
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])

    def leave(**_: Any) -> None:
        with mutex:
            at_once[0] -= 1

    with closing(DynamoStore.from_url(fresh_url() + "&concurrency=3")) as store:
        on(store, "before-send.dynamodb", enter)
        on(store, "after-call.dynamodb", leave)
        claimed(store)
        assert threads == {threading.current_thread().name}
        claims = [claim_of(number) for number in range(2, 32)]
        assert store.swap([Swap(c.id, 0, c) for c in claims]) == [None] * 30
    assert 2 <= most[0] <= 3
    assert len(threads) == 4


def test_records_are_read_by_the_hundred_and_what_was_not_answered_is_asked_again(store):
    """L2: a waiter sees the newest write, however much was asked for at once."""
    claims = [claim_of(number) for number in range(120)]
    store.swap([Swap(claim.id, 0, claim) for claim in claims])
    held_back = [3, 100]  # the first time some, the second time all

    def hold_back(parsed: dict[str, Any], **_: Any) -> None:
        if held_back:
            kept = parsed["Responses"][store.name]
            some = [kept.pop() for _ in range(min(held_back.pop(0), len(kept)))]
            left = {"Keys": [{"id": item["id"]} for item in some]}
            parsed["UnprocessedKeys"] = {store.name: left}

    on(store, "after-call.dynamodb.BatchGetItem", hold_back)
    ids = [claim.id for claim in claims]
    with requests_of(store) as sent:
        assert store.get([*ids, ids[0]]) == [*claims, claims[0]]
    assert sent == ["BatchGetItem"] * 4


def test_a_claim_that_lost_against_a_record_that_vanished_is_tried_again(store, monkeypatch):
    """L1: who is not told of a record must have won."""
    write, answers = store._line.write, [{}, {}]
    monkeypatch.setattr(
        store._line, "write", lambda *a, **k: answers.pop() if answers else write(*a, **k)
    )
    claim = claimed(store)
    assert not answers
    assert store.get([claim.id]) == [claim]
    monkeypatch.setattr(store._line, "write", lambda *_a, **_k: {})
    with pytest.raises(StoreUnavailable, match="comes and goes"):
        claimed(store, 2)


# ------------------------------------------------------------------------------------------ items

TEXTS = st.text(st.characters(exclude_categories=()), max_size=30)
BLOBS = (
    st.none() | st.binary(max_size=40) | st.binary(min_size=1, max_size=9).map(lambda b: b * 999)
)


@given(st.tuples(TEXTS, TEXTS, TEXTS), BLOBS, BLOBS, st.integers(0, 2**63 - 1))
def test_a_record_is_what_its_item_was_made_of(people, progress, response, number):
    """D1: NUL, lone surrogates, nothing and emptiness, large numbers."""
    record = claim_of(1)._replace(nonce=number, progress=progress, response=response)
    record = record._replace(label=people[0], scope=people[1], key=people[2])
    assert items.record_of(items.item_of(record, compact=False)) == record
    small = record._replace(label="", scope="", key="")
    assert items.record_of(items.item_of(record, compact=True)) == small


def test_texts_that_are_no_unicode_come_back_and_are_found(store):
    """O1, S1: over the network, too."""
    key = "before\x00after \ud800 \udfff"
    record = claim_of(1)._replace(key=key, label="\udc80", scope="\x00")
    assert swap(store, record.id, 0, record) is None
    claimed(store, 2)
    assert store.find(Query(key=key, label="\udc80")).records == [record]
    assert store.find(Query(key="\udc80")).records == []


def test_a_compact_store_keeps_nothing_that_people_wrote():
    """S1: not even empty attributes."""
    with closing(DynamoStore.from_url(fresh_url() + "&compact=1")) as store:
        record = claim_of(1)._replace(label="POST /orders", scope="ann", key="order-1")
        assert swap(store, record.id, 0, record) is None
        (item,) = raw(store, "scan")["Items"]
        assert not {"label", "scope", "key", "progress", "response"} & set(item)


def test_dynamodb_may_delete_a_record_only_when_a_sweep_may(store):
    """T1, T3: its second is never before our millisecond, nor within a lease or a version's time."""
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


def test_an_answer_over_400_kb_reaches_its_caller_and_runs_only_once():
    """L12: a retry on another node is told that the result was not kept."""
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


@pytest.mark.parametrize("reckoned_bytes_max", [items.ITEM_BYTES_MAX, 10**9])
def test_a_writer_whose_answer_did_not_fit_knows_its_own_record_again(
    store, caplog, monkeypatch, reckoned_bytes_max
):
    """L12: also where its acknowledgement was lost, or the server counts otherwise than we do."""
    monkeypatch.setattr(items, "ITEM_BYTES_MAX", reckoned_bytes_max)
    answer = answered(store, os.urandom(LARGE))
    assert store.get([answer.id]) == [answer._replace(response=None)]
    assert "not kept" in caplog.text
    again = swap(store, answer.id, answer.version - 1, answer)
    assert again is not None
    assert is_same_write(again, answer)
    other = answer._replace(nonce=99)
    assert swap(store, answer.id, answer.version - 1, other) == answer._replace(response=None)


def test_an_answer_that_just_fits_is_kept(store):
    """L2: what we reckon to fit is not refused."""
    small = items.size_of(items.item_of(completed(claim_of(1), b"x"), compact=False))
    answer = answered(store, os.urandom(items.ITEM_BYTES_MAX - small))
    assert store.get([answer.id]) == [answer]


def test_what_can_be_deflated_is_kept_however_large():
    """L2: pages and lists of a megabyte are ordinary answers."""
    url = fresh_url()
    with Engine(url) as engine, Engine(url) as another:
        result = [{"number": n, "name": "coat"} for n in range(40_000)]
        assert engine.run("key", lambda: result, scope="s") == result
        assert another.run("key", lambda: None, scope="s") == result


def test_notes_that_do_not_fit_fail_alone(store):
    """L7: they cannot be left out; but nobody else's write suffers from it."""
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


# --------------------------------------------------------------------------------- reading it all


@pytest.fixture
def pages(store) -> list[Record]:
    """Some three pages of a scan, in the order of their ids."""
    noise = os.urandom(290_000)
    records = [claim_of(number)._replace(response=noise) for number in range(9)]
    assert store.swap([Swap(record.id, 0, record) for record in records]) == [None] * 9
    return sorted(records)


def test_operators_get_records_in_order_from_a_table_of_many_pages(store, pages):
    """O1: and of what is not on the page only ids come over the network."""
    sizes: list[int] = []

    def weigh(http_response: Any, **_: Any) -> None:
        sizes.append(len(http_response.content))

    on(store, "after-call.dynamodb.Scan", weigh)
    page = store.find(Query(limit=2, after_id=pages[2].id))
    assert page.records == pages[3:5]
    assert page.next_after_id == pages[4].id
    assert len(sizes) > 1
    assert max(sizes) < 1_000


def test_a_page_leaves_out_what_has_changed_since_it_was_looked_for(store):
    """O1: an operator is not shown as running what has just ended."""
    first, second = claimed(store, 1), claimed(store, 2)
    with beside(store) as another:
        end = Swap(first.id, first.version, completed(first, b"201"))
        on(store, "after-call.dynamodb.Scan", lambda **_: another.swap([end]) and None)
        assert store.find(Query(state=RUNNING)).records == [second]


def test_a_sweep_looks_at_a_stretch_and_the_next_one_goes_on_there(store, pages, monkeypatch):
    """T3: the same small price, however large the table."""
    monkeypatch.setattr(module, "_SWEEP_PAGES", 1)
    taken, over_ms = 0, max(record.expires_ms for record in pages)
    with requests_of(store) as sent:
        for _ in range(8):
            taken += (some := store.sweep(over_ms))
            assert some < len(pages)
    assert taken == len(pages)
    assert sent.count("Scan") == 8
    assert store.find(Query()).records == []


def test_a_sweep_leaves_alone_what_was_changed_since_it_looked(store):
    """L5, T3: a renewed claim has another version."""
    claim = claimed(store)
    longer = renewed(claim, claim.expires_ms + 60_000)
    with beside(store) as another:
        renewal = Swap(claim.id, claim.version, longer)
        on(store, "after-call.dynamodb.Scan", lambda **_: another.swap([renewal]) and None)
        assert store.sweep(claim.expires_ms) == 0
    assert store.get([claim.id]) == [longer]


# ------------------------------------------------------------------------------------- the table


def test_several_nodes_make_the_table_at_once():
    """D4: one makes it, all use it."""
    url = fresh_url()
    with ThreadPoolExecutor(6) as threads:
        stores = list(threads.map(DynamoStore.from_url, [url] * 6))
    claim = claimed(stores[0])
    for store in stores:
        assert store.get([claim.id]) == [claim]
        store.close()


def test_who_only_looks_makes_no_table():
    """D4: explicit in production."""
    url = fresh_url()
    with pytest.raises(Misconfigured, match="there is no table"):
        open_store(url, create=False)
    with closing(DynamoStore.from_url(url)) as store:
        claim = claimed(store)
    with closing(open_store(url, create=False)) as looking:
        assert looking.get([claim.id]) == [claim]


def make_table(store: DynamoStore, name: str, **changes: Any) -> str:
    """A table that somebody else has made; its URL."""
    settings: dict[str, Any] = {
        "KeySchema": [{"AttributeName": "id", "KeyType": "HASH"}],
        "AttributeDefinitions": [{"AttributeName": "id", "AttributeType": "B"}],
        "BillingMode": "PAY_PER_REQUEST",
    }
    store._line.call("create_table", TableName=name, **{**settings, **changes})
    return f"dynamodb://{name}?{dynamodb().place}"


def test_a_table_with_another_key_is_refused(store):
    """D4: nobody else's data is written over."""
    text_id = [{"AttributeName": "id", "AttributeType": "S"}]
    url = make_table(store, "somebody_elses", AttributeDefinitions=text_id)
    with pytest.raises(Misconfigured, match=r"not one of coatcheck's: its key is id \(S, HASH\)"):
        open_store(url)


def test_a_table_without_a_time_to_live_is_loudly_warned_about(store, caplog):
    """D3: at the start, and by the doctor, who also looks at what it can take."""
    assert {finding.level for finding in store.check()} == {"ok"}
    provisioned = {"ReadCapacityUnits": 9, "WriteCapacityUnits": 10}
    url = make_table(store, "by_hand", BillingMode="PROVISIONED", ProvisionedThroughput=provisioned)
    with closing(open_store(url)) as by_hand:
        warnings = [f.message for f in by_hand.check() if f.level == "warning"]
    assert "no time to live on expires_s" in caplog.text
    assert "no time to live on expires_s" in warnings[0]
    assert "about 5 new keys a second" in warnings[1]


def test_a_global_table_is_warned_about_unless_it_is_consistent(store):
    """D3, L1: in two regions at once a key could be claimed twice."""
    changes: dict[str, Any] = {"Replicas": [{"RegionName": "us-east-1"}]}
    on(
        store,
        "after-call.dynamodb.DescribeTable",
        lambda parsed, **_: parsed["Table"].update(changes),
    )
    assert any("two regions" in finding.message for finding in store.check())
    changes["MultiRegionConsistency"] = "STRONG"
    assert not any("two regions" in finding.message for finding in store.check())


def test_the_doctor_names_a_table_that_is_gone(store):
    """D3: who asks for a claim is told so, too, and nothing runs."""
    raw(store, "delete_table")
    assert [finding.level for finding in store.check()] == ["error"]
    with pytest.raises(StoreUnavailable, match="no such table") as caught:
        claimed(store)
    assert not caught.value.is_ambiguous


@pytest.mark.parametrize(
    "url",
    [
        *(
            "dynamodb://",
            "dynamodb:///orders",
            "dynamodb://a/b",
            "dynamodb://ab",
            "dynamodb://a b c",
        ),
        *("dynamodb://orders?color=red", "dynamodb://orders?compact=yes", "dynamodb://orders#x"),
        *("dynamodb://orders?timeout=soon", "dynamodb://orders?timeout=0s"),
        *("dynamodb://orders?concurrency=0", "dynamodb://orders?concurrency=many"),
        *("dynamodb://orders?region=", "dynamodb://orders?endpoint=localhost:8000"),
        "dynamodb://orders?endpoint=http://",
    ],
)
def test_a_url_that_names_no_table_or_no_option_says_what_there_is(url):
    """D1: found at the start, never during a request."""
    with pytest.raises(Misconfigured, match="dynamodb"):
        open_store(url)


def test_a_missing_region_or_missing_credentials_are_named(monkeypatch, tmp_path):
    """D1: the address of a stand-in on this machine needs no credentials, any other does."""
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


def test_the_clock_is_this_machines_as_far_as_the_server_agrees(store, monkeypatch):
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


# -------------------------------------------------------------------------------------- the faults


@pytest.mark.parametrize(
    ("status", "code", "is_ambiguous"),
    [
        (400, "ProvisionedThroughputExceededException", False),
        (400, "ThrottlingException", False),
        (400, "RequestLimitExceeded", False),
        (400, "TransactionConflictException", False),
        (400, "AccessDeniedException", False),
        (400, "ExpiredTokenException", False),
        (400, "ResourceNotFoundException", False),
        (500, "InternalServerError", True),
        (503, "ServiceUnavailable", True),
    ],
)
def test_what_aws_refuses_is_an_outage_and_ambiguous_only_where_it_may_have_written(
    store, monkeypatch, status, code, is_ambiguous
):
    """D2: nothing runs, and the caller is told why."""
    monkeypatch.setattr(time, "sleep", lambda _s: None)  # botocore's backoff
    answer(store, status, code, "so it is")
    for call in (
        lambda: claimed(store),
        lambda: store.swap([Swap(b"%d" % n, 1, None) for n in (1, 2)]),
    ):
        with pytest.raises(StoreUnavailable, match=store.name) as caught:
            call()
        assert caught.value.is_ambiguous == is_ambiguous
        assert (
            "so it is" in str(caught.value)
            or "throttled" in str(caught.value)
            or "no such" in str(caught.value)
        )


def answer_first(store: DynamoStore, times: int, code: str) -> None:
    """Have the first requests answered like this, and the others by DynamoDB."""
    body = json.dumps({"__type": f"com.amazonaws.dynamodb#{code}", "message": "no"}).encode()
    asked = count()

    def refuse(**_: Any) -> AWSResponse | None:
        return AWSResponse("", 400, {}, Said(body)) if next(asked) < times else None

    on(store, "before-send.dynamodb", refuse)


@pytest.mark.parametrize(
    ("times", "code"),
    [
        (1, "ProvisionedThroughputExceededException"),
        (1, "ThrottlingException"),
        (1, "TransactionConflictException"),
        (CONFLICT_TRIES_MAX - 1, "TransactionConflictException"),
    ],
)
def test_what_passes_is_tried_again_and_is_no_outage(store, monkeypatch, times, code):
    """D1, D2: a moment of throttling, or of somebody else's transaction on the same item."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with requests_of(store) as sent:
        answer_first(store, times, code)
        claim = claimed(store)
    assert sent == ["PutItem"] * (times + 1)
    assert len(pauses) == times
    assert sum(pauses) <= TRIED_AGAIN_S_MAX
    assert swap(store, claim.id, claim.version, None) is None


def test_a_conflict_that_does_not_pass_is_given_up(store, monkeypatch):
    """D2: after a few tries it is an outage, in which nothing was written."""
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    with requests_of(store) as sent:
        answer_first(store, 1_000, "TransactionConflictException")
        with pytest.raises(StoreUnavailable, match="somebody's transaction") as caught:
            claimed(store)
    assert len(sent) == CONFLICT_TRIES_MAX
    assert not caught.value.is_ambiguous


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"", b"{}"])
def test_a_yes_that_is_not_from_dynamodb_is_none(store, page):
    """D2: a proxy's page with the status 200 must not pass for a claim that won."""
    on(store, "before-send.dynamodb", lambda **_: AWSResponse("", 200, {}, Said(page)))
    with pytest.raises(StoreUnavailable, match="not DynamoDB") as caught:
        claimed(store)
    assert caught.value.is_ambiguous


def test_a_batch_of_which_some_took_effect_is_ambiguous_for_all(store):
    """L1, D2: the others are told the same, so none of them may be told that nothing was written."""
    body = b'{"__type": "x#AccessDeniedException", "message": "not this one"}'
    refused = count()

    def refuse_one(**_: Any) -> AWSResponse | None:
        return AWSResponse("", 400, {}, Said(body)) if next(refused) == 3 else None

    on(store, "before-send.dynamodb", refuse_one)
    claims = [claim_of(number) for number in range(8)]
    with pytest.raises(StoreUnavailable, match="not this one") as caught:
        store.swap([Swap(claim.id, 0, claim) for claim in claims])
    assert caught.value.is_ambiguous
    assert sum(record is None for record in store.get([claim.id for claim in claims])) == 1


def test_a_write_whose_first_try_was_heard_is_ambiguous_though_nobody_hears_the_second(store):
    """L5, D2: the last error says that nobody is there; the first try may have done its work."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]

        def hear_once() -> None:
            connection, _ = deaf.accept()
            connection.recv(1)
            deaf.close()
            connection.close()

        def turn(request: Any, **_: Any) -> None:
            request.url = f"http://127.0.0.1:{port}/"

        on(store, "before-send.dynamodb", turn)
        thread = threading.Thread(target=hear_once)
        thread.start()
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store)
        thread.join(TIMEOUT_S)
        assert caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store)
        assert not caught.value.is_ambiguous


@pytest.fixture
def server() -> Iterator[Dynamodb]:
    """One of the test's own, to be killed."""
    server = Dynamodb()
    yield server
    server.remove()


def test_a_server_that_falls_silent_dies_and_comes_back_needs_nothing_from_us(server):
    """D2: bounded time-outs, a clear error, and on with it, without opening the store again."""
    url = server.fresh_url() + "&timeout=1s"
    with closing(DynamoStore.from_url(url)) as store:
        claim = claimed(store)
        server.kill(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(StoreUnavailable, match="timeout") as caught:
            claimed(store, 2)
        assert caught.value.is_ambiguous
        assert time.monotonic() - began_s < 5
        server.kill(signal.SIGCONT)
        assert store.get([claim.id]) == [claim]
        server.kill()
        with pytest.raises(StoreUnavailable, match="Could not connect") as caught:
            claimed(store, 3)
        assert not caught.value.is_ambiguous
        with pytest.raises(StoreUnavailable):
            store.swap([Swap(claim_of(n).id, 0, claim_of(n)) for n in range(5)])
        server.start()
        with pytest.raises(StoreUnavailable, match="no such table"):  # the stand-in has forgotten
            claimed(store, 3)
        DynamoStore.from_url(url).close()
        again = claimed(store, 3)
        assert store.get([again.id, claim.id]) == [again, None]


def test_a_store_that_cannot_be_reached_is_an_outage_at_the_start():
    """D2: and not a wrong setting, for it may come up any moment."""
    with pytest.raises(StoreUnavailable, match="Could not connect"):
        open_store("dynamodb://orders?region=eu-west-1&endpoint=http://127.0.0.1:1&timeout=1s")


def test_a_closed_store_and_its_threads_are_gone(store):
    """D2: also for those who come with a batch."""
    store.swap([Swap(claim_of(n).id, 0, claim_of(n)) for n in range(9)])
    store.close()
    store.close()
    assert not any("coatcheck-dynamodb" in thread.name for thread in threading.enumerate())
    for count_of_swaps in (1, 2):
        with pytest.raises(StoreUnavailable, match="closed"):
            store.swap([Swap(b"%d" % n, 1, None) for n in range(count_of_swaps)])


def test_a_child_has_a_client_and_threads_of_its_own(store):
    """D2: gunicorn forks after the application was loaded, and requests were perhaps served."""
    before = [claim_of(number) for number in range(9)]
    store.swap([Swap(claim.id, 0, claim) for claim in before])
    client = store._line._connected()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            children = [Swap(c.id, c.version, completed(c, b"child")) for c in before[1:]]
            is_own = store._line._connected() is not client
            code = 0 if is_own and store.swap(children) == [None] * 8 else 2
            store.close()
        finally:
            os._exit(code)
    assert store.get([before[0].id]) == [before[0]]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ended = [completed(claim, b"child") for claim in before[1:]]
    assert store.swap([Swap(c.id, 0, c) for c in before]) == [before[0], *ended]
    assert store._line._connected() is client
