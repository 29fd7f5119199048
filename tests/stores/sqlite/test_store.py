"""What only SQLite has: a file, its layout, its statements, its errors, and several processes."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.core.record import completed, in_doubt, renewed
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import open_store
from coatcheck.stores.contract import Query
from coatcheck.stores.sqlite import doctor, schema, statements
from coatcheck.stores.sqlite.store import SqliteStore
from tests.stores.sqlite import processes
from tests.stores.sqlite.processes import NOW_MS, change, claim, claim_of

# A file system on which thousands of commits are fast, if there is one.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

# 30 s: nothing here takes a tenth of it, also on a busy machine.
TIMEOUT_S = 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path)) as store:
        yield store


@contextmanager
def statements_of(store: SqliteStore) -> Iterator[list[str]]:
    """Collect the first words of every statement on the connection that writes."""
    seen: list[str] = []
    with store._writer as connection:
        connection.set_trace_callback(lambda text: seen.append(" ".join(text.split()[:2])))
    yield seen
    with store._writer as connection:
        connection.set_trace_callback(None)


RunScript = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run_script() -> Iterator[RunScript]:
    """Return a function that runs one of `processes` in its own process."""
    started: list[subprocess.Popen[str]] = []

    def run(name: str, path: Path) -> subprocess.Popen[str]:
        script = ["-W", "ignore::DeprecationWarning", processes.__file__, name, str(path)]
        process = subprocess.Popen(
            [sys.executable, *script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    return out


# ---------------------------------------------------------------------------------- URLs


def test_a_url_names_a_relative_or_an_absolute_file(tmp_path: Path, monkeypatch):
    """D1: three slashes from here, four from the root; a relative file stays where it was."""
    monkeypatch.chdir(tmp_path)
    with closing(open_store("sqlite:///a%20b.db")) as store:
        assert isinstance(store, SqliteStore)
        assert store.path == str(tmp_path / "a b.db")
        monkeypatch.chdir("/")
        assert store.swap([claim(claim_of(1))]) == [None]
    with closing(open_store(f"sqlite:///{tmp_path}/a b.db")) as store:
        assert store.get([claim_of(1).id]) == [claim_of(1)]


def test_a_compact_store_keeps_neither_scope_nor_key(path: Path):
    """D1, S2: they are nowhere in the file."""
    record = claim_of(1)._replace(key="order-of-ann", label="POST /orders", scope="ann")
    with closing(open_store(f"sqlite:///{path}?compact=1&busy_timeout=2s")) as store:
        store.swap([claim(record)])
        store.swap([claim(claim_of(2)._replace(key="order-of-bob")), claim(claim_of(3))])
        assert store.get([record.id]) == [record._replace(key="", scope="a")]
        assert store.find(Query(key="order-of-ann")).records == []
    content = path.read_bytes()
    assert not any(word in content for word in (b"order-of", b"ann"))


# --------------------------------------------------------------------------------------- rows

surrogates = st.characters(categories=["Cs"])
texts = st.text(st.one_of(st.characters(), surrogates), max_size=40)
hexadecimal = st.text("0123456789abcdefABCDEF", min_size=16, max_size=16)
uuids = st.one_of(
    st.uuids().map(str),
    st.uuids().map(lambda uuid: str(uuid).upper()),
    st.uuids().map(lambda uuid: uuid.hex),
    st.uuids().map(lambda uuid: f"{uuid.hex[:1]}-{uuid.hex[1:]}   "),
    st.text("0123456789abcdef- ", min_size=36, max_size=36),
)
# Lengths at which an escaped text would have the length of a packed one.
tight = st.builds(lambda n, c: "a" * n + c, st.integers(0, 20), surrogates)
anything = st.one_of(texts, hexadecimal, uuids, tight)


@given(anything, anything, anything)
def test_any_text_is_read_back_unchanged(label: str, scope: str, key: str):
    """D1, K1: whether a text is packed or escaped is invisible, even if it is not valid Unicode."""
    record = claim_of(1)._replace(label=label, scope=scope, key=key)
    with closing(sqlite3.connect(":memory:")) as connection:
        row = statements.row_of(record)
        stored = connection.execute("select " + ",".join("?" * 15), row).fetchone()
    assert statements.record_of(stored) == record


def test_a_claim_with_padding_from_an_earlier_release_has_no_response(store: SqliteStore):
    """D1, L2: earlier releases wrote a text where there was no progress or response yet."""
    record = claim_of(1)
    store.swap([claim(record)])
    with store._writer as connection:
        connection.execute("update coatcheck_records set progress = '', response = '     '")
    assert store.get([record.id]) == store.find(Query()).records == [record]
    assert store.swap([change(record, in_doubt(record))]) == [None]
    assert store.get([record.id]) == [in_doubt(record)]


@pytest.mark.parametrize(
    ("together", "lengths"), [(1, (150,)), (16, (150,)), (64, (150,)), (64, (30, 300))]
)
def test_a_record_costs_at_most_200_bytes_beside_its_response(
    together: int, lengths: tuple[int, ...]
):
    """T4: including indexes. Few records, so that the test is fast; a million take no more each."""
    count, total_bytes = 64 * 64, 0
    with TemporaryDirectory(dir=MEMORY) as directory:
        path = Path(directory) / "records.db"
        with closing(SqliteStore(path)) as store:
            for start in range(0, count, together):
                numbers = range(start, start + together)
                claims = [claim_of(n, now_ms=NOW_MS + 86 * n) for n in numbers]
                responses = [b"x" * lengths[r.id[5] % len(lengths)] for r in claims]
                endings = map(completed, claims, responses)
                store.swap([claim(record) for record in claims])
                store.swap([change(r, end) for r, end in zip(claims, endings, strict=True)])
                total_bytes += sum(map(len, responses))
        assert (path.stat().st_size - total_bytes) / count <= 200


# ------------------------------------------------------------------------------------ statements


def test_a_single_swap_that_is_applied_is_one_statement(store: SqliteStore):
    """L1: no transaction and no read; a conflict costs one read."""
    record = claim_of(1)
    with statements_of(store) as seen:
        store.swap([claim(record)])
        store.swap([change(record, renewed(record, NOW_MS))])
        store.swap([change(renewed(record, NOW_MS), completed(renewed(record, NOW_MS), b""))])
        assert seen == ["insert or", "update coatcheck_records", "update coatcheck_records"]
        seen.clear()
        store.swap([claim(record)])
        assert seen == ["insert or", "select id,"]


def test_a_batch_of_any_size_is_a_few_statements(store: SqliteStore):
    """L1: every statement releases the interpreter lock and has to get it back."""
    for size in (64, 63, 33):
        claims = [claim_of(1_000 * size + number) for number in range(size)]
        endings = [change(record, completed(record, b"ok")) for record in claims]
        with statements_of(store) as seen:
            store.swap([claim(record) for record in claims])
            store.swap(endings)
        parts = 1 if size % 16 == 0 else 2
        inserts, updates = ["insert or"] * parts, ["update or"] * parts
        assert seen == [
            "begin immediate",
            *inserts,
            "commit",
            "begin immediate",
            *updates,
            "commit",
        ]


def test_completing_touches_no_index():
    """T3: neither the id nor the expiry of a record changes until the key starts over."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in schema.MIGRATIONS[0]:
            connection.execute(statement)

        def opcodes(text: str, parameters: int) -> set[str]:
            return {step[1] for step in connection.execute(f"explain {text}", [None] * parameters)}

        assert "IdxDelete" not in opcodes(statements.CHANGE_ONE, 16)
        assert "IdxDelete" not in opcodes(statements.change_many(3), 48)
        assert "IdxDelete" in opcodes(statements.REPLACE_ONE, 16), (
            "else this test would see nothing"
        )


