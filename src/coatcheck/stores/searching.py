"""How long a search may take, in stores whose server ends it then.

A claim that gets no answer within `timeout` is better told so. A search is asked for by people, or
by the reconciler, and may mean to read a whole table: a limit that is right for a claim would end
it each time, from a few million keys on.

Invariant: the server itself ends what takes too long, so that nobody gives up on a search that goes
on there.
"""

from __future__ import annotations

from coatcheck.errors import StoreUnavailable

# 60 s: a server reads some tens of gigabytes in that time, which are a hundred million keys.
SEARCH_S = 60.0


def search_limit_s(timeout_s: float) -> float:
    """How long a search may take in a store with this *timeout_s*, which may be longer still."""
    return max(SEARCH_S, timeout_s)


def took_too_long(limit_s: float) -> StoreUnavailable:
    """What is said of a search that the server has ended."""
    return StoreUnavailable(
        f"the search took longer than {limit_s:g} s; a reference is found at once, and a longer "
        "`timeout` in the URL lets it go on"
    )
