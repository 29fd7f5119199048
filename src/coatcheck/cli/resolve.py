"""`coatcheck resolve`: a person decides what happened to an operation in doubt."""

from __future__ import annotations

import argparse
import json
import sys
from base64 import b64decode
from contextlib import nullcontext
from pathlib import Path

from coatcheck.cli.options import Command, add_store, header, whole_number
from coatcheck.cli.printing import print_json
from coatcheck.core.describe import facts_of
from coatcheck.core.key import reference_of
from coatcheck.core.policy import MIB
from coatcheck.core.response import SEALED
from coatcheck.engine import Engine
from coatcheck.errors import Misconfigured, NotResolved
from coatcheck.operation import DidNotHappen, Happened
from coatcheck.stores import Query, Store, open_store
from coatcheck.stores.encryption import KeyRing

# The default of Policy.response_bytes_max.
BODY_BYTES_MAX = 8 * MIB

# 100: enough to see whether a store is encrypted, because most records have a response.
_SAMPLE = 100


def _add_options(command: argparse.ArgumentParser) -> None:
    add_store(command)
    add = command.add_argument
    add("reference", metavar="REF", help="the reference or the id of the operation")
    either = command.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "--completed", action="store_true", help="it happened; every retry gets the response below"
    )
    either.add_argument(
        "--failed", action="store_true", help="it did not happen; the next retry executes it"
    )
    of_request = "for a request: the {} of the response"
    add("--status", metavar="N", type=whole_number(200, 599), help=of_request.format("status"))
    one_header = of_request.format("header")
    add(
        "--header",
        metavar="LINE",
        type=header,
        action="append",
        help=f'{one_header}, as "Name: value"; can be repeated',
    )
    add("--body", metavar="FILE", help=of_request.format("body") + ' ("-": from standard input)')
    add("--value", metavar="JSON", help="for a function: its result")
    dead = "also if it is not in doubt yet: its process is dead and its lease has expired"
    add("--abandoned", action="store_true", help=dead)
    rings = 'the keys of an encrypted store, as JSON: {"name": "32 bytes in base64", …}'
    add("--keyring", metavar="FILE", help=rings)
    add("--by", metavar="WHO", required=True, help="who decides; stored in the record")
    add("--why", metavar="TEXT", required=True, help="the reason; stored in the record")


def _run(arguments: argparse.Namespace) -> int:
    outcome = _outcome(arguments)
    details = {name: getattr(arguments, name) for name in ("by", "why", "abandoned")}
    keyring = None if arguments.keyring is None else _keyring(Path(arguments.keyring))
    store = open_store(arguments.store, create=False)
    reason, record = None, None
    with Engine(store, keyring=keyring, sweep_every_s=None, recover_every_s=None) as engine:
        if keyring is None and _is_encrypted(store):
            raise Misconfigured("the store is encrypted: give --keyring FILE with its keys")
        now_ms = store.now_ms()
        try:
            record = engine.resolve(arguments.reference, outcome, **details)
        except NotResolved as error:
            reason, record = str(error), error.record
            print(f"coatcheck: {reason}", file=sys.stderr)
    if arguments.json:
        facts = None if record is None else facts_of(record, now_ms)
        print_json({"resolved": reason is None, "reason": reason, "operation": facts})
    elif reason is None and record is not None:
        result = "completed" if arguments.completed else "failed: the next retry executes it"
        print(f"{reference_of(record.id)} is {result}")
    return 0 if reason is None else 1


def _keyring(path: Path) -> KeyRing:
    try:
        keys = json.loads(path.read_bytes())
        return KeyRing({name: b64decode(key, validate=True) for name, key in keys.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:  # its text may contain a key
        raise Misconfigured(
            f"--keyring: the file has no readable keys ({type(error).__name__})"
        ) from None


def _is_encrypted(store: Store) -> bool:
    """Return whether other processes encrypt this store, so that we must not write plain text."""
    some = store.find(Query(limit=_SAMPLE)).records
    return any(blob[0] == SEALED for r in some for blob in (r.response, r.progress) if blob)


def _outcome(arguments: argparse.Namespace) -> Happened | DidNotHappen:
    """Return the outcome that the options describe."""
    names = ("status", "header", "body", "value")
    given = [f"--{name}" for name in names if getattr(arguments, name) is not None]
    if arguments.failed:
        if given:
            raise Misconfigured(f"--failed has no response: leave out {given[0]}")
        return DidNotHappen()
    if arguments.value is None:
        body = b"" if arguments.body is None else _body(arguments.body)
        return Happened(arguments.status or 200, arguments.header or (), body)
    if len(given) > 1:
        raise Misconfigured(
            f"--value is for functions and {given[0]} is for requests: give only one of them"
        )
    try:
        return Happened(value=json.loads(arguments.value))
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"--value is not valid JSON: {error}") from error


def _body(name: str) -> bytes:
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            body: bytes = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise Misconfigured(f"--body: {error}") from error
    if len(body) > BODY_BYTES_MAX:
        raise Misconfigured(f"--body: the file has more than {BODY_BYTES_MAX:,} bytes")
    return body


RESOLVE = Command(
    _run,
    _add_options,
    "settle an operation whose outcome is unknown: it happened, or it did not",
    "coatcheck resolve 7D3F-92AB-1C4E --failed --by ada --why 'not at the bank'",
)
