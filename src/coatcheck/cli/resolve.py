"""`coatcheck resolve`: a person decides what happened to an operation in doubt."""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from coatcheck.cli.options import confirm, example, json_option, store_option, yes_option
from coatcheck.cli.options import header as header_type
from coatcheck.cli.printing import print_error, print_json, printable
from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.describe import facts_of
from coatcheck.core.key import reference_of
from coatcheck.core.lifecycle import Snapshot
from coatcheck.core.policy import MIB
from coatcheck.core.progress import is_sealed
from coatcheck.core.record import STATE_NAMES, Record
from coatcheck.core.response import SEALED
from coatcheck.engine import Engine
from coatcheck.engine.resolution import find_operations, refusal_of
from coatcheck.errors import Misconfigured, NotResolved
from coatcheck.keyring import KeyRing
from coatcheck.stores import Query, Store, open_store

# The default of Policy.response_bytes_max.
BODY_BYTES_MAX = 8 * MIB

# 100: enough to see whether a store is encrypted, because most records have a response.
_SAMPLE = 100

# 200 characters of a body: enough to see that it is the right one.
_SHOWN_CHARS = 200

_OF_REQUEST = ("status", "header", "body", "body_file", "empty")


@click.command(
    epilog=example(
        "coatcheck resolve 7D3F-92AB-1C4E --completed --status 201 \\\n"
        "    --body '{\"charge\": 7}' --by ada --why 'charge 7 is in the bank list'"
    )
)
@click.argument("reference_or_key", metavar="REF_OR_KEY")
@click.option("--completed", is_flag=True, help="it happened; every retry gets this response:")
@click.option("--status", metavar="N", type=click.IntRange(200, 599), help="its status")
@click.option("--body", metavar="TEXT", help="its body")
@click.option("--body-file", metavar="FILE", help='its body, from a file ("-": standard input)')
@click.option("--empty", is_flag=True, default=None, help="it has no body")
@click.option(
    "--header",
    metavar="LINE",
    type=header_type,
    multiple=True,
    help='a header, as "Name: value"; can be repeated',
)
@click.option("--value", metavar="JSON", help="for a function: its result")
@click.option("--failed", is_flag=True, help="it did not happen; the next retry executes it")
@click.option("--correct", is_flag=True, help="replace an earlier decision of a person")
@click.option(
    "--abandoned",
    is_flag=True,
    help="also if it is not in doubt yet: its process is dead and its lease has expired",
)
@click.option(
    "--keyring",
    metavar="FILE",
    help='the keys of an encrypted store, as JSON: {"name": "32 bytes in base64", …}',
)
@click.option("--by", metavar="WHO", required=True, help="who decides; stored in the record")
@click.option("--why", metavar="TEXT", required=True, help="the reason; stored in the record")
@yes_option
@store_option
@json_option
def resolve(reference_or_key: str, url: str, *, as_json: bool, **options: Any) -> int:
    """
    Settle an operation whose outcome is unknown.

    Say whether it happened, after you have found out. REF_OR_KEY is a reference, an id or a key,
    as for lookup.
    """
    has_value = options["value"] is not None
    outcome = _outcome(**{name: options.pop(name) for name in _OUTCOME})
    keyring = _keyring(options.pop("keyring"))
    store = open_store(url, create=False)
    reason, record, gets = None, None, ""
    with Engine(store, keyring=keyring, sweep_every_s=None, recover_every_s=None) as engine:
        if keyring is None and _is_encrypted(store):
            raise Misconfigured("the store is encrypted: give --keyring FILE with its keys")
        now_ms = store.now_ms()
        try:
            found = _only_one(find_operations(store, reference_or_key), reference_or_key)
            _refuse_misfit(found, outcome, has_value=has_value)
            _refuse_undecidable(Snapshot(found, now_ms), options)
            gets = printable(_gets(found, outcome))
            question = f"{reference_of(found.id)} ({printable(found.label)}): {gets}. Resolve it?"
            if not confirm(question, yes=options.pop("yes")):
                raise NotResolved("nothing was changed", found)
            record = engine.resolve(found.id, outcome, **options)
        except NotResolved as error:
            reason, record = str(error), error.record
            print_error(reason)
    if as_json:
        facts = None if record is None else facts_of(record, now_ms)
        print_json({"resolved": reason is None, "reason": reason, "operation": facts})
    elif reason is None and record is not None:
        print(f"{reference_of(record.id)} is {STATE_NAMES[record.state]}: {gets}")
    return 0 if reason is None else 1


