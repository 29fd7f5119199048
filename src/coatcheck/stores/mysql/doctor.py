"""What `coatcheck doctor` checks on a MySQL server, and what is logged when a store is opened."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pymysql

from coatcheck.core.identity import ID_BYTES
from coatcheck.core.record import COMPLETED, RUNNING, Record, Swap
from coatcheck.stores.contract import Finding
from coatcheck.stores.mysql import schema
from coatcheck.stores.mysql.connection import Session
from coatcheck.stores.mysql.errors import ACCESS_DENIED, NO_TABLE, TRIGGER_REFUSED, code_of
from coatcheck.stores.mysql.statements import Statements

# 12 MiB: the largest response that is kept by default is 8 MiB, and 11 MiB in base 64.
PACKET_BYTES_MIN = 12 * 1024 * 1024
# 1 s: short compared with every lease; the engine measures the difference and allows for it.
_CLOCK_OFF_MS_MAX = 1_000

_NOW_MS = "select timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) div 1000"


def now_ms(session: Session) -> int:
    """Return the server's clock, whatever its time zone."""
    return int(session.read(_NOW_MS)[0][0])


def settings_findings(session: Session, table: str) -> list[Finding]:
    """Check the server's settings and clock, and the definition of *table*."""
    settings: dict[str, str] = dict(session.read("show global variables"))
    version = f"MySQL or MariaDB {settings['version']}, coatcheck schema {len(schema.MIGRATIONS)}"
    return [
        Finding("ok", version),
        *writing_findings(settings),
        *durability_findings(settings),
        *_table_findings(session, table),
        *_clock_findings(now_ms(session) - time.time_ns() // 1_000_000),
    ]


def writing_findings(settings: dict[str, str]) -> Iterator[Finding]:
    """Check whether the server accepts our statements."""
    for name in ("read_only", "super_read_only", "innodb_read_only"):
        if settings.get(name, "OFF") not in ("OFF", "0"):
            message = f"{name} is on, so no record can be written; is this server a replica?"
            yield Finding("error", message)
    if settings.get("log_bin") == "ON" and settings.get("binlog_format") == "STATEMENT":
        message = "binlog_format = STATEMENT, so no record can be written; set it to ROW"
        yield Finding("error", message)
    packet_bytes_max = int(settings["max_allowed_packet"])
    if packet_bytes_max < PACKET_BYTES_MIN:
        yield Finding(
            "warning",
            f"max_allowed_packet = {packet_bytes_max}: responses above three quarters of it are "
            f"not kept, and retries get result-unavailable; set it to {PACKET_BYTES_MIN} or more",
        )


def durability_findings(settings: dict[str, str]) -> Iterator[Finding]:
    """Check whether acknowledged writes survive a crash."""
    flush = settings["innodb_flush_log_at_trx_commit"]
    loses = {"0": "a crash of the server", "2": "a power cut"}.get(flush)
    if loses is None:
        message = f"innodb_flush_log_at_trx_commit = {flush}: acknowledged writes are on disk"
        yield Finding("ok", message)
    else:
        yield Finding(
            "warning",
            f"innodb_flush_log_at_trx_commit = {flush}: {loses} loses the writes of the last "
            "second, and retries of those requests execute again; set it to 1",
        )
    if settings.get("log_bin") == "ON" and settings.get("sync_binlog") != "1":
        yield Finding(
            "warning",
            f"sync_binlog = {settings.get('sync_binlog')}: after a power cut the server rolls back "
            "what is not in its binary log, or a replica never receives it; set it to 1",
        )
    if settings.get("innodb_doublewrite", "ON") in ("OFF", "0"):
        message = "innodb_doublewrite is off: a power cut may leave torn pages; switch it on"
        yield Finding("warning", message)


def _table_findings(session: Session, table: str) -> Iterator[Finding]:
    kind, engine = schema.kind_of(session, table)
    if not kind:
        yield Finding("error", f"there is no table {table}: all records are gone")
    elif problem := schema.table_problem(session, table):
        yield Finding("error", problem)
    elif engine.lower() != "innodb":
        yield Finding(
            "error",
            f"{table} uses the engine {engine}, which has no transactions; "
            f"run `alter table {table} engine = innodb`",
        )
    elif schema.index_columns(session, table, "expires")[:1] != ["expires_ms"]:
        yield Finding(
            "error",
            f"{table} has no index on expires_ms, so expired records are not swept; "
            f"run `alter table {table} add index expires (expires_ms)`",
        )
    version = schema.version_of(session, table)
    if version != len(schema.MIGRATIONS):
        yield Finding(
            "error",
            f"{table} has schema {version} now, and this process works with schema "
            f"{len(schema.MIGRATIONS)}; restart it with the release that made the change",
        )


def _clock_findings(off_ms: int) -> Iterator[Finding]:
    if abs(off_ms) > _CLOCK_OFF_MS_MAX:
        yield Finding(
            "warning",
            f"the server's clock is {off_ms / 1_000:+.1f} s off this machine's; run NTP on both",
        )


def trial_findings(session: Session, statements: Statements, table: str) -> list[Finding]:
    """Write, change, read and delete a record in a transaction that is rolled back."""
    id = secrets.token_bytes(ID_BYTES)
    claim = Record(id, 1, RUNNING, 1, b"", 1, 0, 1, 1, 1, "", "", "", None, None)
    completed = claim._replace(version=2, state=COMPLETED)
    trials = {
        "insert": statements.swap(Swap(id, 0, claim)),
        "update": statements.swap(Swap(id, 1, completed)),
        "select": next(statements.select((id,))),
        "delete": statements.swap(Swap(id, 2, None)),
    }
    findings: list[Finding] = []
    session.begin()
    for verb, statement in trials.items():
        try:
            (rows,) = session.write(statement)  # for `select`: how many it finds
        except pymysql.MySQLError as error:
            if code_of(error) == NO_TABLE:  # is a finding of its own already
                break
            findings.append(Finding("error", _refusal(error, verb, table)))
        else:
            # After an earlier failure there is no row to find.
            if not rows and not findings:
                findings.append(
                    Finding("error", f"{verb} in {table} affects no row; is a trigger on it?")
                )
    session.rollback()
    return findings


def _refusal(error: pymysql.MySQLError, verb: str, table: str) -> str:
    """Return what to do about a statement that was refused; raise any other *error*."""
    if code_of(error) in ACCESS_DENIED:
        return f"the user may not {verb} in {table}; grant it"
    if code_of(error) == TRIGGER_REFUSED:
        return f"a trigger refuses every {verb} in {table}: {error.args[-1]}"
    raise error
