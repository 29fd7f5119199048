"""Keys for clients that send none: `key=` of the middlewares takes one of these functions.

    IdempotencyMiddleware(app, store=…, key=keys.by_content(window="10s"))

`by_content` is for forms that are posted twice. What the client sent and who sent it is the key,
and its window is short, whatever the window of the policy is: later the same content is a new
action.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

from coatcheck.core.policy import Duration, Policy, changed, duration_ms
from coatcheck.errors import Misconfigured
from coatcheck.server.request import Request

# What `key=` takes: a function of the request. None or "": the request has no key.
NaturalKey: TypeAlias = Callable[[Request], object]

# 1 s: shorter than that is shorter than many handlers take, and a second post waits for those.
WINDOW_MS_MIN = 1_000
# One hour: within the window a user cannot do the same thing twice on purpose.
WINDOW_MS_MAX = 3_600_000


class ContentKey(str):
    """A placeholder for the key that the guard makes of the request's content."""

    __slots__ = ("window_ms",)
    window_ms: int

    def policy_of(self, policy: Policy) -> Policy:
        """The *policy* of the route, with the window of this key."""
        return _with_window(policy, self.window_ms)


def by_content(window: Duration = "10s") -> NaturalKey:
    """
    Make the key of what the client sent: the same request twice within *window* is one action.

    For clients that cannot send a key, such as a form that is posted twice. The caller, the path
    and the content are the key. A request is not guarded if nothing identifies its client: neither
    `caller=`, nor a credential, nor a session. Otherwise two people who post the same form would
    get one response.

    Two equal actions that a user means, such as two equal orders, are one within *window*.

    Args:
        window: from the first request on, 1 second to 1 hour. A second request within it waits for
            the first one, and gets its response even if the window has ended meanwhile.
    """
    try:
        window_ms = duration_ms(window)
    except (TypeError, ValueError) as error:
        raise Misconfigured(f"window: {error}") from error
    if not WINDOW_MS_MIN <= window_ms <= WINDOW_MS_MAX:
        raise Misconfigured(f"window is {window!r}; by_content takes 1 second to 1 hour")

    def key(_request: Request) -> ContentKey:
        found = ContentKey("content")
        found.window_ms = window_ms
        return found

    return key


# 256: the policies of an application, of which each route may have one.
@functools.lru_cache(maxsize=256)
def _with_window(policy: Policy, window_ms: int) -> Policy:
    lease_ms = min(policy.lease_ms, window_ms)  # a policy requires it
    changes = {
        "window": timedelta(milliseconds=window_ms),
        "lease": timedelta(milliseconds=lease_ms),
        "on_expired": "new",  # after the window it is a new action, not a late retry
    }
    return changed(policy, changes)
