"""Swaps on MySQL and MariaDB: what is sent, how conflicts are found, and concurrent writers."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from coatcheck import KeyRing
from coatcheck.core.record import Swap, completed, is_same_write, renewed
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import Batcher, Query, open_store
from coatcheck.stores.encryption import EncryptedStore
from coatcheck.stores.mysql import connection as mysql_connection
from coatcheck.stores.mysql import doctor as mysql_doctor
from coatcheck.stores.mysql.statements import Statements
from tests.stores.laws.records import ID, NOW_MS, claim_of, id_of
from tests.stores.mysql.support import (
    MANY,
    OVER_MS,
    claim,
    complete,
    in_every_mode,
    kill_sessions_beside,
    other_session,
    packets_of,
    query,
    sessions_beside,
    waiting_for_locks,
)
from tests.support.servers import START_S_MAX, until

STATEMENTS = Statements("coatcheck_records")


# --- values ---------------------------------------------------------------------------------------


def test_any_bytes_come_back_whatever_the_sql_mode(own, own_url):
    """D1: short or long, and nothing in them is ever read as SQL."""
    blobs = [bytes(range(256)) * n for n in (1, 4, 5, 64)]
    blobs += [filler * 1_100 for filler in (b"'", b"\\", b"\\'", b"'\\", b"\xe3'", b"\xbf\\'")]
    blobs += [b"x" * n + end for n in (1_023, 1_024) for end in (b"\\", b"'", b"\\'); --")]
    with other_session(own_url) as root:
        (before,) = query(root, "select @@global.sql_mode")[0]
        query(root, "set global sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'")
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
                bodies = [*blobs[1:], None]
                changed = [
                    record._replace(version=record.version + 1 + n, response=body, progress=body)
                    for n, (record, body) in enumerate(zip(again, bodies, strict=True))
                ]
                old = {record.id: record.version for record in again}
                swaps = [Swap(record.id, old[record.id], record) for record in changed]
                assert store.swap(swaps) == [None] * len(swaps)
                assert store.get([record.id for record in again]) == changed
        finally:
            query(root, f"set global sql_mode = '{before}'")


def test_a_compact_store_keeps_neither_scope_nor_key(url):
    """D1, S2: they are not in the table."""
    record = claim_of()._replace(key="order-of-ann", label="POST /secret", scope="ann")
    with closing(open_store(url + "&compact=1")) as store:
        store.swap([Swap(ID, 0, record)])
        assert store.get([ID]) == [record._replace(key="", scope="a")]
    with other_session(url) as other:
        assert query(other, "select scope, `key` from coatcheck_records") == ((b"a", b""),)


def test_versions_are_compared_to_the_last_digit(store):
    """L5: as integers of 64 bits, not as floating point."""
    for size in (1, 2):
        old = [claim_of(id_of(10 * size + n))._replace(version=2**62 + n) for n in range(size)]
        store.swap([Swap(record.id, 0, record) for record in old])
        late = [Swap(r.id, r.version + 1, r._replace(version=r.version + 2)) for r in old]
        assert store.swap(late) == old
        assert store.swap([complete(record) for record in old]) == [None] * size


@pytest.mark.parametrize(
    "wrong", [{"nonce": 2**64}, {"attempt": 2**31}, {"fingerprint": b"x" * 17}, {"id": b"x" * 17}]
)
def test_a_record_that_cannot_be_written_fails_with_its_own_error(store, url, wrong):
    """D2: it is not truncated, it is no outage, and no lock remains."""
    bad = claim_of(id_of(2))._replace(**wrong)
    attempts = ([Swap(bad.id, 0, bad)], [claim(), Swap(bad.id, 0, bad), claim(id_of(3))])
    changes = [complete(claim_of(id_of(3))), Swap(bad.id, 0, bad)]
    for swaps in (*attempts, changes):
        with pytest.raises(ValueError, match="a record cannot be written"):
            store.swap(swaps)
    with closing(open_store(url + "&timeout=1s")) as other:
        assert other.swap([claim(), claim(id_of(3))]) == [None, None]


# --- what is sent ---------------------------------------------------------------------------------


def test_a_single_swap_is_one_statement_if_it_is_applied(store, sent):
    """L1: without a transaction and without a read; a conflict costs one read."""
    assert store.swap([claim(id_of(9))]) == [None]  # connects
    sent.clear()
    assert store.swap([claim()]) == [None]
    assert store.swap([claim()]) == [claim_of()]
    assert store.swap([complete(claim_of())]) == [None]
    assert store.swap([Swap(ID, claim_of().version + 1, None)]) == [None]
    assert sent.verbs == ["insert", "insert", "select", "update", "delete"]


@pytest.mark.parametrize("size", [2, 64, 300])
def test_a_batch_of_any_size_is_one_command(store, sent, size):
    """L1: and one `select` more if all conflict, however many."""
    claims = [claim_of(id_of(number)) for number in range(size)]
    store.swap([claim(id_of(999))])
    sent.clear()
    assert store.swap([Swap(r.id, 0, r) for r in claims]) == [None] * size
    assert sent.verbs == ["insert"]
    sent.clear()
    more = [claim(id_of(number)) for number in range(1_000, 1_002)]
    assert store.swap([*more, *(complete(r) for r in claims)]) == [None] * (size + 2)
    assert sent.verbs == ["begin;"]
    sent.clear()
    done = [completed(r, b"done") for r in claims]
    ends = [Swap(r.id, r.version, None) for r in done]
    assert store.swap([*more, *(complete(r) for r in claims)])[2:] == done
    assert store.swap(ends) == [None] * size
    assert sent.verbs == ["begin;", "select", "begin;"]


@pytest.mark.parametrize("is_change", [False, True])
def test_a_batch_locks_its_rows_in_the_order_of_their_ids(store, sent, is_change):
    """D2: whatever order they came in; batches that lock in different orders would deadlock."""
    store.swap([claim(id) for id in MANY] if is_change else [claim(id_of(99))])
    swaps = [complete(claim_of(id)) if is_change else claim(id) for id in MANY]
    random.Random(1).shuffle(swaps)
    sent.clear()
    assert store.swap(swaps) == [None] * len(swaps)
    (command,) = sent
    positions = [command.index(id.hex()) for id in sorted(MANY)]
    assert positions == sorted(positions)


def test_no_swap_and_no_sweep_ever_scans_the_table(store, url):
    """T3: their cost does not grow with the number of records."""
    store.swap([claim(id) for id in MANY])
    search = STATEMENTS.search(Query(id_prefix=b"\0\0\0\1"), 60)
    (update,) = STATEMENTS.batch([complete(claim_of(id), id) for id in MANY], 1)
    plans = {
        update.text: "PRIMARY",
        STATEMENTS.select_stamped(MANY[:3], 1): "PRIMARY",
        next(STATEMENTS.select(MANY[:3])): "PRIMARY",
        STATEMENTS.swap(complete(claim_of())): "PRIMARY",
        STATEMENTS.swap(Swap(ID, 5, None)): "PRIMARY",
        STATEMENTS.delete_expired(MANY[:50], OVER_MS): "PRIMARY",
        STATEMENTS.select_expired(OVER_MS, 10): "expires",
        search.partition(" for */ ")[2]: "PRIMARY",
    }
    with other_session(url) as other:
        for text, key in plans.items():
            ((_, _, _, access, _, used, *_),) = query(other, f"explain {text}".replace("%", "%%"))
            assert (access, used) == ("range", key), text


CAUTIOUS = "set sql_safe_updates=1, sql_select_limit=1, sql_big_selects=0, max_join_size=1"


def test_settings_that_a_server_gives_to_new_sessions_do_not_affect_the_store(own, own_url):
    """T3, D2: such as limits that protect people from changing or reading too many rows."""
    with other_session(own_url) as root:
        query(root, "create or replace user app")
        query(root, "grant all on *.* to app")
        query(
            root, "revoke super, connection admin on *.* from app"
        )  # init_connect is not run for them
        query(root, f"set global init_connect = '{CAUTIOUS}'")
        try:
            url = own_url.replace("root@", "app@")
            with closing(open_store(url)) as store:
                assert store.swap([claim(id) for id in MANY]) == [None] * len(MANY)
                assert all(store.get(MANY))
                assert len(store.find(Query()).records) == len(MANY)
                assert {finding.level for finding in store.check()} == {"ok"}
                assert store.sweep(OVER_MS) == len(MANY)
            assert in_every_mode(url, "key") == ["key"] * 4
        finally:
            query(root, "set global init_connect = ''")
            query(root, "drop user app")


# --- conflicts ------------------------------------------------------------------------------------


GONE_VERSION = 0


def test_equal_claims_that_meet_in_batches_have_one_winner(url):
    """L1: though they leave the same values in all columns."""
    with closing(open_store(url)) as one, closing(open_store(url)) as other:
        start = threading.Barrier(2)

        def swap(store, ids):
            start.wait(START_S_MAX)
            return dict(zip(ids, store.swap([claim(id) for id in ids]), strict=True))

        with ThreadPoolExecutor(2) as threads:
            for round in range(20):
                ids = [id_of(100 * round + n) for n in range(40)]
                results = list(threads.map(swap, (one, other), (ids, ids[::-1])))
                for id in ids:
                    assert sorted(answers[id] is None for answers in results) == [False, True]


@pytest.mark.parametrize("is_change", [False, True])
def test_a_batch_of_which_some_were_applied_reads_which(store, url, sent, is_change):
    """L1: by the batch's own mark, also if another node has written one of the rows since."""
    lost, won, deleted = MANY[:3]
    if is_change:
        store.swap([claim(won), claim(deleted)])
        swaps = [complete(claim_of(id)) for id in MANY[:3]]
    else:
        swaps = [claim(id) for id in MANY[:3]]
    current = completed(claim_of(lost, nonce=7), b"7")
    store.swap([Swap(lost, 0, current)])
    renewal = Swap(won, swaps[1].record.version, renewed(swaps[1].record, NOW_MS))
    removal = Swap(deleted, swaps[2].record.version, None)
    with other_session(url) as other:
        sent.clear()
        sent.before["select"] = lambda: query(other, STATEMENTS.swap(renewal))
        assert store.swap(swaps) == [current, None, None]
        assert sent.verbs == ["update" if is_change else "insert", "select", "select"]
        assert store.get([won]) == [renewal.record]
        # Without the row nothing shows whether it was written.
        query(other, f"delete from coatcheck_records where id <> x'{lost.hex()}'")
        if is_change:
            store.swap([claim(won), claim(deleted)])
        sent.before["select"] = lambda: query(other, STATEMENTS.swap(removal))
        with pytest.raises(StoreUnavailable, match="which of its writes were applied") as caught:
            store.swap(swaps)
        assert caught.value.is_ambiguous


