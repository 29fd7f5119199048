"""URLs of stores: how one is shown to people, and that no password of one is told to them.

Above every store, which reads its own URL; a password that was not percent-encoded may then be
taken for a host, a path or an option, and come back in whatever is said about that, also by a
driver. So what is raised while a store is opened is looked at once more here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from coatcheck.core.policy import duration_ms
from coatcheck.errors import CoatcheckError, Misconfigured, StoreUnavailable

# 5: shorter pieces are found in many words, and give little away; but a part that was taken for
# something of its own is told as a whole.
_PIECE_CHARS = 5
_PART_CHARS = 3
# A day: nobody waits that long, and much more than that is no number for a system's clock.
_DURATION_MS_MAX = 86_400_000
# What has another meaning in a URL, and so cannot stand in a password as it is.
_MISSPELT = re.compile(r"[@/?#\[\]]|%(?![0-9A-Fa-f]{2})")
_HINT = (
    "in a name or a password write '@' as %40, ':' as %3A, '/' as %2F, '?' as %3F, '#' as %23, "
    "'[' as %5B and '%' as %25"
)


def shown(url: str) -> str:
    """*url* without what may be secret in it: whoever logs in, and the options."""
    scheme, mark, place = url.partition("://")
    if not mark or "@" in scheme:
        scheme, mark, place = "", "", url
    user, at, host = place.rpartition("@")
    return f"{scheme}{mark}{'…' if user else ''}{at}{host.partition('?')[0]}"


def refuse_no_text(url: object) -> None:
    """Raise, if *url* is not even text."""
    if not isinstance(url, str):
        kind = type(url).__name__
        message = f"a store is named by a URL such as sqlite:///coatcheck.db, not by a {kind}"
        raise Misconfigured(message)


def no_option(store: str, name: str, value: str, known: Collection[str]) -> str:
    """What is said of what is no option; where its name is not *known*, it may be a secret."""
    return f"{store}: {name}={value if name in known else '…'} is no option"


def seconds_of(what: str, value: str) -> float:
    """*value*, a duration, in seconds; *what* it is for is named where it is none."""
    try:
        milliseconds = duration_ms(value)
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"{what}: {error}") from error
    if milliseconds > _DURATION_MS_MAX:
        raise Misconfigured(f"{what}: {value[:40]!r} is longer than a day")
    return milliseconds / 1_000


@contextmanager
def no_password_told(url: str) -> Iterator[None]:
    """
    What is raised in here has no piece of the password in it, nor has what it came from.

    What a driver or Python itself cannot take for a name, a number or a path is no crash.
    """
    try:
        yield
    except (CoatcheckError, ValueError) as error:
        if not _is_told(url, error):
            if isinstance(error, CoatcheckError):
                raise
            raise Misconfigured(f"{shown(url)} cannot be opened: {error}") from error
        kind = StoreUnavailable if isinstance(error, StoreUnavailable) else Misconfigured
    else:
        return
    # Not from that error: whoever prints this one would print it, too.
    raise kind(f"{shown(url)} cannot be opened; {_HINT}") from None


def _is_told(url: str, error: BaseException | None) -> bool:
    login = url.rpartition("@")[0]
    secret = login.partition("://")[2] or login
    password = secret.partition(":")[2]
    # Then it is taken for what it is, and nobody tells it; but for a letter that stands for two
    # others, such as ℀, a URL is refused as a whole.
    if password.isascii() and not _MISSPELT.search(password):
        return False
    starts = range(len(password) - _PIECE_CHARS + 1)
    pieces = {password[start : start + _PIECE_CHARS] for start in starts}
    pieces |= {part for part in _MISSPELT.split(password) if len(part) >= _PART_CHARS}
    while error is not None:
        if any(piece in str(error) for piece in pieces):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
