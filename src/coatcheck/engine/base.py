"""What the sync and the async engine share: their settings and their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from coatcheck.core.callables import check_function
from coatcheck.core.flow import Flow
from coatcheck.core.policy import Policy, changed
from coatcheck.engine.attempts import Attempts
from coatcheck.engine.clock import StoreClock
from coatcheck.engine.recovery import Recovery
from coatcheck.engine.runner import running_loop
from coatcheck.engine.settings import (
    check_keyring,
    every,
    functions,
    policy_of,
    secret_of,
    service_name,
)
from coatcheck.engine.steps import StepWriter, UnrecordedSteps
from coatcheck.engine.sweeper import Archive, Sweeper
from coatcheck.engine.transactions import Database
from coatcheck.engine.waiters import Waiter
from coatcheck.stores.contract import Store
from coatcheck.stores.registry import info_of, is_compact, refuse_archive
from coatcheck.stores.transaction_statements import (
    TransactionStatements,
    no_transactions,
    transaction_statements_of,
)
from coatcheck.telemetry import Listener, Observer, Telemetry
from coatcheck.transactions.sources import ConnectionSource, connection_source

NOT_OBSERVED = (
    "mode='observe' is for HTTP requests: give this function policy=Policy(...) with another mode"
)


class EngineBase:
    """The parts of an engine; `Engine` and `AsyncEngine` run flows on them."""

    attempts: Attempts
    recovery: Recovery
    policy: Policy
    run_here: Callable[[Flow[Any]], Any]  # runs a flow; on an event loop its result is awaited
    is_started = False

    def _set_up(
        self,
        store: Store,
        *,
        secret: bytes | str,
        clock: Callable[[], int] | None,
        observers: Sequence[Observer],
        listeners: Sequence[Listener],
        sweep_every_s: float | None,
        archive: Archive | None,
        recover_every_s: float | None,
        service: str,
        new_waiter: Callable[[], Waiter],
        is_async: bool,
        run_steps: Callable[[Flow[Any]], Any],
    ) -> None:
        for name, function in (("clock", clock), ("archive", archive)):
            if function is not None:
                check_function(name, function)
        self.service = service_name(service)
        telemetry = Telemetry(functions("observers", observers), functions("listeners", listeners))
        self.attempts = Attempts(
            store,
            secret=secret_of(secret),
            clock=StoreClock(store, clock),
            telemetry=telemetry,
            new_waiter=new_waiter,
            is_async=is_async,
            running_loop=running_loop,
        )
        self.run_here = run_steps
        self.attempts.steps = StepWriter(self.attempts.now_ms, run_steps)
        self.attempts.unrecorded_steps = UnrecordedSteps(run_steps)
        self.recovery = Recovery(
            self.attempts, store, every_s=recover_every_s, service=self.service
        )
        self.sweeper = Sweeper(store, every("sweep_every_s", sweep_every_s), archive, telemetry)
        self.attempts.tasks.append(self.sweeper.tick)
        self._database: Database | None = None

    def _check(
        self,
        store: object,
        policy: Policy | str | None,
        *,
        archive: Archive | None,
        keyring: object,
        transactions: object,
    ) -> None:
        """Refuse wrong settings; *store* is a URL or a blocking store."""
        self.policy = policy_of(policy)
        self.is_compact = is_compact(store)
        if archive is not None:
            refuse_archive(store)
        check_keyring(keyring)
        self._transactions = None if transactions is None else connection_source(transactions)
        if transactions is not None or self.policy.mode == "transaction":
            info = info_of(store)
            if not isinstance(store, str):
                transaction_statements_of(store)
            elif info is not None and not info.transacts:
                raise no_transactions()

    def _close_threads(self) -> None:
        self.attempts.heartbeat.stop()
        self.sweeper.close()
        self.recovery.close()

    def database(self, given: object = None) -> Database:
        """Where connections for transaction mode come from: *given*, or the engine's own."""
        statements = transaction_statements_of(self._blocking_store())
        if given is not None:
            return Database(connection_source(given), statements)
        if self._database is None:
            source = self._transactions or self._own_connections(statements)
            self._database = Database(source, statements)
        return self._database

    def _blocking_store(self) -> Store:
        raise NotImplementedError

    def _own_connections(self, statements: TransactionStatements) -> ConnectionSource:
        raise NotImplementedError


@functools.lru_cache(maxsize=64)  # 64: an application has a few policies; making one takes long
def policy_in_transaction(policy: Policy) -> Policy:
    """*policy* in transaction mode."""
    if policy.mode == "transaction":
        return policy
    # A transaction needs the database in any case.
    return changed(policy, {"mode": "transaction", "on_outage": "refuse"})
