"""Sagas: several actions that all happen, or whose effects are all undone.

A saga is one operation of the engine: a registered function whose input is stored, and whose steps
are recorded. Undoing is a second phase of the same operation, and its answer is stored like any
other. `core/saga/` has the decisions, `run` one run of a saga, `sagas` what applications call.
"""

from __future__ import annotations

from coatcheck.core.saga.actions import Failure, Retry
from coatcheck.core.saga.view import SagaRun, SagaStep
from coatcheck.errors import SagaBlocked, SagaUndone, StepFailed
from coatcheck.saga.function import SagaFunction
from coatcheck.saga.run import AsyncSaga, Saga
from coatcheck.saga.sagas import Sagas

__all__ = [
    "AsyncSaga",
    "Failure",
    "Retry",
    "Saga",
    "SagaBlocked",
    "SagaFunction",
    "SagaRun",
    "SagaStep",
    "SagaUndone",
    "Sagas",
    "StepFailed",
]
