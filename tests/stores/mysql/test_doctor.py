"""What `coatcheck doctor` finds on MySQL and MariaDB."""

from types import SimpleNamespace

import pytest

from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.stores import open_store
from coatcheck.stores.mysql import doctor as mysql_doctor
from tests.stores.mysql.support import OVER_MS, other_session, query

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
        ({"innodb_flush_log_at_trx_commit": "0"}, "warning", "crash of the server loses"),
        ({"innodb_flush_log_at_trx_commit": "2"}, "warning", "a power cut loses"),
        ({"sync_binlog": "0"}, "warning", "sync_binlog = 0"),
        ({"sync_binlog": "0", "log_bin": "OFF"}, "ok", "on disk"),
        ({"innodb_doublewrite": "OFF"}, "warning", "torn pages"),
        ({"super_read_only": "ON"}, "error", "no record can be written"),
        ({"binlog_format": "STATEMENT"}, "error", "set it to ROW"),
        ({"max_allowed_packet": "4194304"}, "warning", "of it are not kept"),
    ],
)
def test_the_doctor_warns_of_settings_that_lose_writes(setting, level, words):
    """D3: each with what to do about it."""
    settings = {**SAFE, **setting}
    findings = [
        *mysql_doctor.writing_findings(settings),
        *mysql_doctor.durability_findings(settings),
    ]
    assert any(found == level and words in text for found, text in findings)
    assert sum(found != "ok" for found, _ in findings) == (level != "ok")


def test_a_server_that_could_lose_writes_is_logged_when_it_is_opened(own_url, caplog):
    """D3: what its settings or its table may lose is logged at the start, and nothing else."""
    with other_session(own_url) as root:
        open_store(own_url).close()
        assert caplog.text == ""
        query(root, "set global innodb_flush_log_at_trx_commit = 2")
        query(root, "alter table coatcheck_records engine = aria")
        try:
            open_store(own_url).close()
        finally:
            query(root, "set global innodb_flush_log_at_trx_commit = 1")
    assert "a power cut loses the writes of the last second" in caplog.text
    assert "which has no transactions" in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert all("mysql://root@127.0.0.1" in record.message for record in caplog.records)


def test_the_doctor_notices_changes_of_the_table_and_of_the_clock(store, url, monkeypatch):
    """D3: an engine without transactions, another schema, no table at all, a clock that is off."""
    with other_session(url) as other:
        query(other, "alter table coatcheck_records engine = aria")
        query(other, "update coatcheck_meta set value = 2")
        errors = [f.message for f in store.check() if f.level == "error"]
        assert ["no transactions" in errors[0], "schema 2" in errors[1]] == [True, True]
        query(other, "drop table coatcheck_records")
        assert any("all records are gone" in finding.message for finding in store.check())
    monkeypatch.setattr(mysql_doctor, "time", SimpleNamespace(time_ns=lambda: 0))
    assert any("the server's clock is +" in finding.message for finding in store.check())


def errors_of(store):
    """The errors that the doctor finds."""
    return [finding.message for finding in store.check() if finding.level == "error"]


@pytest.mark.parametrize(
    "key", ["", ", add primary key (id, version)", ", add primary key (id(8))"]
)
def test_a_table_without_its_key_is_refused_and_the_doctor_says_so(store, url, key):
    """L1, D3: as during a restore; every claim of one key would succeed there."""
    with other_session(url) as other:
        query(other, f"alter table coatcheck_records drop primary key{key}")
        (error,) = errors_of(store)
        assert "has no primary key" in error
        with pytest.raises(Misconfigured, match="has no primary key"):
            open_store(url)


def test_a_table_that_cannot_be_swept_is_an_error_to_the_doctor(store, url):
    """T3, O1: it would only grow."""
    with other_session(url) as other:
        query(other, "alter table coatcheck_records drop key expires")
    (error,) = errors_of(store)
    assert "are not swept" in error
    with pytest.raises(StoreUnavailable, match="lost an index"):
        store.sweep(OVER_MS)


def test_a_view_in_place_of_the_table_is_refused(store, url):
    """D3, O1: some statements do not work on a view."""
    with other_session(url) as other:
        query(other, "rename table coatcheck_records to elsewhere")
        query(other, "create view coatcheck_records as select * from elsewhere")
    (error,) = errors_of(store)
    assert "but a view" in error
    with pytest.raises(Misconfigured, match="but a view"):
        open_store(url)


# Those of this test's own database: other tests share the server.
OPEN_TRANSACTIONS = (
    "select trx.trx_id from information_schema.innodb_trx as trx"
    " join information_schema.processlist as session on session.id = trx.trx_mysql_thread_id"
    " where session.db = database()"
)


@pytest.mark.parametrize("move", ["insert", "update", "delete"])
def test_the_doctor_tries_whether_triggers_let_a_record_pass(store, url, move):
    """O1, D2: in a transaction that is rolled back."""
    assert not [finding for finding in store.check() if finding.level == "error"]
    with other_session(url) as other:
        assert query(other, "select * from coatcheck_records") == ()
        query(
            other,
            f"create trigger meddling before {move} on coatcheck_records for each row"
            " signal sqlstate '45000' set message_text = 'not today'",
        )
        (error,) = [finding.message for finding in store.check() if finding.level == "error"]
        assert f"a trigger refuses every {move} in coatcheck_records: not today" in error
        assert query(other, "select * from coatcheck_records") == ()
        assert query(other, OPEN_TRANSACTIONS) == ()
