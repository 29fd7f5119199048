"""URLs of stores: how to show one to people, and how to keep its password out of every error.

Each store parses its own URL. A password that was not percent-encoded may then be mistaken for a
host, a path or an option, and a store or its driver may quote it in an error. So every error that
is raised while a store is opened is inspected here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

from coatcheck.core.policy import duration_ms
from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable

# For each option of a URL: the keyword argument that it sets, what parses its value, and how it is
# explained in errors.
Options: TypeAlias = Mapping[str, tuple[str, Callable[[str], object], str]]

# The option that every store but the one in memory has.
COMPACT = "compact=0 or 1 (keep neither scopes nor keys)"

# 5: shorter pieces occur in many words and reveal little. But a whole part of the password between
# two special characters may have been taken for a host or an option: there 3 are enough.
_PIECE_CHARS = 5
_PART_CHARS = 3
# A day: no timeout needs more, and much larger numbers overflow the system's timers.
_DURATION_MS_MAX = 86_400_000
# Characters with a meaning of their own in a URL, which a password must encode.
_UNENCODED = re.compile(r"[@/?#\[\]]|%(?![0-9A-Fa-f]{2})")
_HINT = (
    "in a name or a password write '@' as %40, ':' as %3A, '/' as %2F, '?' as %3F, '#' as %23, "
    "'[' as %5B and '%' as %25"
)


def shown(url: str) -> str:
    """Return *url* without its parts that may be secret: the login and the options."""
    scheme, mark, place = url.partition("://")
    if not mark or "@" in scheme:
        scheme, mark, place = "", "", url
    user, at, host = place.rpartition("@")
    return f"{scheme}{mark}{'…' if user else ''}{at}{host.partition('?')[0]}"


def refuse_no_text(url: object) -> None:
    """Raise `Misconfigured` if *url* is not even text."""
    if not isinstance(url, str):
        kind = type(url).__name__
        message = f"a store is named by a URL such as sqlite:///coatcheck.db, not by a {kind}"
        raise Misconfigured(message)


def parse_options(store: str, query: str, known: Options, others: str = "") -> dict[str, Any]:
    """
    Return the keyword arguments for the options in the *query* of a URL.

    *store* and *others*, options that are not among the *known* ones, are for errors.
    """
    arguments: dict[str, Any] = {}
    explained = ", ".join([text for _, _, text in known.values()] + [others] * bool(others))
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:  # the value may be a secret
            hint = did_you_mean(name, known)
            raise Misconfigured(
                f"{store}: {name}=… is no option{hint}; the options are {explained}"
            )
        argument, parse, _ = known[name]
        try:
            arguments[argument] = parse(value)
        except (ValueError, OverflowError) as error:
            problem = f"{store}: {name}={value[:40]}: {error}"
            raise Misconfigured(f"{problem}; the options are {explained}") from error
    return arguments


def did_you_mean(word: str, known: Iterable[str], after: str = "") -> str:
    """Return the question whether *word* is a misspelling of a *known* one; empty if it is none."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}{after}?)" if close else ""


def flag(value: str) -> bool:
    """Parse an option that is 0 or 1."""
    if value not in ("0", "1"):
        raise ValueError("write 0 or 1")
    return value == "1"


def duration_s(value: str) -> float:
    """Parse a duration of at most a day."""
    milliseconds = duration_ms(value)
    if milliseconds > _DURATION_MS_MAX:
        raise ValueError("longer than a day")
    return milliseconds / 1_000


def timeout_s(value: str) -> float:
    """Parse a duration that leaves time for an answer."""
    seconds = duration_s(value)
    if not seconds:
        raise ValueError("a timeout must be longer than 0")
    return seconds


@contextmanager
def hide_password(url: str) -> Iterator[None]:
    """
    Replace errors that quote a piece of the password in *url*, in their causes too.

    A `ValueError` of a driver or of Python, for a name, number or path it cannot take, becomes
    `Misconfigured`.
    """
    try:
        yield
    except (CoatcheckError, ValueError) as error:
        if not _quotes_password(url, error):
            if isinstance(error, CoatcheckError):
                raise
            raise Misconfigured(f"{shown(url)} cannot be opened: {error}") from error
        kind = StoreUnavailable if isinstance(error, StoreUnavailable) else Misconfigured
    else:
        return
    # `from None`: a traceback would print the other error as well.
    raise kind(f"{shown(url)} cannot be opened; {_HINT}") from None


def _quotes_password(url: str, error: BaseException | None) -> bool:
    login = url.rpartition("@")[0]
    secret = login.partition("://")[2] or login
    password = secret.partition(":")[2]
    # A password that is encoded as it should be is parsed as a password, and never quoted. Some
    # characters outside ASCII, such as ℀, make Python refuse the URL and quote all of it.
    if password.isascii() and not _UNENCODED.search(password):
        return False
    starts = range(len(password) - _PIECE_CHARS + 1)
    pieces = {password[start : start + _PIECE_CHARS] for start in starts}
    pieces |= {part for part in _UNENCODED.split(password) if len(part) >= _PART_CHARS}
    while error is not None:
        if any(piece in str(error) for piece in pieces):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
