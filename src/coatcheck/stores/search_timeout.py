"""The time limit of searches, in stores whose server enforces it.

A claim that gets no answer within `timeout` should fail. A search is made by operators or by the
reconciler, and may read a whole table: with the limit of a claim it would always fail from a few
million keys on.

The server itself must end a search that takes too long. Otherwise it would go on there after the
client has given up.
"""

from __future__ import annotations

from coatcheck.errors import StoreUnavailable

# 60 s: a server reads some tens of gigabytes in that time, which are a hundred million keys.
SEARCH_S = 60.0


def search_limit_s(timeout_s: float) -> float:
    """Return how long a search may take in a store with this *timeout_s*."""
    return max(SEARCH_S, timeout_s)


def took_too_long(limit_s: float) -> StoreUnavailable:
    """Return the error for a search that the server has ended."""
    return StoreUnavailable(
        f"the search took longer than {limit_s:g} s; search by reference, which uses the primary "
        "key, or set a longer `timeout` in the URL"
    )
