"""`coatcheck lookup` and `coatcheck list`: one operation, or many."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from coatcheck.cli.options import Command, add_store, duration, whole_id, whole_number
from coatcheck.cli.printing import describe, print_json, printable
from coatcheck.core.describe import facts_of, iso, story_of, times_of
from coatcheck.core.key import parse_reference, prefix_of, redacted, reference_of
from coatcheck.core.record import IN_DOUBT, STATE_NAMES, Record
from coatcheck.stores import Query, Store, open_store
from coatcheck.stores.url import shown

LIST_LIMIT = 50
LIST_LIMIT_MAX = 10_000

# One key may be in use by many callers and on many routes; more than this is not readable.
LOOKUP_LIMIT = 100


def _add_lookup_options(command: argparse.ArgumentParser) -> None:
    add_store(command)
    help = "a reference (from the header Idempotency-Reference of a response) or a key"
    command.add_argument("reference_or_key", metavar="REF_OR_KEY", help=help)


def _lookup(arguments: argparse.Namespace) -> int:
    wanted: str = arguments.reference_or_key
    with closing(open_store(arguments.store, create=False)) as store:
        by_key = Query(key=wanted, limit=LOOKUP_LIMIT)
        records = _find_reference(store, wanted) or list(store.find(by_key).records)
        now_ms = store.now_ms()
    if arguments.json:
        print_json([facts_of(record, now_ms) for record in records])
    elif records:
        print("\n\n".join(describe(record, now_ms) for record in records))
    if not records:
        where = shown(arguments.store)
        print(f"coatcheck: no operation {wanted!r} in {where}", file=sys.stderr)
    return 0 if records else 1


def _find_reference(store: Store, text: str) -> list[Record]:
    reference = parse_reference(text)
    if reference is None:
        return []
    page = store.find(Query(id_prefix=prefix_of(reference), limit=LOOKUP_LIMIT))
    return [record for record in page.records if reference_of(record.id) == reference]


def _add_list_options(command: argparse.ArgumentParser) -> None:
    add_store(command)
    add = command.add_argument
    number = whole_number(1, LIST_LIMIT_MAX)
    add("--state", choices=sorted(STATE_NAMES.values()), help="only operations in this state")
    add(
        "--older-than",
        metavar="AGE",
        type=duration,
        help='only operations older than this, such as "90s", "10m" or "7d"',
    )
    add(
        "--limit",
        metavar="N",
        type=number,
        default=LIST_LIMIT,
        help="print at most N operations (default: %(default)s)",
    )
    last = "continue a list after this id; a list that was cut off prints it"
    add("--after", metavar="ID", type=whole_id, default=b"", help=last)


def _list(arguments: argparse.Namespace) -> int:
    states = {name: state for state, name in STATE_NAMES.items()}
    age_ms: int | None = arguments.older_than
    with closing(open_store(arguments.store, create=False)) as store:
        now_ms = store.now_ms()
        records, more = store.find(
            Query(
                state=states.get(arguments.state),
                created_before_ms=None if age_ms is None else now_ms - age_ms,
                after_id=arguments.after,
                limit=arguments.limit,
            )
        )
    if more is not None:
        print(f"coatcheck: there are more; continue with --after {more.hex()}", file=sys.stderr)
    if arguments.json:
        print_json([facts_of(record, now_ms) for record in records])
        return 0
    if records:
        print("reference       state      attempt  created               key        label")
    for record in records:
        created, state = iso(record.created_ms), STATE_NAMES[record.state]
        start = f"{reference_of(record.id):<14}  {state:<9}  {record.attempt:>7}  {created:<20}"
        print(f"{start}  {printable(redacted(record.key)):<9}  {printable(record.label)}")
        if record.state == IN_DOUBT:  # a person has to decide, so show all that is known
            for name, words in (("times", times_of(record)), *story_of(record)):
                print(f"                {name:<10} {printable(words)}")
    if not records:
        print("coatcheck: no operations found", file=sys.stderr)
    return 0


LOOKUP = Command(
    _lookup,
    _add_lookup_options,
    "find an operation by its reference or its key",
    "coatcheck lookup 7D3F-92AB-1C4E --store sqlite:///orders.db",
)
LIST = Command(
    _list,
    _add_list_options,
    "list operations, by state and age",
    "coatcheck list --state in_doubt --older-than 10m",
)
