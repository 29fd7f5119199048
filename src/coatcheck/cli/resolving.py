"""`coatcheck resolve`: a person ends a doubt."""

from __future__ import annotations

import argparse
import json
import sys
from base64 import b64decode
from contextlib import nullcontext
from pathlib import Path

from coatcheck.cli.options import Command, add_store, header, whole_number
from coatcheck.cli.printing import print_json
from coatcheck.core.facts import facts_of
from coatcheck.core.key import reference_of
from coatcheck.core.policy import MIB
from coatcheck.core.replay import SEALED
from coatcheck.engine import Engine
from coatcheck.errors import Misconfigured, NotResolved
from coatcheck.operation import DidNotHappen, Happened
from coatcheck.stores import Query, Store, open_store
from coatcheck.stores.at_rest import KeyRing

# What a policy keeps of a response, if it does not say otherwise.
BODY_BYTES_MAX = 8 * MIB

# So many records tell whether a store is sealed: most of a hundred have an answer.
LOOKED_AT = 100


def _add_options(command: argparse.ArgumentParser) -> None:
    add_store(command)
    add = command.add_argument
    add("reference", metavar="REF", help="its reference, or its whole id")
    either = command.add_mutually_exclusive_group(required=True)
    either.add_argument("--completed", action="store_true", help="it happened")
    either.add_argument("--failed", action="store_true", help="it did not: a retry may run it")
    of_request = "the {} that every retry of a request gets"
    add("--status", metavar="N", type=whole_number(200, 599), help=of_request.format("status"))
    line = of_request.format("header")
    add("--header", metavar="LINE", type=header, action="append", help=f'{line}: "Name: value"')
    add("--body", metavar="FILE", help=of_request.format("body") + ' ("-": from standard input)')
    add("--value", metavar="JSON", help="what every retry of a function gets")
    add("--abandoned", action="store_true", help="not parked yet, but its executor is dead")
    rings = 'the keys of a sealed store, as JSON: {"name": "32 bytes in base64", …}'
    add("--keyring", metavar="FILE", help=rings)
    add("--by", metavar="WHO", required=True, help="who decides; kept in the record")
    add("--why", metavar="TEXT", required=True, help="why; kept in the record")


def _run(arguments: argparse.Namespace) -> int:
    outcome = _outcome(arguments)
    said = {name: getattr(arguments, name) for name in ("by", "why", "abandoned")}
    keyring = None if arguments.keyring is None else _keyring(Path(arguments.keyring))
    store = open_store(arguments.store, create=False)
    reason, record = None, None
    with Engine(store, keyring=keyring, sweep_every_s=None, recover_every_s=None) as engine:
        if keyring is None and _is_sealed(store):
            raise Misconfigured("what is kept here is sealed: give --keyring FILE with its keys")
        now_ms = store.now_ms()
        try:
            record = engine.resolve(arguments.reference, outcome, **said)
        except NotResolved as error:
            reason, record = str(error), error.record
            print(f"coatcheck: {reason}", file=sys.stderr)
    if arguments.json:
        stands = None if record is None else facts_of(record, now_ms)
        print_json({"resolved": reason is None, "reason": reason, "operation": stands})
    elif reason is None and record is not None:
        became = "completed" if arguments.completed else "given back: the next retry runs it"
        print(f"{reference_of(record.id)} is {became}")
    return 0 if reason is None else 1


def _keyring(path: Path) -> KeyRing:
    try:
        keys = json.loads(path.read_bytes())
        return KeyRing({name: b64decode(key, validate=True) for name, key in keys.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:  # which may name a key
        raise Misconfigured(
            f"--keyring: no keys can be read from it ({type(error).__name__})"
        ) from None


def _is_sealed(store: Store) -> bool:
    """Others write with a key ring here: what we wrote without one could be read by anybody."""
    some = store.find(Query(limit=LOOKED_AT)).records
    return any(blob[0] == SEALED for r in some for blob in (r.response, r.progress) if blob)


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
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"--value is not JSON that can be read: {error}") from error


def _body(name: str) -> bytes:
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            body: bytes = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise Misconfigured(f"--body: {error}") from error
    if len(body) > BODY_BYTES_MAX:
        raise Misconfigured(f"--body: it has more than {BODY_BYTES_MAX:,} bytes")
    return body


RESOLVE = Command(
    _run,
    _add_options,
    "decide about an operation in doubt: it happened, or it did not",
    "coatcheck resolve 7D3F-92AB-1C4E --failed --by ada --why 'not at the bank'",
)
