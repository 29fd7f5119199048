"""Options: what all commands share of how they are asked, and what their arguments may be."""

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

# A hundred years: no store has anything older, and what goes back far enough is no date any more.
AGE_MS_MAX = 100 * 366 * 24 * 3_600_000


class Parser(argparse.ArgumentParser):
    """As the original, but a store that is named in the wrong place keeps its password."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, with the usage, and exit."""
        super().error(_url.sub(lambda found: shown(found[0]), message))


_url = re.compile(r"\w[\w+.-]*://\S*")


class Command(NamedTuple):
    """One command: what it does, what it can be told, and how it is explained."""

    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None]
    help: str
    example: str


def add_store(command: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup) -> None:
    """The store that is asked."""
    url = os.environ.get(STORE_VARIABLE) or STORE_DEFAULT
    # Not as argparse would tell it: the URL may have a password in it.
    help = f"(default: {shown(url)})"
    command.add_argument("--store", metavar="URL", default=url, help=help.replace("%", "%%"))


def header(text: str) -> tuple[str, str]:
    """*text* as a header's name and value."""
    found = re.fullmatch(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f'{text!r} is not a header such as "Name: value"')
    return found[1], found[2]


def whole_number(smallest: int, largest: int) -> Callable[[str], int]:
    """Takes whole numbers within these limits."""

    def number(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not smallest <= value <= largest:
            message = f"{text!r} is not a whole number from {smallest} to {largest:,}"
            raise argparse.ArgumentTypeError(message)
        return value

    return number


def whole_id(text: str) -> bytes:
    """*text* as the id of an operation."""
    if re.fullmatch("[0-9a-f]{32}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id: it has 32 digits, 0-9 and a-f")
    return bytes.fromhex(text)


def duration(text: str) -> int:
    """*text* as milliseconds."""
    try:
        age_ms = duration_ms(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if age_ms > AGE_MS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than a hundred years")
    return age_ms
