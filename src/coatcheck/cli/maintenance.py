"""`coatcheck erase`, `stats`, `sweep`, `migrate` and `doctor`: maintenance of a store."""

from __future__ import annotations

from contextlib import closing

import click
from click.core import ParameterSource

from coatcheck.cli.options import (
    caller_option,
    confirm,
    example,
    json_option,
    secret_option,
    store_option,
    yes_option,
)
from coatcheck.cli.printing import console, print_error, print_json, print_table
from coatcheck.core.describe import age_of, iso
from coatcheck.core.record import STATE_NAMES
from coatcheck.engine import Engine
from coatcheck.engine.sweeper import batches
from coatcheck.errors import Misconfigured
from coatcheck.stores import migrate_store, open_store
from coatcheck.stores.consumer_table import ConsumerTable
from coatcheck.stores.event_table import EventTable
from coatcheck.stores.offset_table import OffsetTable
from coatcheck.stores.record_counts import count_records
from coatcheck.stores.transaction_statements import transaction_statements_of
from coatcheck.stores.url import shown


@click.command(epilog=example("coatcheck erase --caller customer-17 --dry-run"))
@caller_option(required=True)
@click.option("--dry-run", is_flag=True, help="change nothing; only count")
@yes_option
@secret_option
@store_option
@json_option
def erase(caller: str, secret: str, url: str, *, dry_run: bool, yes: bool, as_json: bool) -> int:
    """
    Delete everything that is stored for one caller.

    Operations that run are left alone. Their number is printed: erase again when they have ended.
    """
    store = open_store(url, create=False)
    options = {"sweep_every_s": None, "recover_every_s": None}
    with Engine(store, secret=secret, **options) as engine:  # type: ignore[arg-type] # as above
        erased = engine.erase(caller, dry_run=True)
        if not dry_run and erased.records:
            count = _counted(erased.records)
            if not confirm(f"Delete {count} of this caller from {shown(url)}?", yes=yes):
                print_error("nothing was changed")
                return 1
            erased = engine.erase(caller)
    if as_json:
        print_json({"is_dry_run": dry_run, "erased": erased.records, "left": list(erased.left)})
    else:
        print(f"{'would erase' if dry_run else 'erased'} {_counted(erased.records)}")
        if erased.left:
            print_error(
                f"left alone, because they run or have just changed: {', '.join(erased.left)}"
            )
    return 0


def _counted(records: int) -> str:
    return f"{records:,} record{'' if records == 1 else 's'}"


@click.command(epilog=example("coatcheck stats --store sqlite:///orders.db"))
@store_option
@json_option
def stats(url: str, *, as_json: bool) -> int:
    """
    Count the records by state and label.

    The bytes are those of stored responses, steps and notes.
    """
    with closing(open_store(url, create=False)) as store:
        counts, now_ms = count_records(store), store.now_ms()
    total, size_bytes = sum(c.records for c in counts), sum(c.body_bytes for c in counts)
    oldest_ms = min((c.oldest_ms for c in counts), default=None)
    if as_json:
        groups = [
            {
                "state": STATE_NAMES[c.state],
                "label": c.label,
                "records": c.records,
                "oldest": iso(c.oldest_ms),
                "body_bytes": c.body_bytes,
            }
            for c in counts
        ]
        oldest = None if oldest_ms is None else iso(oldest_ms)
        totals = {"records": total, "oldest": oldest, "body_bytes": size_bytes}
        print_json({**totals, "counts": groups})
    elif oldest_ms is None:
        print_error("the store has no records")
    else:
        rows = [
            (STATE_NAMES[c.state].replace("_", " "), c.records, c.oldest_ms, c.body_bytes, c.label)
            for c in counts
        ]
        rows.append(("total", total, oldest_ms, size_bytes, ""))
        print_table(
            ("state", ">records", ">oldest", ">bytes", "label"),
            (
                (state, f"{records:,}", age_of(at_ms, now_ms), f"{size:,}", label)
                for state, records, at_ms, size, label in rows
            ),
        )
    return 0


@click.command(epilog=example("coatcheck sweep --store sqlite:///orders.db"))
@store_option
@json_option
def sweep(url: str, *, as_json: bool) -> int:
    """Delete expired records, as servers do in the background."""
    swept = 0
    with closing(open_store(url, create=False)) as store:
        now_ms = store.now_ms()  # read once, so that the sweep ends while servers write
        with console(stderr=True).status("sweeping …") as status:
            for count in batches(store, now_ms):
                swept += count
                status.update(f"swept {swept:,} …")
    if as_json:
        print_json({"swept": swept})
    else:
        print(f"swept {_counted(swept)}")
    return 0


@click.command(epilog=example("coatcheck migrate postgresql://shop@localhost/shop"))
@click.argument("store_url", metavar="[STORE_URL]", required=False)
@store_option
@click.option("--check", is_flag=True, help="change nothing; exit code 1 if a migration is due")
@click.option("--events", is_flag=True, help="also the table of outgoing events")
@click.option("--offsets", is_flag=True, help="also the table of Kafka's offsets")
@json_option
@click.pass_context
def migrate(
    context: click.Context,
    store_url: str | None,
    url: str,
    *,
    check: bool,
    events: bool,
    offsets: bool,
    as_json: bool,
) -> int:
    """
    Create the tables of a store, or upgrade them to this release.

    STORE_URL is the same as --store URL.
    """
    is_given = context.get_parameter_source("url") is ParameterSource.COMMANDLINE
    if store_url is not None and is_given:
        raise Misconfigured("give the store only once: STORE_URL or --store URL")
    migration = migrate_store(store_url or url, only_look=check)
    kinds = [
        kind for kind, is_asked in {EventTable: events, OffsetTable: offsets}.items() if is_asked
    ]
    tables: dict[str, str] = {}
    if kinds and not migration.is_due:
        with closing(open_store(store_url or url, create=False)) as store:
            statements = transaction_statements_of(store)
            tables = dict(_migrated(kind(statements), only_look=check) for kind in kinds)
    if as_json:
        print_json({**migration._asdict(), "tables": tables})
    else:
        print(migration.sentence)
        for name, what in tables.items():
            print(f"{name}: {what}")
    return 1 if migration.is_due or MISSING in tables.values() else 0


MISSING = "missing"


def _migrated(table: ConsumerTable, *, only_look: bool) -> tuple[str, str]:
    """Create *table* if there is none, unless *only_look*; its name, and what was done."""
    if table.is_there():
        return table.name, "up to date"
    if only_look:
        return table.name, MISSING
    table.create()
    return table.name, "created"


@click.command(epilog=example("coatcheck doctor --store sqlite:///orders.db"))
@store_option
@json_option
def doctor(url: str, *, as_json: bool) -> int:
    """Check that a store is reachable, complete and durable."""
    with closing(open_store(url, create=False)) as store:
        findings = store.check()
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("level", "finding"), findings)
    return 1 if any(finding.level == "error" for finding in findings) else 0
