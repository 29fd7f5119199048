"""`coatcheck plan` and `coatcheck outbox`: for those who run clients."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import click

from coatcheck.cli.options import confirm, example, json_option, yes_option
from coatcheck.cli.printing import print_error, print_json, print_result, print_table
from coatcheck.client.keys import new_uuid4
from coatcheck.client.outbox_store import OutboxStore, Stored, open_outbox
from coatcheck.core.client.plan import BYTES_PER_KEY, plan, plan_text
from coatcheck.core.policy import Policy

OUTBOX_VARIABLE = "COATCHECK_OUTBOX"
OUTBOX_DEFAULT = "sqlite:///outbox.db"

outbox_option = click.option(
    "--outbox",
    "url",
    metavar="URL",
    envvar=OUTBOX_VARIABLE,
    default=OUTBOX_DEFAULT,
    help=f"URL of the outbox (or {OUTBOX_VARIABLE}; default: {OUTBOX_DEFAULT})",
)


@click.command(
    "plan",
    short_help="Compare a window with retries; compute the storage.",
    epilog=example("coatcheck plan --rate 50 --store postgresql --retries-for 1h"),
)
@click.option(
    "--window",
    metavar="TIME",
    default="24h",
    show_default=True,
    help="how long the server deduplicates retries",
)
@click.option(
    "--margin",
    metavar="TIME",
    default="1h",
    show_default=True,
    help="how long it keeps a record after that",
)
@click.option(
    "--retries-for",
    "horizon",
    metavar="TIME",
    default="60s",
    show_default=True,
    help="how long clients retry: the deadline of their policy",
)
@click.option("--rate", metavar="N", type=float, default=0.0, help="new keys a second")
@click.option(
    "--store",
    type=click.Choice(tuple(BYTES_PER_KEY)),
    default="sqlite",
    show_default=True,
    help="where the records are",
)
@click.option(
    "--response-bytes", metavar="N", type=int, default=0, help="size of an average response"
)
@click.option("--compact", is_flag=True, help="the store has compact=1 in its URL")
@json_option
def plan_command(
    window: str, margin: str, horizon: str, *, compact: bool, as_json: bool, **sizes: Any
) -> int:
    """
    Compare the window of a server with the retries of its clients, and compute the storage.

    The exit code is 1 if a late retry would be executed again.
    """
    made = plan(Policy(window=window, margin=margin), horizon, compact=compact, **sizes)
    if as_json:
        print_json({**dataclasses.asdict(made), "is_safe": made.is_safe})
    else:
        print(plan_text(made))
    return 0 if made.is_safe else 1


@click.group(short_help="List, send again or discard the actions of an outbox.")
def outbox() -> None:
    """Look at the actions of an outbox, send them again or discard them."""


@outbox.command(
    "list",
    short_help="List refused actions, and those with an unknown outcome.",
    epilog=example("coatcheck outbox list --outbox sqlite:///outbox.db"),
)
@click.option("--all", "with_all", is_flag=True, help="also those that are pending or done")
@outbox_option
@json_option
def list_actions(url: str, *, with_all: bool, as_json: bool) -> int:
    """List the actions that were refused, or whose outcome is unknown; the oldest first."""
    actions = open_outbox(url, must_exist=True).listed(with_all=with_all)
    if as_json:
        print_json([_facts(action) for action in actions])
    elif actions:
        columns = ("key", "state", ">status", "request", "lane", "reason")
        print_table(columns, [_row(action) for action in actions])
    else:
        print_error("no actions found")
    return 0


@outbox.command("retry", epilog=example("coatcheck outbox retry 0b9d7c1e-5f5e-4a8e-9f6c"))
@click.argument("key")
@click.option(
    "--did-not-happen",
    is_flag=True,
    help="you know that it did not happen: send it although it is older than the server's window",
)
@click.option(
    "--new-key",
    is_flag=True,
    help="send it with a new key; if it did happen, it happens twice",
)
@outbox_option
@json_option
def retry_action(key: str, url: str, *, did_not_happen: bool, new_key: bool, as_json: bool) -> int:
    """Send a refused or unknown action again, with its key."""
    sent_key, is_new = new_uuid4() if new_key else None, did_not_happen or new_key
    store = open_outbox(url, must_exist=True)
    is_done = store.retry(key, _now_ms(), sent_key=sent_key, is_new=is_new)
    reason = None if is_done else f"no refused or unknown action has the key {key!r}"
    return print_result("retried", "the next sender sends it again", reason, as_json=as_json)


@outbox.command(
    "discard",
    short_help="Delete an action, so that its lane continues.",
    epilog=example("coatcheck outbox discard 0b9d7c1e-5f5e-4a8e-9f6c"),
)
@click.argument("key")
@yes_option
@outbox_option
@json_option
def discard_action(key: str, url: str, *, yes: bool, as_json: bool) -> int:
    """Delete an action that is neither done nor being sent, so that its lane continues."""
    reason = _discard(open_outbox(url, must_exist=True), key, yes=yes)
    return print_result("discarded", "discarded", reason, as_json=as_json)


def _discard(store: OutboxStore, key: str, *, yes: bool) -> str | None:
    """Delete the action with *key*; return why it was not deleted, or None."""
    found = next((action for action in store.listed(with_all=True) if action.key == key), None)
    if found is None or found.state == "done":
        return f"no refused, unknown or pending action has the key {key!r}"
    if not confirm(f"Delete {found.method} {found.url} ({found.state})?", yes=yes):
        return "nothing was changed"
    if not store.discard(key, _now_ms()):
        return "the action is being sent, or it has ended; nothing was changed"
    return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _facts(action: Stored) -> dict[str, Any]:
    """Return what to print of *action*; bodies are not printed."""
    return {
        "key": action.key,
        "state": action.state,
        "reason": action.reason,
        "answer": action.status,
        "method": action.method,
        "url": action.url,
        "lane": action.lane,
        "submitted_ms": action.submitted_ms,
        "calls": action.calls,
    }


def _row(action: Stored) -> tuple[str, ...]:
    status = "" if action.status is None else str(action.status)
    request = f"{action.method} {action.url}"
    return action.key, action.state, status, request, action.lane, action.reason