def test_no_claim_and_no_sweep_ever_scans_the_table(store: SqliteStore):
    """T3: their cost does not grow with the number of records."""
    marks = {
        statements.SWEEP: 2,
        statements.CHANGE_ONE: 16,
        statements.REPLACE_ONE: 16,
        statements.DELETE_ONE: 2,
    }
    marks |= {
        statements.read_many(3): 3,
        statements.change_many(3): 48,
    }
    found, values = statements.find(Query(id_prefix=b"\x12\x34"))
    with store._reader as connection:
        for text, count in (*marks.items(), (found, len(values))):
            plan = connection.execute(f"explain query plan {text}", [None] * count).fetchall()
            steps = [step[3] for step in plan]
            assert any("SEARCH" in step for step in steps)
            assert not any("SCAN coatcheck" in step for step in steps), text


def test_reads_do_not_wait_for_writes_and_a_search_delays_no_request(store: SqliteStore):
    """T3, O1: one connection for each."""
    store.swap([claim(claim_of(1))])
    with store._writer as connection:
        connection.execute("begin immediate")
        assert store.get([claim_of(1).id]) == [claim_of(1)]
        with store._reader:
            assert store.find(Query()).records == [claim_of(1)]
        connection.execute("rollback")


# ------------------------------------------------------------------------------------------- schema


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_store_shares_a_file_with_the_tables_of_an_application(path: Path, journal: str):
    """D4: settings of the whole file stay the application's; the doctor tells if they cost time."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"pragma journal_mode = {journal}")
        connection.executescript(
            "pragma user_version = 41; pragma application_id = 42; create table orders (id);"
            "insert into orders values (7);"
        )
    with closing(SqliteStore(path)) as store:
        assert store.swap([claim(claim_of(1))]) == [None]
        warnings = [text for level, text in store.check() if level != "ok"]
        assert [f"journal_mode = {journal}" in text for text in warnings] == [True] * (
            journal == "delete"
        )
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("pragma journal_mode").fetchone() == (journal,)
        assert connection.execute("pragma user_version").fetchone() == (41,)
        assert connection.execute("pragma application_id").fetchone() == (42,)
        assert connection.execute("select * from orders").fetchall() == [(7,)]
        names = connection.execute("select name from sqlite_master where name not like 'sqlite%'")
        assert {name for (name,) in names if not name.startswith("coatcheck_")} == {"orders"}


# ------------------------------------------------------------------------------------------- errors


def test_a_locked_file_is_unavailable_until_it_is_free(path: Path):
    """D2: nothing is written, and nothing that was written is lost."""
    with closing(SqliteStore(path, busy_timeout_s=0.05)) as store:
        store.swap([claim(claim_of(1))])
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            attempts = ([claim(claim_of(2))], [claim(claim_of(3)), claim(claim_of(4))])
            for swaps in attempts:
                with pytest.raises(StoreUnavailable, match="holds the write lock") as caught:
                    store.swap(swaps)
                assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
                assert not caught.value.is_ambiguous
            with pytest.raises(StoreUnavailable, match="locked"):
                store.sweep(NOW_MS)
            with pytest.raises(StoreUnavailable, match="locked"):
                SqliteStore(path, busy_timeout_s=0.05)
            assert store.get([claim_of(1).id, claim_of(2).id]) == [claim_of(1), None]
            other.execute("rollback")
        for swaps in attempts:
            assert store.swap(swaps) == [None] * len(swaps)


def test_a_write_continues_when_the_lock_is_free(store: SqliteStore, path: Path):
    """D2, L1: alone, in a batch and when opening the file."""
    store.swap([claim(claim_of(0))])
    calls: list[Callable[[], object]] = [
        lambda: store.swap([claim(claim_of(1))]) == [None],
        lambda: store.swap([claim(claim_of(2)), claim(claim_of(3))]) == [None, None],
        lambda: store.sweep(NOW_MS + 10**9, limit=1) == 1,
        lambda: SqliteStore(path).close() is None,
    ]
    for call in calls:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("begin immediate")
        # The result does not depend on the timing; usually the store is waiting by then.
        release = threading.Timer(0.05, other.close)
        release.start()
        assert call()
        release.join()


def test_a_full_disk_is_unavailable_until_there_is_room(store: SqliteStore):
    """D2: every acknowledged record is still there, and none that was refused."""
    acknowledged = []
    with store._writer as connection:
        (pages,) = connection.execute("pragma page_count").fetchone()
        connection.execute(f"pragma max_page_count = {pages + 20}")
    records = [claim_of(number)._replace(progress=b"x" * 1_000) for number in range(1_000)]
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        acknowledged.extend(r for r in records if store.swap([claim(r)]) == [None])
    assert 10 < len(acknowledged) < 200
    batch = [claim(claim_of(5_000 + n)._replace(progress=b"x" * 9_000)) for n in range(50)]
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        store.swap(batch)
    assert store.find(Query(limit=10_000)).records == sorted(acknowledged)
    with store._writer as connection:
        connection.execute("pragma max_page_count = 1000000")
    assert store.swap(batch) == [None] * 50
    assert store.get([record.id for record in acknowledged]) == acknowledged


def test_a_file_size_limit_makes_the_store_unavailable_and_loses_nothing(
    run_script: RunScript, path: Path
):
    """D2: the log itself cannot be written; the same store continues when it can."""
    output_of(run_script("fill_without_room", path))


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as a user who is subject to file permissions; root is not."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65_534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_file_or_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path):
    """D2: not at the first request."""
    place = tmp_path / "place"
    place.mkdir()
    SqliteStore(place / "records.db").close()
    for parent in (place, *place.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(0o755)
    (place / "records.db").chmod(0o444)
    place.chmod(0o555)
    try:
        with unprivileged():
            for name in ("records.db", "new.db"):
                with pytest.raises(Misconfigured, match=r"cannot be opened|read-only"):
                    SqliteStore(place / name)
    finally:
        place.chmod(0o755)


def test_a_file_that_becomes_read_only_is_unavailable_until_it_is_not(store: SqliteStore):
    """D2: the broken connection is replaced."""
    store.swap([claim(claim_of(1))])
    with store._writer as connection:
        connection.execute("pragma query_only = 1")
    with pytest.raises(StoreUnavailable, match="read-only"):
        store.swap([claim(claim_of(2)), claim(claim_of(3))])
    assert store.swap([claim(claim_of(2)), claim(claim_of(3))]) == [None, None]
    assert store.get([claim_of(n).id for n in (1, 2, 3)]) == [claim_of(n) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (
            lambda path: path.write_bytes(b"not a database, but long enough" * 100),
            "is not an SQLite",
        ),
        (lambda path: path.mkdir(), "cannot be opened"),
        (lambda path: path.parent.rmdir(), "cannot be opened; check that its directory exists"),
    ],
    ids=["another file", "a directory", "a missing directory"],
)
def test_a_path_that_can_never_work_is_refused_at_the_start(prepare, words, tmp_path: Path):
    """D2: with the path in the message."""
    path = tmp_path / "place" / "records.db"
    path.parent.mkdir()
    prepare(path)
    with pytest.raises(Misconfigured, match=f"records.db: the file {words}"):
        SqliteStore(path)


def test_a_damaged_file_is_unavailable_until_it_is_restored(path: Path):
    """D2: a damaged page never becomes "there is no such record"."""
    claims = [claim_of(number) for number in range(500)]
    with closing(SqliteStore(path)) as store:
        store.swap([claim(record) for record in claims])
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[4 * 4096 :] = b"\xa5" * (len(sound) - 4 * 4096)
    with closing(SqliteStore(path)) as store:
        path.write_bytes(damaged)
        for call in (
            lambda: store.get([record.id for record in claims]),
            lambda: store.swap([claim(record) for record in claims]),
            lambda: store.swap([claim(claims[250])]),
        ):
            with pytest.raises(StoreUnavailable, match="damaged"):
                call()
        assert any(finding.level == "error" for finding in store.check())
        path.write_bytes(sound)
        assert store.get([record.id for record in claims]) == claims
        assert store.swap([claim(record) for record in claims]) == claims
        assert all(finding.level == "ok" for finding in store.check())


def test_a_file_with_a_damaged_head_is_refused_at_the_start(path: Path):
    """D2: it could never work."""
    SqliteStore(path).close()
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xa5" * (4096 - 100)
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match="damaged"):
        SqliteStore(path)


def test_a_file_that_disappeared_is_not_created_again(store: SqliteStore, path: Path):
    """D2: an empty file would let every retry execute again."""
    store.swap([claim(claim_of(1))])
    path.unlink()
    assert any(finding.level == "error" for finding in store.check())
    store._writer.disconnect()
    store._reader.disconnect()
    for call in (lambda: store.swap([claim(claim_of(1))]), lambda: store.get([claim_of(1).id])):
        with pytest.raises(StoreUnavailable, match="cannot be opened"):
            call()
    assert not path.exists()


def test_an_old_sqlite_is_refused_with_a_message_that_helps(path: Path, monkeypatch):
    """D1: SQLite comes with the interpreter, so the message says to change that."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    with pytest.raises(Misconfigured, match=r"SQLite 3\.34\.1, but coatcheck needs 3\.35 or newer"):
        SqliteStore(path)


