"""`coatcheck sagas`: look at sagas, and decide about blocked ones."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from typing import Any

import click

from coatcheck.cli.options import confirm, example, json_option, store_option, yes_option
from coatcheck.cli.printing import (
    STYLES,
    console,
    print_error,
    print_json,
    print_result,
    print_table,
    printable,
)
from coatcheck.core.answers import DidNotHappen, Happened
from coatcheck.core.describe import age_of
from coatcheck.core.key import redacted
from coatcheck.core.saga.view import SagaRun, facts_of_saga, picture_of_run, saga_run
from coatcheck.errors import Misconfigured, NotResolved
from coatcheck.saga.operators import STATES, Decisions, find_saga, list_sagas
from coatcheck.stores import open_store

LIST_LIMIT_MAX = 10_000

name_option = click.option("--name", metavar="SAGA", help="only sagas with this name")


@click.group()
def sagas() -> None:
    """Look at sagas, and decide about blocked ones."""


@sagas.command("list", epilog=example("coatcheck sagas list --state blocked"))
@click.option("--state", type=click.Choice(tuple(STATES)), help="only sagas in this state")
@name_option
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, LIST_LIMIT_MAX),
    default=50,
    show_default=True,
    help="list at most N sagas",
)
@click.option("--fail-if-any", is_flag=True, help="exit code 1 if there is any, for monitoring")
@store_option
@json_option
def list_command(
    url: str, state: str | None, name: str | None, limit: int, *, fail_if_any: bool, as_json: bool
) -> int:
    """List sagas, the newest first."""
    with closing(open_store(url, create=False)) as store:
        now_ms = store.now_ms()
        runs = list_sagas(store, now_ms, name=name, state=state, limit=limit)
    if as_json:
        print_json([facts_of_saga(run) for run in runs])
    elif runs:
        columns = ("reference", "state", ">created", ">attempt", "saga", "key", "at")
        print_table(columns, [_row(run, now_ms) for run in runs])
    else:
        print_error("no sagas found")
    return 1 if fail_if_any and runs else 0


def _row(run: SagaRun, now_ms: int) -> tuple[str, ...]:
    created, last = age_of(run.created_ms, now_ms), run.steps[-1:]
    at = run.blocked_at or (last[0].name if last else "")
    return run.reference, run.state, created, str(run.attempt), run.name, redacted(run.key), at


@sagas.command("show", epilog=example("coatcheck sagas show checkout:42"))
@click.argument("key", metavar="KEY_OR_REF")
@name_option
@click.option("--picture", is_flag=True, help="print a picture of it, in Mermaid")
@store_option
@json_option
def show(key: str, name: str | None, url: str, *, picture: bool, as_json: bool) -> int:
    """
    Show a saga, its steps, its history and what to do next.

    KEY_OR_REF is its key, its name and key (checkout:42), or its reference.
    """
    try:
        with closing(open_store(url, create=False)) as store:
            run = saga_run(find_saga(store, key, name), store.now_ms())
    except NotResolved as error:
        print_error(error)
        return 1
    if as_json:
        print_json(facts_of_saga(run))
    elif picture:
        print(picture_of_run(run), end="")
    else:
        _print_run(run)
    return 0


def _print_run(run: SagaRun) -> None:
    lines = [("saga", run.name), ("key", run.key), ("reference", run.reference)]
    lines += [("state", run.state), ("attempt", str(run.attempt))]
    for step in run.steps:
        error = f" ({step.error})" if step.error else ""
        lines.append(("step", f"{step.name}: {step.state}{error}"))
    if run.is_past_pivot:
        lines.append(("pivot", "passed: nothing is undone any more"))
    if run.blocked_because:
        at = f"{run.blocked_at}: " if run.blocked_at else ""
        lines.append(("blocked", f"{at}{run.blocked_because}"))
    lines += [("history", entry) for entry in run.history]
    lines.append(("next", run.next))
    if run.state == "blocked":
        lines += [("", command) for command in _commands(run)]
    out = console()
    for name, text in lines:
        style = STYLES.get("in doubt", "") if (name, text) == ("state", "blocked") else ""
        out.print(f"{name:<12} {printable(text)}", style=style, soft_wrap=True)


def _commands(run: SagaRun) -> list[str]:
    resume, who = f"coatcheck sagas resume {run.reference}", "--by YOU --why REASON"
    if not run.blocked_at:
        return [f"{resume} {who}", f"{resume} --accept-change {who}"]
    at = f"--step {shlex.quote(run.blocked_at)}"
    decisions = ("--happened JSON", "--did-not-happen", "--skip")
    return [f"{resume} {who}", *(f"{resume} {at} {decision} {who}" for decision in decisions)]


@sagas.command(
    "resume",
    epilog=example("coatcheck sagas resume checkout:42 --by ada --why 'the hotel is back'"),
)
@click.argument("key", metavar="KEY_OR_REF")
@name_option
@click.option("--step", metavar="NAME", help='decide about this step or undo: "charge:undo"')
@click.option("--happened", metavar="JSON", help="the step happened, with this result")
@click.option("--did-not-happen", is_flag=True, help="the step did not happen, and runs again")
@click.option("--skip", is_flag=True, help="go on as if the step were done, without a result")
@click.option("--accept-change", is_flag=True, help="go on with the definition that it has now")
@click.option("--by", metavar="WHO", required=True, help="who decides; stored in the record")
@click.option("--why", metavar="TEXT", required=True, help="the reason; stored in the record")
@yes_option
@store_option
@json_option
def resume(
    key: str,
    name: str | None,
    url: str,
    *,
    yes: bool,
    by: str,
    why: str,
    as_json: bool,
    **how: Any,
) -> int:
    """
    Have a blocked saga continue.

    A process that has the saga continues it: in its background, or when it is called again.
    """
    _check(**how)
    done, reason = "", None
    try:
        with closing(open_store(url, create=False)) as store:
            record = find_saga(store, key, name)
            decisions = Decisions(store, record, store.now_ms(), by=by, why=why)
            run = saga_run(record, store.now_ms())
            question = f"{run.name}:{printable(run.key)} is {run.state}. Have it continue?"
            if not confirm(question, yes=yes):
                raise NotResolved("nothing was changed", record)
            _decide(decisions, **how)
            done = f"{run.reference} continues: the next call or the background of any node runs it"
    except NotResolved as error:
        reason = str(error)
    return print_result("resumed", done, reason, as_json=as_json)


def _check(
    *, step: str | None, happened: str | None, did_not_happen: bool, skip: bool, accept_change: bool
) -> None:
    decisions = (happened is not None) + did_not_happen + skip
    if decisions > 1:
        raise Misconfigured("give only one of --happened, --did-not-happen and --skip")
    if (step is None) != (decisions == 0):
        raise Misconfigured("--step needs one of --happened, --did-not-happen and --skip")
    if accept_change and step is not None:
        raise Misconfigured("--accept-change is not about a step: leave out --step")


def _decide(
    decisions: Decisions,
    *,
    step: str | None,
    happened: str | None,
    did_not_happen: bool,
    skip: bool,
    accept_change: bool,
) -> None:
    if step is None:
        decisions.resume(accept_change=accept_change)
    elif skip:
        decisions.skip(step)
    elif did_not_happen:
        decisions.resolve(step, DidNotHappen())
    else:
        try:
            value = json.loads(happened or "")
        except (ValueError, RecursionError) as error:
            raise Misconfigured(f"--happened is not valid JSON: {error}") from error
        decisions.resolve(step, Happened(value=value))
