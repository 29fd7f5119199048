"""Shared by all commands: the definition of a command, the option --store, argument types."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from coatcheck.core.policy import duration_ms
from coatcheck.stores.url import shown

STORE_VARIABLE = "COATCHECK_STORE"
STORE_DEFAULT = "sqlite:///coatcheck.db"

# A hundred years: no record is older, and a much earlier date cannot be represented.
AGE_MS_MAX = 100 * 366 * 24 * 3_600_000


class Parser(argparse.ArgumentParser):
    """An argument parser that hides passwords of store URLs, and names an unknown command."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and *message*, and exit."""
        unknown = _unknown_command.fullmatch(message)
        if unknown is not None:
            known = unknown[2].replace("'", "")
            message = f"there is no command {unknown[1]}; the commands are {known}"
        super().error(_url.sub(lambda found: shown(found[0]), message))


_url = re.compile(r"\w[\w+.-]*://\S*")
_unknown_command = re.compile(r"argument COMMAND: invalid choice: (.*) \(choose from (.*)\)")


class Command(NamedTuple):
    """One command: its function, its options, its help and an example."""

    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None]
    help: str
    example: str


def add_store(command: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup) -> None:
    """Add the option --store."""
    url = os.environ.get(STORE_VARIABLE) or STORE_DEFAULT
    # argparse would print the URL with its password.
    help = f"URL of the store (default: {shown(url)})"
    command.add_argument("--store", metavar="URL", default=url, help=help.replace("%", "%%"))


def header(text: str) -> tuple[str, str]:
    """Parse the name and the value of a header."""
    found = re.fullmatch(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f'{text!r} is not a header such as "Name: value"')
    return found[1], found[2]


def whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    """Return a parser for whole numbers within these limits."""

    def number(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not smallest <= value <= largest:
            message = f"{text!r} is not a whole number from {smallest} to {largest:,}"
            raise argparse.ArgumentTypeError(message)
        return value

    return number


def whole_id(text: str) -> bytes:
    """Parse the id of an operation."""
    if re.fullmatch("[0-9a-f]{32}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id of 32 digits, 0-9 and a-f")
    return bytes.fromhex(text)


def duration(text: str) -> int:
    """Parse a duration; return milliseconds."""
    try:
        age_ms = duration_ms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if age_ms > AGE_MS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than a hundred years")
    return age_ms
