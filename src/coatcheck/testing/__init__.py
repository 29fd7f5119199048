"""The test kit: what the tests of a guarded application need.

`pip install 'coatcheck[testing]'` registers the fixtures `idempotency_engine`,
`async_idempotency_engine`, `operation`, `lossy_network` and `crash_injector`, and the marker
`duplicated`. The assertions and classes here also work without them.
"""

from __future__ import annotations

from coatcheck.errors import MissingExtra

try:
    import pytest  # noqa: F401 - the extra, although only its plugin and its marker need it
except ImportError as error:
    raise MissingExtra("testing", "pytest") from error

from coatcheck.testing.apps import Request
from coatcheck.testing.engines import AsyncTimedEngine, AttemptKilled, Clock, TimedEngine
from coatcheck.testing.idempotent import assert_idempotent, assert_idempotent_async
from coatcheck.testing.network import AnswerLost, LossyNetwork, RequestLost
from coatcheck.testing.openapi import assert_every_unsafe_route_takes_a_key
from coatcheck.testing.operations import (
    kill_attempt,
    new_operation,
    next_attempt_of,
)

__all__ = [
    "AnswerLost",
    "AsyncTimedEngine",
    "AttemptKilled",
    "Clock",
    "LossyNetwork",
    "Request",
    "RequestLost",
    "TimedEngine",
    "assert_every_unsafe_route_takes_a_key",
    "assert_idempotent",
    "assert_idempotent_async",
    "kill_attempt",
    "new_operation",
    "next_attempt_of",
]
