"""coatcheck: idempotency keys done right. A retried write happens once.

Start reading at `coatcheck.core.lifecycle`; ARCHITECTURE.md is the map.
"""

from coatcheck.core.answers import DidNotHappen, Happened, Unknown
from coatcheck.core.client.plan import Plan, plan
from coatcheck.core.policy import Policy
from coatcheck.core.record import Record
from coatcheck.core.response import Response
from coatcheck.core.values import Codec, codec_for
from coatcheck.engine import AsyncEngine, Engine
from coatcheck.engine.resolution import Erased
from coatcheck.errors import (
    BodyNotRepeatable,
    ClaimLost,
    CoatcheckError,
    KeyBusy,
    KeyExpired,
    KeyRejected,
    KeyReused,
    LimitExceeded,
    Misconfigured,
    MissingExtra,
    NotCommitted,
    NotResolved,
    OutcomeUnknown,
    Refused,
    ResultUnavailable,
    Resumable,
    SagaBlocked,
    SagaUndone,
    StepFailed,
    StepInDoubt,
    StepsChanged,
    StoreUnavailable,
    Uncertain,
    Unreadable,
)
from coatcheck.keyring import KeyRing
from coatcheck.operation import (
    AsyncOperation,
    Operation,
    current_async_operation,
    current_operation,
)
from coatcheck.stores import open_async_store, open_store
from coatcheck.telemetry import Decision
from coatcheck.transactions.contract import InTransaction

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "AsyncOperation",
    "BodyNotRepeatable",
    "ClaimLost",
    "CoatcheckError",
    "Codec",
    "Decision",
    "DidNotHappen",
    "Engine",
    "Erased",
    "Happened",
    "InTransaction",
    "KeyBusy",
    "KeyExpired",
    "KeyRejected",
    "KeyReused",
    "KeyRing",
    "LimitExceeded",
    "Misconfigured",
    "MissingExtra",
    "NotCommitted",
    "NotResolved",
    "Operation",
    "OutcomeUnknown",
    "Plan",
    "Policy",
    "Record",
    "Refused",
    "Response",
    "ResultUnavailable",
    "Resumable",
    "SagaBlocked",
    "SagaUndone",
    "StepFailed",
    "StepInDoubt",
    "StepsChanged",
    "StoreUnavailable",
    "Uncertain",
    "Unknown",
    "Unreadable",
    "codec_for",
    "current_async_operation",
    "current_operation",
    "open_async_store",
    "open_store",
    "plan",
]