def _only_one(records: list[Record], wanted: str) -> Record:
    if not records:
        raise NotResolved(f"there is no operation {wanted!r}")
    if len(records) > 1:
        names: dict[str, str] = {reference_of(record.id): record.label for record in records}
        if len(names) < len(records):
            names = {record.id.hex(): record.label for record in records}
        each = ", ".join(f"{name} ({printable(label)})" for name, label in names.items())
        raise NotResolved(f"{wanted!r} names several operations: give one of {each}")
    return records[0]


def _refuse_misfit(record: Record, outcome: Happened | DidNotHappen, *, has_value: bool) -> None:
    if isinstance(outcome, Happened) and has_value == bool(record.scope):
        need = "--status and a body, not --value" if has_value else "--value JSON, not --status"
        kind = "request" if has_value else "function"
        raise Misconfigured(f"{record.label!r} is a {kind}: give {need}")


def _refuse_undecidable(read: Snapshot, options: Mapping[str, Any]) -> None:
    """Raise before anyone is asked, if the answer would change nothing."""
    if not is_sealed(read.record):  # only the engine, which has the keys, can tell
        given = {name: options[name] for name in ("abandoned", "correct")}
        refusal = refusal_of(read, **given)
        if refusal is not None:
            raise refusal


def _gets(record: Record, outcome: Happened | DidNotHappen) -> str:
    """Return what retries get with *outcome*."""
    if isinstance(outcome, DidNotHappen):
        return "the next retry executes it"
    if not record.scope:
        return f"retries get the value {json.dumps(outcome.value)[:_SHOWN_CHARS]}"
    lines = [str(outcome.status), *(f"{name}: {value}" for name, value in outcome.headers)]
    body = outcome.body.decode("utf-8", "replace")[:_SHOWN_CHARS]
    return (
        f"retries get {', '.join(lines)}, {f'with the body {body}' if body else 'without a body'}"
    )


_OUTCOME = (*_OF_REQUEST, "value", "completed", "failed")


def _outcome(
    *, completed: bool, failed: bool, value: str | None, **answer: Any
) -> Happened | DidNotHappen:
    """Return the outcome that the options describe."""
    given = [
        f"--{name.replace('_', '-')}" for name in _OF_REQUEST if answer[name] not in (None, ())
    ]
    if completed == failed:
        raise Misconfigured("give either --completed or --failed")
    if failed:
        if given or value is not None:
            raise Misconfigured(f"--failed has no response: leave out {[*given, '--value'][0]}")
        return DidNotHappen()
    if value is None:
        return _response_of(**answer)
    if given:
        raise Misconfigured(
            f"--value is for functions and {given[0]} is for requests: give only one of them"
        )
    try:
        return Happened(value=json.loads(value))
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"--value is not valid JSON: {error}") from error


def _response_of(
    *,
    status: int | None,
    header: tuple[tuple[str, str], ...],
    body: str | None,
    body_file: str | None,
    empty: bool | None,
) -> Happened:
    bodies = [one for one in (body, body_file, empty) if one is not None]
    if status is None or len(bodies) != 1:
        raise Misconfigured(
            "--completed needs --status N and one of --body TEXT, --body-file FILE and --empty; "
            "for a function it needs --value JSON"
        )
    content = (
        (body or "").encode("utf-8", "surrogateescape") if body_file is None else _read(body_file)
    )
    headers = list(header)
    if content and not any(name.lower() == "content-type" for name, _ in headers):
        headers.append(("Content-Type", _content_type_of(content)))
    return Happened(status, headers, content)


def _content_type_of(body: bytes) -> str:
    try:
        json.loads(body)
    except UnicodeDecodeError:
        return "application/octet-stream"
    except (ValueError, RecursionError):
        return "text/plain; charset=utf-8"
    return "application/json"


def _read(name: str) -> bytes:
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            body: bytes = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise Misconfigured(f"--body-file: {error}") from error
    if len(body) > BODY_BYTES_MAX:
        raise Misconfigured(f"--body-file: the file has more than {BODY_BYTES_MAX:,} bytes")
    return body


def _keyring(name: str | None) -> KeyRing | None:
    if name is None:
        return None
    try:
        keys = json.loads(Path(name).read_bytes())
        return KeyRing({name: b64decode(key, validate=True) for name, key in keys.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:  # its text may contain a key
        raise Misconfigured(
            f"--keyring: the file has no readable keys ({type(error).__name__})"
        ) from None


def _is_encrypted(store: Store) -> bool:
    """Return whether other processes encrypt this store, so that we must not write plain text."""
    some = store.find(Query(limit=_SAMPLE)).records
    return any(blob[0] == SEALED for r in some for blob in (r.response, r.progress) if blob)
