"""Retry policies of clients: how often, how long and with which pauses a client sends again.

`send.py` decides with them. `RetryPolicy` has the settings of the application, `Preset` what an API
expects of its clients, and `RetryBudget` limits the retries of all calls of one client.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from coatcheck.core.policy import DURATION_MS_MAX, Duration, duration_ms, header_name
from coatcheck.errors import Misconfigured

ATTEMPTS_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a client sends a request again. Every field is optional; the defaults are safe."""

    # How many attempts one call may have, the first included.
    attempts_max: int = 6
    # How long all attempts together may take; no attempt begins later. 60 s: a person waits less.
    deadline: Duration = "60s"
    # How long an attempt may wait to connect, to send a part of the body, and for each part of the
    # answer; in aiohttp, how long it may take. None: the timeout of the HTTP library counts.
    timeout: Duration | None = None

    # The pause before the nth retry is a random part (full jitter) of backoff_base * 2 ** (n - 1).
    backoff_base: Duration = "200ms"
    backoff_max: Duration = "10s"
    # The longest `Retry-After` that is obeyed; a longer one counts as this.
    retry_after_max: Duration = "60s"

    # Which requests without a key are sent again: HTTP defines that repeating them is harmless.
    methods_without_key: Collection[str] = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
    # Whether a request whose key has expired is sent again with a new key. The action may then
    # happen twice: only the application knows whether that is right.
    renew_expired: bool = False
    # Whether a 202 with a `Location` is followed until the result is there.
    follow_accepted: bool = False
    # How long the server remembers a key. The deadline may not be longer.
    server_window: Duration = "24h"

    deadline_s: float = field(init=False, repr=False, compare=False)
    timeout_s: float | None = field(init=False, repr=False, compare=False)
    backoff_base_s: float = field(init=False, repr=False, compare=False)
    backoff_max_s: float = field(init=False, repr=False, compare=False)
    retry_after_max_s: float = field(init=False, repr=False, compare=False)
    server_window_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        for name in ("deadline", "backoff_base", "backoff_max", "retry_after_max", "server_window"):
            set_(self, f"{name}_s", seconds(name, getattr(self, name)))
        set_(self, "timeout_s", None if self.timeout is None else seconds("timeout", self.timeout))
        set_(self, "methods_without_key", _methods(self.methods_without_key))
        _check_whole("attempts_max", self.attempts_max, 1, ATTEMPTS_MAX)
        for name in ("deadline", "timeout", "server_window"):
            if getattr(self, f"{name}_s") == 0:
                raise Misconfigured(f"{name} must be longer than zero")
        if self.backoff_base_s > self.backoff_max_s:
            raise Misconfigured(
                f"backoff_base ({self.backoff_base!r}) is longer than backoff_max "
                f"({self.backoff_max!r})"
            )
        if self.deadline_s > self.server_window_s:
            raise Misconfigured(
                f"deadline ({self.deadline!r}) is longer than server_window "
                f"({self.server_window!r}): a late retry would be executed again"
            )
        for name in ("renew_expired", "follow_accepted"):
            if not isinstance(getattr(self, name), bool):
                raise Misconfigured(f"{name} is {getattr(self, name)!r}; it must be True or False")

    def backoff_s(self, retry: int) -> float:
        """The longest pause before retry number *retry*, which counts from 1."""
        # 2 ** 64 is beyond every backoff_max; a larger power would not fit into a float.
        return min(self.backoff_max_s, self.backoff_base_s * 2.0 ** min(retry - 1, 64))

    @property
    def horizon_s(self) -> float:
        """
        The longest time from the first attempt to the last.

        The server must remember a key for longer than this. It is the deadline, because an attempt
        may last longer than `timeout` if the answer comes in many small parts.
        """
        return self.deadline_s if self.attempts_max > 1 else 0.0


# 408 and 425 ask for a retry, 429 and 5xx are transient. A 409 is decided by its problem.
RETRY_STATUSES = frozenset({408, 425, 429, *range(500, 600)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What one API expects of its clients: where the key is sent, how, and what is retried."""

    name: str
    # The header with the key; None: the key is sent in the JSON body.
    key_header: str | None = "Idempotency-Key"
    # The member of the JSON body with the key, where `key_header` is None.
    key_member: str | None = None
    # Whether the key is sent as a structured-field string, in quotes.
    is_quoted: bool = False
    key_chars_max: int = 255
    # Which methods carry a key.
    methods: Collection[str] = frozenset({"POST", "PATCH"})
    # Which statuses are retried when the answer has no better advice.
    retry_statuses: Collection[int] = RETRY_STATUSES
    # A response header that decides: "true" is retried, "false" is not.
    retry_header: str | None = None
    # The response header that marks a replay; None: the API has none.
    replayed_header: str | None = "Idempotent-Replayed"
    # How long the API publishes to remember a key; None: it does not publish a time.
    window: Duration | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if (self.key_header is None) == (self.key_member is None):
            raise Misconfigured("a preset needs key_header or key_member, and not both")
        for name in ("key_header", "retry_header", "replayed_header"):
            if getattr(self, name) is not None:
                header_name(getattr(self, name))
        _check_whole("key_chars_max", self.key_chars_max, 1, 255)
        set_(self, "methods", _methods(self.methods))
        set_(self, "retry_statuses", frozenset(self.retry_statuses))
        if self.window is not None:
            seconds("window", self.window)


class RetryBudget:
    """
    Limits the retries of a client while a server fails, so that retries do not add to its load.

    Every retry takes one token, and every final answer returns *refill* tokens. While no tokens are
    left, a call ends after its first attempt. Share one budget between the clients of one server.
    """

    __slots__ = ("_refill", "_tokens", "_tokens_max")

    # 100 tokens: enough for a burst of short failures. 0.1: in the long run one retry for ten calls
    # that end, as in gRPC and Finagle.
    def __init__(self, tokens_max: int = 100, refill: float = 0.1) -> None:
        _check_whole("tokens_max", tokens_max, 0, 1_000_000)
        if not 0 <= refill <= 1:
            raise Misconfigured(f"refill is {refill!r}; it must be a number from 0 to 1")
        self._tokens_max = float(tokens_max)
        self._tokens = float(tokens_max)
        self._refill = refill

    @property
    def tokens(self) -> float:
        """How many retries are left."""
        return self._tokens

    def take(self) -> bool:
        """Take the token of one retry; False if there is none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def give(self) -> None:
        """A call got a final answer."""
        if self._tokens < self._tokens_max:
            self._tokens = min(self._tokens_max, self._tokens + self._refill)


def seconds(name: str, value: Duration) -> float:
    """*value* in seconds; raises `Misconfigured`, with its *name*, if it is not a duration."""
    try:
        milliseconds = duration_ms(value)
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"{name}: {error}") from error
    if not 0 <= milliseconds <= DURATION_MS_MAX:
        raise Misconfigured(f"{name} is {value!r}; it must be from zero to a hundred years")
    return milliseconds / 1_000


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Misconfigured(f"{name} is {value!r}; it must be a whole number, {least} to {most}")


def _methods(values: Collection[str]) -> frozenset[str]:
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise Misconfigured(f"{values!r} is not a collection of methods, such as {{'POST'}}")
    return frozenset(value.upper() for value in values)
