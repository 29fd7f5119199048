"""URLs of stores: how to show one to people, and how to keep its password out of every error.

Each store parses its own URL. A password that was not percent-encoded may then be mistaken for a
host, a path or an option, and a store or its driver may quote it in an error. So every error that
is raised while a store is opened is inspected here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from coatcheck.core.policy import duration_ms
from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable

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


def no_option(store: str, name: str, value: str, known: Collection[str]) -> str:
    """Return the message for an invalid option; the value of an unknown one may be a secret."""
    return f"{store}: {name}={value if name in known else '…'} is no option"


def seconds_of(what: str, value: str) -> float:
    """Return the duration *value* in seconds; *what* names the option in errors."""
    try:
        milliseconds = duration_ms(value)
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"{what}: {error}") from error
    if milliseconds > _DURATION_MS_MAX:
        raise Misconfigured(f"{what}: {value[:40]!r} is longer than a day")
    return milliseconds / 1_000


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
