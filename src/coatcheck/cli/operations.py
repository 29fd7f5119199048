"""`coatcheck lookup` and `coatcheck list`: one operation, or many."""

from __future__ import annotations

import shlex
from contextlib import closing
from typing import Any

import click
from click.core import ParameterSource

from coatcheck.cli.options import (
    caller_option,
    duration,
    example,
    json_option,
    secret_option,
    store_option,
)
from coatcheck.cli.printing import print_error, print_json, print_operation, print_table
from coatcheck.core.describe import age_of, facts_of, state_of
from coatcheck.core.identity import scope_of_caller
from coatcheck.core.key import redacted, reference_of
from coatcheck.core.record import STATE_NAMES, Record
from coatcheck.engine.resolution import find_operations
from coatcheck.engine.settings import secret_of
from coatcheck.stores import Query, open_store
from coatcheck.stores.url import shown

LIST_LIMIT = 50
LIST_LIMIT_MAX = 10_000
LEASE_EXPIRED = "lease_expired"

_STATES = {name: state for state, name in STATE_NAMES.items()}


@click.command(epilog=example("coatcheck lookup 7D3F-92AB-1C4E --store sqlite:///orders.db"))
@click.argument("reference_or_key", metavar="REF_OR_KEY")
@store_option
@json_option
def lookup(reference_or_key: str, url: str, *, as_json: bool) -> int:
    """
    Show an operation, its history and what to do next.

    REF_OR_KEY is a reference (from the header Idempotency-Reference of a response, or from the
    log), an id or a key.
    """
    with closing(open_store(url, create=False)) as store:
        records = find_operations(store, reference_or_key)
        now_ms = store.now_ms()
    if as_json:
        print_json([facts_of(record, now_ms) for record in records])
    for record in records if not as_json else ():
        if record is not records[0]:
            print()
        print_operation(record, now_ms, more=_store_words(url))
    if not records:
        print_error(f"no operation {reference_or_key!r} in {shown(url)}")
    return 0 if records else 1


def _store_words(url: str) -> str:
    """Return the option that a suggested command needs; one with a password is not repeated."""
    source = click.get_current_context().get_parameter_source("url")
    is_needed = source is ParameterSource.COMMANDLINE and shown(url) == url
    return f" --store {shlex.quote(url)}" if is_needed else ""


@click.command("list", epilog=example("coatcheck list --state in_doubt --older-than 10m"))
@click.option(
    "--state",
    type=click.Choice(sorted([*_STATES, LEASE_EXPIRED])),
    help="only operations in this state; lease_expired: running, but the attempt may be dead",
)
@click.option("--label", metavar="TEXT", help='only this route or function, such as "POST /orders"')
@caller_option(required=False)
@click.option(
    "--older-than", metavar="AGE", type=duration, help='created before that: "90s", "10m", "7d"'
)
@click.option("--newer-than", metavar="AGE", type=duration, help="created after that")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, LIST_LIMIT_MAX),
    default=LIST_LIMIT,
    show_default=True,
    help="list at most N operations",
)
@click.option("--fail-if-any", is_flag=True, help="exit code 1 if there is any, for monitoring")
@secret_option
@store_option
@json_option
def list_(url: str, *, as_json: bool, fail_if_any: bool, limit: int, **conditions: Any) -> int:
    """List operations, the newest first."""
    with closing(open_store(url, create=False)) as store:
        now_ms = store.now_ms()
        # One more than wanted shows whether there are more.
        records = store.find(_query_of(now_ms, limit=limit + 1, **conditions)).records
    if len(records) > limit:
        print_error(f"there are more than {limit:,}: raise --limit, or add conditions")
    records = records[:limit]
    if as_json:
        print_json([facts_of(record, now_ms) for record in records])
    elif records:
        columns = ("reference", "state", ">created", ">attempt", "key", "label")
        print_table(columns, (_row_of(record, now_ms) for record in records))
    else:
        print_error("no operations found")
    return 1 if fail_if_any and records else 0


def _query_of(
    now_ms: int,
    *,
    limit: int,
    state: str | None,
    label: str | None,
    caller: str | None,
    older_than: int | None,
    newer_than: int | None,
    secret: str,
) -> Query:
    is_stuck = state == LEASE_EXPIRED
    return Query(
        state=None if state is None or is_stuck else _STATES[state],
        lease_expired_at_ms=now_ms if is_stuck else None,
        label=label,
        scope=None if caller is None else scope_of_caller(caller, secret_of(secret)),
        created_before_ms=None if older_than is None else now_ms - older_than,
        created_after_ms=None if newer_than is None else now_ms - newer_than,
        newest_first=True,
        limit=limit,
    )


def _row_of(record: Record, now_ms: int) -> tuple[str, ...]:
    return (
        reference_of(record.id),
        state_of(record, now_ms),
        age_of(record.created_ms, now_ms),
        str(record.attempt),
        redacted(record.key),
        record.label,
    )
