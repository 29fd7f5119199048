"""The report of `coatcheck plan`: whether the window is long enough, and what a rate stores."""

from __future__ import annotations

import dataclasses
from typing import Any

from coatcheck.core.client.plan import Plan, plan, plan_text
from coatcheck.core.policy import Duration, Policy


def plan_report(
    *,
    window: Duration = "24h",
    margin: Duration = "1h",
    horizon: Duration = "60s",
    rate: float = 0.0,
    store: str = "sqlite",
    response_bytes: int = 0,
    compact: bool = False,
) -> tuple[Plan, str]:
    """
    Return the plan for these settings, and the same as text.

    *horizon* is how long clients retry: the deadline of their policy.
    """
    made = plan(
        Policy(window=window, margin=margin),
        horizon,
        rate=rate,
        store=store,
        response_bytes=response_bytes,
        compact=compact,
    )
    return made, plan_text(made)


def plan_document(made: Plan) -> dict[str, Any]:
    """Return *made* for `--json`."""
    return {**dataclasses.asdict(made), "is_safe": made.is_safe}
