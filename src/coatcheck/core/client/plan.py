"""Plans: does the server remember keys for long enough, and how much does it store?

A key must be remembered for longer than a client may retry; otherwise a late retry is executed
again. `plan` compares the two, and computes what a rate of requests needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from coatcheck.core.client.retry_policy import RetryPolicy, seconds
from coatcheck.core.policy import Duration, Policy
from coatcheck.errors import Misconfigured


class BytesPerKey(NamedTuple):
    """What a record takes in a store beside its response body, and with `compact=1`."""

    plain: int
    compact: int


# Measured by `make bench`; docs/stores.md has the same table, and a test compares the two.
BYTES_PER_KEY: Mapping[str, BytesPerKey] = {
    "sqlite": BytesPerKey(189, 153),
    "postgresql": BytesPerKey(268, 212),
    "mysql": BytesPerKey(453, 379),
    "redis": BytesPerKey(321, 290),
    "dynamodb": BytesPerKey(370, 316),
}
_ALIASES = {"postgres": "postgresql", "mariadb": "mysql", "rediss": "redis", "valkey": "redis"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy of a server and one of its clients mean together; times in seconds."""

    horizon_s: float  # from the first attempt of a client to its last
    window_s: float  # how long the server deduplicates retries
    margin_s: float
    retention_s: float  # how long a record is stored
    rate: float  # new keys a second
    store: str
    bytes_per_key: int
    response_bytes: int
    keys: int  # stored at any time
    bytes: int
    warnings: tuple[str, ...]

    @property
    def is_safe(self) -> bool:
        """Whether every retry of the client is inside the window."""
        return not self.warnings


def plan(
    policy: Policy | None = None,
    retry: RetryPolicy | Duration | None = None,
    *,
    rate: float = 0.0,
    store: str = "sqlite",
    response_bytes: int = 0,
    compact: bool = False,
) -> Plan:
    """
    Compare the window of a server with the retries of its clients, and compute the storage.

    Args:
        policy: of the routes; by default `Policy()`.
        retry: of the clients, or the time for which they retry; by default `RetryPolicy()`.
        rate: how many new keys arrive in a second.
        store: "sqlite", "postgresql", "mysql", "redis" or "dynamodb"; a URL of a store will do.
        response_bytes: the size of an average response body.
        compact: whether the store has `compact=1`.
    """
    policy = Policy() if policy is None else policy
    retry = RetryPolicy() if retry is None else retry
    believed_s = 0.0
    if isinstance(retry, RetryPolicy):
        horizon_s, believed_s = retry.horizon_s, retry.server_window_s
    else:
        horizon_s = seconds("retry", retry)
    name = store.partition(":")[0].partition("+")[0].lower()
    name = _ALIASES.get(name, name)
    if name not in BYTES_PER_KEY:
        known = ", ".join(BYTES_PER_KEY)
        raise Misconfigured(f"no sizes are known for the store {store!r}; choose one of {known}")
    for what, number in (("rate", rate), ("response_bytes", response_bytes)):
        if not 0 <= number < float("inf"):
            raise Misconfigured(f"{what} is {number!r}; it must be a number from 0 up")
    size = BYTES_PER_KEY[name]
    bytes_per_key = size.compact if compact else size.plain
    retention_s = policy.retention_ms / 1_000
    keys = round(rate * retention_s)
    return Plan(
        horizon_s=horizon_s,
        window_s=policy.window_ms / 1_000,
        margin_s=retention_s - policy.window_ms / 1_000,
        retention_s=retention_s,
        rate=rate,
        store=name,
        bytes_per_key=bytes_per_key,
        response_bytes=response_bytes,
        keys=keys,
        bytes=keys * (bytes_per_key + response_bytes),
        warnings=tuple(_warnings(policy, horizon_s, believed_s)),
    )


def _warnings(policy: Policy, horizon_s: float, believed_s: float) -> list[str]:
    window_s, margin_s = policy.window_ms / 1_000, (policy.retention_ms - policy.window_ms) / 1_000
    warnings = []
    if window_s < horizon_s + margin_s:
        warnings.append(
            f"the window ({duration(window_s)}) is shorter than the time for which clients retry "
            f"({duration(horizon_s)}) and a margin of {duration(margin_s)}: a late retry would be "
            "executed again; set a longer window, or a shorter deadline"
        )
    if believed_s > window_s:
        warnings.append(
            f"the clients believe that the server remembers keys for {duration(believed_s)}, but "
            f"the window is {duration(window_s)}: set server_window={policy.window!r} in their "
            "policy"
        )
    return warnings


def duration(seconds: float) -> str:
    """*seconds* in the largest unit that fits, such as "36 h"."""
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.4g} {unit}"
    return f"{seconds:.4g} s"


def plan_text(plan: Plan) -> str:
    """*plan* for people."""
    lines = [
        f"clients retry for     {duration(plan.horizon_s)}",
        (
            f"window of the server  {duration(plan.window_s)}, and a margin of "
            f"{duration(plan.margin_s)}"
        ),
        f"new keys              {plan.rate:,.6g} a second",
        f"keys stored           {plan.keys:,}",
        (
            f"storage               {_size(plan.bytes)} in {plan.store}: {plan.bytes_per_key} "
            f"bytes for a key and {plan.response_bytes} for its response"
        ),
    ]
    verdict = [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join([*lines, *(verdict or ["every retry is inside the window"])])


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1_000:
            return f"{count:.4g} {unit}"
        count /= 1_000
    return f"{count:,.4g} TB"
