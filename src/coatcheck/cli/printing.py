"""Printing: tables and colours on a terminal, whole lines without colours in a pipe, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coatcheck.core.describe import advice_of, lines_of
from coatcheck.core.record import Record

STYLES = {
    "in doubt": "bold red",
    "lease expired": "yellow",
    "running": "cyan",
    "completed": "green",
    "failed": "dim",
    "ok": "green",
    "warning": "yellow",
    "error": "bold red",
}

# 10 000: no line is cut off for a program that reads it.
_PIPE_COLUMNS = 10_000


def console(*, stderr: bool = False) -> Console:
    """Return where to print: texts come from clients, so nothing in them is markup."""
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return Console(
        stderr=stderr,
        markup=False,
        emoji=False,
        highlight=False,
        width=None if is_terminal else _PIPE_COLUMNS,
    )


def print_operation(record: Record, now_ms: int, *, more: str = "") -> None:
    """Print *record* line by line, and what to do next; *more*: options for those commands."""
    out = console()
    advice = advice_of(record, now_ms)
    lines = [*lines_of(record, now_ms), ("next", advice.words)]
    lines += [("", command + more) for command in advice.commands]
    for name, text in lines:
        style = STYLES.get(text, "") if name == "state" else ""
        line = Text.assemble((f"{name:<12} ", "dim"), (printable(text), style))
        out.print(line, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print *rows*; a column whose name begins with ">" is aligned on the right."""
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        is_number = name.startswith(">")
        table.add_column(
            name.lstrip(">"),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=name not in ("label", "finding"),
        )
    for row in rows:
        table.add_row(*(Text(printable(cell), STYLES.get(cell, "")) for cell in row))
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def printable(text: str) -> str:
    """Return *text* with control characters escaped: it came from a client."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(document: object) -> None:
    """Print *document* as JSON."""
    print(json.dumps(document, indent=2, default=str))


def print_result(name: str, done: str, reason: str | None, *, as_json: bool) -> int:
    """
    Print what a command has *done*, or the *reason* why it changed nothing; return its exit code.

    *name*: of the member of the JSON that says whether it was done.
    """
    if reason is not None:
        print_error(reason)
    if as_json:
        print_json({name: reason is None, "reason": reason})
    elif reason is None:
        print(done)
    return 0 if reason is None else 1


def print_error(message: object) -> None:
    """Print *message* on standard error, with our name before it."""
    print(f"coatcheck: {message}", file=sys.stderr)
