"""The command line: the demo, and what operators ask a store.

Exit codes: 0 yes; 1 no: not found, an error diagnosed, a promise broken; 2 the question was wrong:
usage, or a store that cannot be opened. No operators' command but `migrate` creates a database, and
none prints what a response contains.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from coatcheck import __version__
from coatcheck.core.facts import facts_of, iso, story_of, times_of
from coatcheck.core.key import parse_reference, prefix_of, redacted, reference_of
from coatcheck.core.policy import MIB, duration_ms
from coatcheck.core.record import COMPLETED, IN_DOUBT, STATE_NAMES, Record
from coatcheck.engine import Engine
from coatcheck.errors import CoatcheckError, Misconfigured, NotResolved
from coatcheck.operation import DidNotHappen, Happened
from coatcheck.stores import Query, Store, migrate_store, open_store

STORE_VARIABLE = "COATCHECK_STORE"
STORE_DEFAULT = "sqlite:///coatcheck.db"

# 200 orders: the whole story in ten seconds or so.
DEMO_ORDERS = 200
DEMO_ORDERS_MAX = 10_000
DEMO_SEED = 7

LIST_LIMIT = 50
LIST_LIMIT_MAX = 10_000

# One key may have been used by many callers and on many routes; nobody reads more than this.
LOOKUP_LIMIT = 100

# What a policy keeps of a response, if it does not say otherwise.
BODY_BYTES_MAX = 8 * MIB

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a narrow encoding shall not end in a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = command_line()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except CoatcheckError as error:
        print(f"coatcheck: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


# --- what can be asked ----------------------------------------------------------------------


def command_line() -> argparse.ArgumentParser:
    """Every command with its options, help and an example."""
    parser = argparse.ArgumentParser(
        prog="coatcheck",
        description="Make any write safe to retry: idempotency keys done right.",
        epilog=f"Stores are URLs, by default ${STORE_VARIABLE} or {STORE_DEFAULT}.",
    )
    parser.add_argument("--version", action="version", version=f"coatcheck {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (run, help, example) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="answer in JSON")
        _add_options(command, name)
    return parser


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    if name == "demo":
        _add_demo_options(command)
        return
    url = os.environ.get(STORE_VARIABLE) or STORE_DEFAULT
    command.add_argument("--store", metavar="URL", default=url, help="(default: %(default)s)")
    if name == "lookup":
        command.add_argument("reference_or_key", metavar="REF_OR_KEY")
    if name == "list":
        _add_list_options(command)
    if name == "resolve":
        _add_resolve_options(command)
    if name == "migrate":
        command.add_argument("url", metavar="STORE_URL", nargs="?", help="the same as --store URL")
        command.add_argument("--check", action="store_true", help="only tell; 1: it is to be done")


def _add_demo_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    number = _whole_number(1, DEMO_ORDERS_MAX)
    add("--orders", metavar="N", type=number, default=DEMO_ORDERS, help="how many (%(default)s)")
    add("--seed", metavar="S", type=int, default=DEMO_SEED, help="draws the fates (%(default)s)")
    where = "a new directory for databases and logs (default: a temporary one)"
    add("--keep", metavar="DIR", type=Path, help=where)


def _add_list_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    number = _whole_number(1, LIST_LIMIT_MAX)
    add("--state", choices=sorted(STATE_NAMES.values()), help="only operations in this state")
    add("--older-than", metavar="AGE", type=_duration, help='only older ones: "90s", "10m", "7d"')
    add("--limit", metavar="N", type=number, default=LIST_LIMIT, help="at most (%(default)s)")


def _add_resolve_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("reference", metavar="REF", help="its reference, or its whole id")
    either = command.add_mutually_exclusive_group(required=True)
    either.add_argument("--completed", action="store_true", help="it happened")
    either.add_argument("--failed", action="store_true", help="it did not: a retry may run it")
    of_request = "the {} that every retry of a request gets"
    add("--status", metavar="N", type=_whole_number(200, 599), help=of_request.format("status"))
    line = of_request.format("header")
    add("--header", metavar="LINE", type=_header, action="append", help=f'{line}: "Name: value"')
    add("--body", metavar="FILE", help=of_request.format("body") + ' ("-": from standard input)')
    add("--value", metavar="JSON", help="what every retry of a function gets")
    add("--abandoned", action="store_true", help="not parked yet, but its executor is dead")
    add("--by", metavar="WHO", required=True, help="who decides; kept in the record")
    add("--why", metavar="TEXT", required=True, help="why; kept in the record")


def _header(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f'{text!r} is not a header such as "Name: value"')
    return found[1], found[2]


def _whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not smallest <= value <= largest:
            message = f"{text!r} is not a whole number from {smallest} to {largest:,}"
            raise argparse.ArgumentTypeError(message)
        return value

    return number


def _duration(text: str) -> int:
    try:
        return duration_ms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# --- the commands ---------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from coatcheck.demo.command import run  # noqa: PLC0415 - no other command needs servers

    return run(
        orders=arguments.orders, seed=arguments.seed, keep=arguments.keep, as_json=arguments.json
    )


def _lookup(arguments: argparse.Namespace) -> int:
    wanted: str = arguments.reference_or_key
    with closing(open_store(arguments.store, create=False)) as store:
        by_key = Query(key=wanted, limit=LOOKUP_LIMIT)
        records = _find_reference(store, wanted) or list(store.find(by_key).records)
        now_ms = store.now_ms()
    if arguments.json:
        _print_json([facts_of(record, now_ms) for record in records])
    elif records:
        print("\n\n".join(_portrait(record, now_ms) for record in records))
    if not records:
        print(f"coatcheck: nothing is known of {wanted!r} in {arguments.store}", file=sys.stderr)
    return 0 if records else 1


def _find_reference(store: Store, text: str) -> list[Record]:
    reference = parse_reference(text)
    if reference is None:
        return []
    page = store.find(Query(id_prefix=prefix_of(reference), limit=LOOKUP_LIMIT))
    return [record for record in page.records if reference_of(record.id) == reference]


def _list(arguments: argparse.Namespace) -> int:
    states = {name: state for state, name in STATE_NAMES.items()}
    age_ms: int | None = arguments.older_than
    with closing(open_store(arguments.store, create=False)) as store:
        now_ms = store.now_ms()
        records, more = store.find(
            Query(
                state=states.get(arguments.state),
                created_before_ms=None if age_ms is None else now_ms - age_ms,
                limit=arguments.limit,
            )
        )
    if arguments.json:
        _print_json([facts_of(record, now_ms) for record in records])
        return 0
    if records:
        print("reference       state      attempt  created               key        label")
    for record in records:
        created, state = iso(record.created_ms), STATE_NAMES[record.state]
        told = f"{reference_of(record.id):<14}  {state:<9}  {record.attempt:>7}  {created:<20}"
        print(f"{told}  {_printable(redacted(record.key)):<9}  {_printable(record.label)}")
        if record.state == IN_DOUBT:  # what a person needs to know
            for name, words in (("times", times_of(record)), *story_of(record)):
                print(f"                {name:<10} {_printable(words)}")
    if more is not None:
        print(f"coatcheck: there are more; these are the first {len(records)}", file=sys.stderr)
    elif not records:
        print("coatcheck: there are none", file=sys.stderr)
    return 0


def _resolve(arguments: argparse.Namespace) -> int:
    outcome = _outcome(arguments)
    said = {name: getattr(arguments, name) for name in ("by", "why", "abandoned")}
    store = open_store(arguments.store, create=False)
    reason, record = None, None
    with Engine(store, sweep_every_s=None, recover_every_s=None) as engine:
        now_ms = store.now_ms()
        try:
            record = engine.resolve(arguments.reference, outcome, **said)
        except NotResolved as error:
            reason, record = str(error), error.record
            print(f"coatcheck: {reason}", file=sys.stderr)
    if arguments.json:
        stands = None if record is None else facts_of(record, now_ms)
        _print_json({"resolved": reason is None, "reason": reason, "operation": stands})
    elif reason is None and record is not None:
        became = "completed" if arguments.completed else "given back: the next retry runs it"
        print(f"{reference_of(record.id)} is {became}")
    return 0 if reason is None else 1


def _outcome(arguments: argparse.Namespace) -> Happened | DidNotHappen:
    """What the options say that happened."""
    names = ("status", "header", "body", "value")
    given = [f"--{name}" for name in names if getattr(arguments, name) is not None]
    if arguments.failed:
        if given:
            raise Misconfigured(f"what did not happen has no answer: leave out {given[0]}")
        return DidNotHappen()
    if arguments.value is None:
        body = b"" if arguments.body is None else _body(arguments.body)
        return Happened(arguments.status or 200, arguments.header or (), body)
    if len(given) > 1:
        raise Misconfigured(f"--value is for functions, and {given[0]} for requests: give one")
    try:
        return Happened(value=json.loads(arguments.value))
    except ValueError as error:
        raise Misconfigured(f"--value is not JSON: {error}") from error


def _body(name: str) -> bytes:
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            body: bytes = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise Misconfigured(f"--body: {error}") from error
    if len(body) > BODY_BYTES_MAX:
        raise Misconfigured(f"--body: it has more than {BODY_BYTES_MAX:,} bytes")
    return body


def _sweep(arguments: argparse.Namespace) -> int:
    from coatcheck.engine.sweeping import sweep_all  # noqa: PLC0415 - no other command needs it

    taken = 0
    with closing(open_store(arguments.store, create=False)) as store:
        now_ms = store.now_ms()  # once, so that there is an end while servers write
        for batch in sweep_all(store, now_ms):
            taken += batch
            if batch and sys.stderr.isatty():
                print(f"\rswept {taken:,} …", end="", file=sys.stderr, flush=True)
    if taken and sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if arguments.json:
        _print_json({"swept": taken})
    else:
        print(f"swept {taken:,} record{'' if taken == 1 else 's'}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    with closing(open_store(arguments.store, create=False)) as store:
        findings = store.check()
    if arguments.json:
        _print_json([finding._asdict() for finding in findings])
    else:
        for level, message in findings:
            print(f"{level:<7}  {message}")
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _migrate(arguments: argparse.Namespace) -> int:
    migration = migrate_store(arguments.url or arguments.store, only_look=arguments.check)
    if arguments.json:
        _print_json(migration._asdict())
    else:
        print(migration.sentence)
    return 1 if migration.is_due else 0


# --- stores and records ---------------------------------------------------------------------


def _portrait(record: Record, now_ms: int) -> str:
    """*record* for people."""
    facts = facts_of(record, now_ms)
    answer = facts.pop("response")
    is_stuck = facts.pop("is_lease_over")
    for name in ("id", "steps", "notes", "progress", "resolutions"):
        facts.pop(name)
    if facts["lease_until"] is None:
        facts.pop("lease_until")
    elif is_stuck:
        facts["lease_until"] += "  (over: the next retry takes over)"
    if answer is not None:
        kind = "a value" if answer["status"] is None else f"status {answer['status']}"
        facts["response"] = f"{kind}, {answer['bytes']:,} bytes"
    elif record.state == COMPLETED:
        facts["response"] = "not kept"
    lines = [(name.replace("_", " "), str(value)) for name, value in facts.items()]
    return "\n".join(f"{name:<12} {_printable(told)}" for name, told in [*lines, *story_of(record)])


def _printable(text: str) -> str:
    """*text* without what would make a terminal do something: it came from a client."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2, default=str))


_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str]] = {
    "demo": (
        _demo,
        "watch duplicate charges disappear: a shop, a bad network, a kill -9",
        "coatcheck demo --orders 500 --seed 42",
    ),
    "lookup": (
        _lookup,
        "find an operation by its reference or its key",
        "coatcheck lookup 7D3F-92AB-1C4E --store sqlite:///orders.db",
    ),
    "list": (
        _list,
        "list operations by state and age",
        "coatcheck list --state in_doubt --older-than 10m",
    ),
    "resolve": (
        _resolve,
        "decide about an operation in doubt: it happened, or it did not",
        "coatcheck resolve 7D3F-92AB-1C4E --failed --by ada --why 'not at the bank'",
    ),
    "sweep": (
        _sweep,
        "delete what retention allows, as servers also do by themselves",
        "coatcheck sweep --store sqlite:///orders.db",
    ),
    "migrate": (
        _migrate,
        "make what a store needs, or bring it up to date",
        "coatcheck migrate postgresql://shop@localhost/shop",
    ),
    "doctor": (
        _doctor,
        "examine a store: can it be reached, is it whole, could it forget",
        "coatcheck doctor --store sqlite:///orders.db",
    ),
}