def test_a_record_that_cannot_be_written_fails_with_its_own_error(store: SqliteStore, path: Path):
    """D2: and leaves no open transaction for which others would wait."""
    bad = claim_of(2)._replace(nonce=2**64)
    for swaps in ([claim(bad)], [claim(claim_of(1)), claim(bad), claim(claim_of(3))]):
        with pytest.raises(OverflowError):
            store.swap(swaps)
    missing = claim_of(4)._replace(label=None)  # type: ignore[arg-type] # what a bug may do
    with pytest.raises((AttributeError, sqlite3.IntegrityError)):
        store.swap([claim(claim_of(1)), claim(missing)])
    with closing(SqliteStore(path, busy_timeout_s=0)) as other:
        assert other.swap([claim(claim_of(1)), claim(claim_of(3))]) == [None, None]


def test_a_closed_store_leaves_one_whole_file(path: Path):
    """D1: the log was moved into it, so it can be copied."""
    store = SqliteStore(path)
    store.swap([claim(claim_of(1))])
    store.get([])
    assert path.with_name("records.db-wal").exists()
    store.close()
    assert [file.name for file in path.parent.iterdir()] == ["records.db"]


# ------------------------------------------------------------------------------------ doctor


DAMAGE = {
    "drop table coatcheck_records": "no such table",
    "drop index coatcheck_records_id": "ON CONFLICT clause does not match",
    "drop index coatcheck_records_expires": "no such index",
    "create trigger damage before insert on coatcheck_records"
    " begin select raise(abort, 'not today'); end": "not today",
    "create trigger damage before update on coatcheck_records"
    " begin select raise(ignore); end": "cannot be completed",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_doctor_tries_what_requests_do(store: SqliteStore, path: Path, damage: str):
    """D3, O1: in a transaction that it rolls back."""
    with closing(sqlite3.connect(path)) as other:
        other.execute(damage)
        other.commit()
    errors = [finding.message for finding in store.check() if finding.level == "error"]
    assert len(errors) == 1
    assert DAMAGE[damage] in errors[0]


def test_the_doctor_leaves_nothing_behind(store: SqliteStore):
    """O1."""
    store.swap([claim(claim_of(1))])
    assert {finding.level for finding in store.check()} <= {"ok", "warning"}
    assert store.find(Query()).records == [claim_of(1)]


def test_no_claim_succeeds_without_the_index_of_ids(store: SqliteStore, path: Path):
    """L1: otherwise every claim of one key would succeed."""
    with closing(sqlite3.connect(path)) as other:
        other.execute("drop index coatcheck_records_id")
        other.commit()
    for swaps in ([claim(claim_of(1))], [claim(claim_of(1)), claim(claim_of(2))]):
        with pytest.raises(StoreUnavailable, match="ON CONFLICT"):
            store.swap(swaps)


def test_the_doctor_reports_how_durable_the_file_is(path: Path):
    """D3: ok on a disk; a warning for another journal mode."""
    with closing(SqliteStore(path)) as store:
        levels = {finding.message.split(": ", 1)[1]: finding.level for finding in store.check()}
        assert levels["write-ahead log, synchronous = 2 (2: full)"] == "ok"
        assert levels["the integrity check found no damage"] == "ok"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma journal_mode = delete")
        findings = list(doctor.inspect_file(connection, str(path)))
    assert any(level == "warning" and "journal_mode = delete" in text for level, text in findings)


def test_the_doctor_warns_of_unsafe_file_systems(store: SqliteStore, tmp_path: Path, monkeypatch):
    """D3: one in memory loses everything; one on the network may not support locks."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(doctor, "_MOUNTS", mounts)
    for kind, word in (("tmpfs", "lost"), ("nfs4", "locks"), ("ext4", "")):
        mounts.write_text(f"root / other rw 0 0\ndisk {tmp_path} {kind} rw 0 0\n")
        warnings = [f.message for f in store.check() if f.level == "warning"]
        assert len(warnings) == (1 if word else 0)
        assert all(kind in message and word in message for message in warnings)


# ---------------------------------------------------------------------------------------- processes


def test_a_store_works_in_a_forked_child_and_in_its_parent(run_script: RunScript, path: Path):
    """D2: no connection is inherited, and the child's writes remain when the parent closes."""
    output_of(run_script("fork_in_use", path))


def test_a_fork_without_hooks_is_refused_where_it_would_lose_writes(
    run_script: RunScript, path: Path
):
    """D2: an unused store has no connection to inherit, and works."""
    output_of(run_script("fork_unseen", path))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_deleted_or_replaced_is_an_outage(path, store, is_replaced):
    """D2, L1: other processes would not see the write, so two of them would execute one key."""
    store.swap([claim(claim_of(1))])
    for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        name.unlink(missing_ok=True)
    with contextlib.ExitStack() as opened:
        if is_replaced:
            other = opened.enter_context(closing(SqliteStore(path)))
            assert list(other.swap([claim(claim_of(2))])) == [None]
        with pytest.raises(StoreUnavailable):
            store.swap([claim(claim_of(2))])