@pytest.mark.parametrize("is_large", [False, True])
def test_a_failure_after_claims_were_committed_is_ambiguous(own_url, sent, is_large):
    """L1, D2: some were applied; the read of the conflicts fails. In one command, or in several."""
    response = b"x" * 400_000 if is_large else None
    claims = [Swap(id, 0, claim_of(id)._replace(response=response)) for id in MANY[:4]]
    with (
        packets_of(own_url, 1_048_576),
        closing(open_store(own_url)) as store,
        other_session(own_url) as root,
    ):
        store.swap([claim(MANY[0], nonce=7)])

        def kill():
            kill_sessions_beside(root)
            until(lambda: not sessions_beside(root))

        sent.clear()
        sent.before["select"] = kill
        with pytest.raises(StoreUnavailable) as caught:
            store.swap(claims)
        assert caught.value.is_ambiguous
        assert (sent.verbs.count("insert") > 1) == is_large
        sent.before.clear()
        first, *others = store.get(MANY[:4])
        assert first.nonce == 7
        assert others == [swap.record for swap in claims[1:]]


def test_a_claim_whose_conflicting_record_is_deleted_before_the_read_is_repeated(store, url, sent):
    """L1, D2: it could be applied now; an error after five times is ambiguous if others were."""
    first, second = MANY[:2]
    rival, removal = claim(first, nonce=7), Swap(first, claim_of().version, None)
    store.swap([rival])
    with other_session(url) as other:
        sent.before["select"] = lambda: query(other, STATEMENTS.swap(removal))
        assert store.swap([claim(first), claim(second)]) == [None, None]
        sent.before["insert"] = lambda: query(other, STATEMENTS.swap(rival))
        for swaps in ([claim(first)], [claim(first), complete(claim_of(second))]):
            query(other, f"delete from coatcheck_records where id = x'{first.hex()}'")
            query(other, STATEMENTS.swap(rival))
            with pytest.raises(StoreUnavailable, match="gave up after 5 conflicts") as caught:
                store.swap(swaps)
            assert caught.value.is_ambiguous == (len(swaps) == 2)


