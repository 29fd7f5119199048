"""Shared by the commands: options, and types of arguments."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import click

from coatcheck.core.policy import duration_ms
from coatcheck.errors import Misconfigured

STORE_VARIABLE = "COATCHECK_STORE"
STORE_DEFAULT = "sqlite:///coatcheck.db"
SECRET_VARIABLE = "COATCHECK_SECRET"  # noqa: S105 - the name of the variable

# A hundred years: no record is older, and a much earlier date cannot be represented.
AGE_MS_MAX = 100 * 366 * 24 * 3_600_000

store_option = click.option(
    "--store",
    "url",
    metavar="URL",
    envvar=STORE_VARIABLE,
    default=STORE_DEFAULT,
    help=f"URL of the store (or {STORE_VARIABLE}; default: {STORE_DEFAULT})",
)
json_option = click.option("--json", "as_json", is_flag=True, help="print JSON instead of text")
yes_option = click.option("--yes", is_flag=True, help="do not ask for confirmation")
secret_option = click.option(
    "--secret",
    metavar="TEXT",
    envvar=SECRET_VARIABLE,
    default="",
    help=f"the secret of the deployment, if it has one (or {SECRET_VARIABLE})",
)


def caller_option(*, required: bool) -> Callable[[Any], Any]:
    """Return the option --caller."""
    what = "what your caller= function returned, or the digest that lookup shows"
    return click.option("--caller", metavar="WHO", required=required, help=what)


def example(command: str) -> str:
    """Return the end of a help text, with an example."""
    return f"\b\nexample:\n  {command}"


def confirm(question: str, *, yes: bool) -> bool:
    """
    Ask on a terminal, and return the answer, unless it was given with an option: *yes*.

    Raises `Misconfigured` if there is no terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise Misconfigured("nothing was changed: without a terminal to confirm on, add --yes")
    return click.confirm(question, err=True)


def duration(text: str) -> int:
    """Parse a duration such as "10m"; return milliseconds."""
    try:
        age_ms = duration_ms(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if age_ms > AGE_MS_MAX:
        raise click.BadParameter(f"{text!r} is longer than a hundred years")
    return age_ms


def header(text: str) -> tuple[str, str]:
    """Parse the name and the value of a header."""
    found = _header(text)
    if found is None:
        raise click.BadParameter(f'{text!r} is not a header such as "Name: value"')
    return found[1], found[2]


_header = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)").fullmatch
