"""Prefer: whether a client would rather be told where to ask than wait (RFC 7240).

`Prefer: respond-async` asks for a 202 at once, `Prefer: respond-async, wait=10` for the answer
itself if it is there within ten seconds. It is a wish: what is malformed counts as not said.
"""

from __future__ import annotations

import re

# 50 s: proxies and load balancers commonly give up after 60, and the 202 should be there before.
WAIT_S_MAX = 50
# 1 000: nobody has that many wishes.
_BYTES_MAX = 1_000

# The possessive repeats keep it linear for any input.
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_VALUE = rb'(?:[ \t]*+=[ \t]*+(%b|"(?:[^"\\]|\\.)*+"))?' % _TOKEN
_PARAMETER = rb"(?:[ \t]*+;[ \t]*+(?:%b%b)?+)*+" % (_TOKEN, _VALUE)
_PREFERENCE = re.compile(rb"[ \t]*+(?:(%b)%b%b)?[ \t]*+(?:,|\Z)" % (_TOKEN, _VALUE, _PARAMETER))


def preferred_wait_s(prefer: bytes) -> int | None:
    """How long the client of this header waits before a 202; None: until the answer is there."""
    said: dict[bytes, bytes] = {}
    at = 0
    while at < len(prefer):
        found = _PREFERENCE.match(prefer, at) if len(prefer) <= _BYTES_MAX else None
        if found is None:
            return None
        at = found.end()
        name, value = found.group(1, 2)
        if name is not None:  # of several of one name the first counts
            said.setdefault(name.lower(), (value or b"").strip(b'"'))
    if said.get(b"respond-async") != b"":
        return None
    wait = said.get(b"wait", b"")
    # Nine digits are more than any limit; thousands of them are more than `int` takes.
    return min(int(wait.lstrip(b"0")[:9] or b"0"), WAIT_S_MAX) if wait.isdigit() else 0