@pytest.mark.parametrize("code", [1142, 1213])
def test_a_batch_of_which_one_member_is_refused_writes_nothing(store, url, code):
    """L1, D2: so the error is not ambiguous; also after deadlocks of the refused member."""
    delete = Swap(MANY[0], claim_of().version, None)
    refuse = f"signal sqlstate '45000' set mysql_errno = {code}, message_text = 'no'"
    with other_session(url) as other:
        store.swap([claim(MANY[0])])
        query(other, f"create trigger t before delete on coatcheck_records for each row {refuse}")
        for swaps in ([claim(MANY[1]), delete], [delete]):
            with pytest.raises(StoreUnavailable) as caught:
                store.swap(swaps)
            assert not caught.value.is_ambiguous
        assert store.get(MANY[:2]) == [claim_of(MANY[0]), None]


# --- concurrent writers ---------------------------------------------------------------------------


def test_a_claim_does_not_wait_for_a_sweep_of_others(url):
    """T3: a sweep locks the rows that it deletes, and no gap between them."""
    # 20 s: a claim that waits for the sweep takes that long, and no other does on a busy machine.
    with closing(open_store(url + "&timeout=20s")) as store:
        store.swap([claim(id) for id in MANY[::2]])

        with other_session(url) as sweeper:
            query(sweeper, "begin")
            assert (
                sweeper.cursor().execute(STATEMENTS.delete_expired(MANY, OVER_MS)) == len(MANY) // 2
            )
            started = time.monotonic()
            assert store.swap([claim(MANY[1])]) == [None]
            assert store.swap([claim(id) for id in MANY[3::2]]) == [None] * (len(MANY) // 2 - 1)
            assert store.swap([complete(claim_of(id)) for id in MANY[1::2]]) == [None] * 32
            assert time.monotonic() - started < 10
            query(sweeper, "rollback")
        assert store.sweep(OVER_MS, 1_000) == len(MANY)


def test_a_sweep_does_not_wait_for_records_that_are_kept(url):
    """T3: nor does it delete one that was renewed since it was read."""
    with closing(open_store(url + "&timeout=1s")) as store, other_session(url) as holder:
        kept = claim_of(id_of(99), now_ms=NOW_MS + 1)
        store.swap([claim(id) for id in MANY] + [Swap(kept.id, 0, kept)])
        query(holder, "begin")
        query(holder, f"select 1 from coatcheck_records where id = x'{kept.id.hex()}' for update")
        ids = [row[0] for row in query(holder, STATEMENTS.select_expired(OVER_MS, 500))]
        store.swap([Swap(MANY[0], NOW_MS, renewed(claim_of(MANY[0]), OVER_MS + 1))])
        assert store.sweep(OVER_MS, 10) == 10
        assert holder.cursor().execute(STATEMENTS.delete_expired(ids, OVER_MS)) == len(MANY) - 11
        query(holder, "commit")
        assert [r.id for r in store.find(Query()).records] == [MANY[0], kept.id]


def test_a_swap_that_meets_a_deadlock_is_repeated(url):
    """
    L1, D2: a real one; the server rolls ours back, because the other has written more.

    From a thread: an event loop may send the three swaps in two batches, which do not deadlock.
    """
    first, second = MANY[:2]
    deadlocks = "select variable_value from information_schema.global_status"
    deadlocks += " where variable_name = 'innodb_deadlocks'"
    lock = "select 1 from coatcheck_records where id = x'{}' for update"
    with (
        closing(open_store(url)) as store,
        other_session(url) as other,
        other_session(url) as watcher,
    ):
        store.swap([claim(first), claim(second)])
        before = int(query(watcher, deadlocks)[0][0])
        query(other, "create table heavy (n int) engine = innodb")
        query(other, "begin")
        query(other, "insert into heavy select seq from seq_1_to_500")
        query(other, lock.format(second.hex()))
        with ThreadPoolExecutor(1) as threads:
            swaps = [complete(claim_of(second)), complete(claim_of(first)), claim(MANY[2])]
            asked = threads.submit(store.swap, swaps)
            until(lambda: waiting_for_locks(watcher))
            query(other, lock.format(first.hex()))
            assert int(query(watcher, deadlocks)[0][0]) == before + 1
            query(other, "commit")
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
def test_a_lock_that_is_held_too_long_is_an_outage(url, lock, unlock):
    """D2: nothing was written, and the error is not ambiguous."""
    with closing(open_store(url + "&timeout=2s")) as store, other_session(url) as other:
        store.swap([claim()])
        if unlock == "rollback":
            query(other, "begin")
        query(other, lock)
        for swaps in ([complete(claim_of())], [complete(claim_of()), claim(id_of(2))]):
            with pytest.raises(StoreUnavailable, match="keeps the rows") as caught:
                store.swap(swaps)
            assert not caught.value.is_ambiguous
        query(other, unlock)
        assert store.swap([complete(claim_of()), claim(id_of(2))]) == [None, None]


def test_a_batch_that_waits_for_a_lock_does_not_delay_the_next(store, url):
    """T3: there are two connections that write."""
    store.swap([claim(MANY[0])])
    with (
        other_session(url) as other,
        other_session(url) as watcher,
        ThreadPoolExecutor(1) as threads,
    ):
        query(other, "begin")
        query(other, "select * from coatcheck_records for update")
        waiting = threads.submit(store.swap, [complete(claim_of(MANY[0]))])
        until(lambda: waiting_for_locks(watcher))
        assert store.swap([claim(MANY[1])]) == [None]
        assert not waiting.done()
        query(other, "rollback")
        assert waiting.result(START_S_MAX) == [None]


# --- size -----------------------------------------------------------------------------------------


def test_a_record_that_does_not_fit_fails_alone(own_url, sent, caplog):
    """D2, L12: with its own error, or without its response; the others are written."""
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
        sent.clear()
        batcher = Batcher(store)
        asked = [threads.submit(batcher.swap, swap) for swap in swaps]
        for number, answer in enumerate(asked):
            if number == 2:
                with pytest.raises(ValueError, match="raise its max_allowed_packet"):
                    answer.result(START_S_MAX)
            else:
                assert answer.result(START_S_MAX) is None
        assert store.get([MANY[3]]) == [large[3]._replace(response=None)]
        assert "its response of 1100000 bytes exceeds" in caplog.text
        # A caller that retries, because an answer was lost, gets what it has written.
        assert store.swap([swaps[3]]) == [large[3]]
        assert store.swap([swaps[3], swaps[4]]) == [large[3], swaps[4].record]
        # Together they are too large for one statement, and not for one transaction.
        held = [swap.record for swap in swaps if swap.id not in (MANY[2], MANY[3])]
        again = [Swap(r.id, r.version, r._replace(version=r.version + 1)) for r in held]
        assert store.swap(again) == [None] * 6
        claims = [Swap(id, 0, completed(claim_of(id), b"y" * 300_000)) for id in MANY[8:16]]
        assert store.swap(claims) == [None] * 8
        assert store.swap(claims) == [swap.record for swap in claims]
        assert "set" not in sent.verbs, "it has connected again"
        assert any("max_allowed_packet" in f.message for f in store.check())


def test_a_connection_on_which_a_statement_was_too_large_is_not_used_again(
    own_url, sent, monkeypatch
):
    """D2: the server closes it after the error; the next write uses another connection."""
    with packets_of(own_url, 16_384), closing(open_store(own_url)) as store:
        # As behind a proxy that accepts less than the server says.
        monkeypatch.setattr(mysql_connection, "_LIMITS", "select 1 << 20, 0, 0")
        store.swap([claim()])
        large = renewed(claim_of(), NOW_MS)._replace(progress=b"x" * 20_000)
        sent.clear()
        with pytest.raises(ValueError, match="bigger than 'max_allowed_packet'"):
            store.swap([Swap(ID, NOW_MS, large)])
        assert sent.verbs == ["update"], "nothing is sent on a connection that is closed"
        assert store.swap([claim(id_of(2))]) == [None]
        assert store.get([ID, id_of(2)]) == [claim_of(), claim_of(id_of(2))]


@pytest.mark.parametrize("rest", ["", "&compact=1"])
@pytest.mark.parametrize("keys", [None, {"k": b"k" * 32}])
def test_a_writer_whose_response_did_not_fit_recognises_its_own_record(own_url, rest, keys):
    """L12, X1: also if texts are not kept, and though encryption never gives the same bytes twice."""
    with (
        packets_of(own_url, 1_048_576),
        closing(
            EncryptedStore(open_store(own_url + rest), KeyRing(keys) if keys else None)
        ) as store,
    ):
        held = claim_of()._replace(progress=b"noted", label="orders", scope="s", key="order-1")
        answer = completed(held, random.Random(1).randbytes(1_100_000))
        assert store.swap([Swap(ID, 0, held)]) == [None]
        assert store.swap([Swap(ID, held.version, answer)]) == [None]
        assert is_same_write(*store.swap([Swap(ID, held.version, answer)]), answer)
        (standing,) = store.swap([Swap(ID, held.version, answer._replace(nonce=99))])
        assert (standing.nonce, standing.response) == (answer.nonce, None)


@pytest.mark.parametrize("filler", [b"'", b"\xff"])
def test_the_largest_response_fits_into_what_the_doctor_asks_for(own_url, filler):
    """L12, D3: whatever its bytes, alone, in a batch, and in a transaction."""
    body = filler * (8 * 1_024 * 1_024)
    with (
        packets_of(own_url, mysql_doctor.PACKET_BYTES_MIN),
        closing(open_store(own_url)) as store,
    ):
        assert not any("max_allowed_packet" in f.message for f in store.check())
        store.swap([claim(id) for id in MANY[:3]])
        swaps = [complete(claim_of(id), body) for id in MANY[:3]]
        assert store.swap(swaps[:1]) == [None]
        assert store.swap(swaps[1:]) == [None, None]
        assert store.get(MANY[:3]) == [swap.record for swap in swaps]
        with other_session(own_url) as application:
            held = claim_of(MANY[3])
            for written in (
                *store.transaction_statements.claim(Swap(held.id, 0, held), 1_000),
                None,
            ):
                text, values, _ = written or store.transaction_statements.change(
                    complete(held, body)
                )
                with application.cursor() as cursor:
                    assert cursor.execute(text, values) == 1
        assert store.get([MANY[3]]) == [completed(held, body)]
