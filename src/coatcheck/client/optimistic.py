"""Optimistic actions: shown at once, sent by an outbox, and taken back if the server refuses.

`submit` stores an action and applies it. `settle` looks at what the outbox knows: it confirms what
is done, and reverts what was refused. Actions that build on each other share a lane; when one of
them is refused, the later ones are reverted first and applied again afterwards.

The functions change state that this process holds in memory. After a restart, `settle` applies to
the new state what is still open; the file of the outbox has the names of the functions and what
they are called with.
"""

from __future__ import annotations

import json as json_module
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from coatcheck.client.keys import key_of_reference
from coatcheck.client.outbox import Done, Outbox, Outcome, Refused, Ticket, outcome_of
from coatcheck.errors import Misconfigured

_SCHEMA = """
create table if not exists optimistic (
    id integer primary key autoincrement,
    key text not null unique,
    lane text not null,
    name text not null,
    given text not null
)
"""
# 10 s, as for the outbox in the same file.
_BUSY_S = 10.0


@dataclass(frozen=True, slots=True)
class _Functions:
    """What one kind of action does to the state of the application."""

    apply: Callable[[Any], object]
    revert: Callable[[Any], object]
    confirm: Callable[[Any, Done], object] | None


class _Stored(NamedTuple):
    """One action of the queue, as the file has it."""

    key: str
    lane: str
    name: str
    given: Any  # to the functions


class OptimisticQueue:
    """Actions of *outbox* that the application shows before the server has answered."""

    def __init__(self, outbox: Outbox) -> None:
        """
        Open the queue of an outbox; use one process and one thread for each queue.

        `register` the functions of each kind of action, then call `settle`.
        """
        self._outbox = outbox
        self._path = outbox._file.path  # noqa: SLF001 - the queue is a part of the outbox
        self._functions: dict[str, _Functions] = {}
        self._applied: dict[str, _Stored] = {}  # by key, in the order in which they were applied
        with self._connection() as connection:
            connection.execute(_SCHEMA)

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        try:
            connection.execute("pragma synchronous = full")
            yield connection
        finally:
            connection.close()

    def register(
        self,
        name: str,
        *,
        apply: Callable[[Any], object],
        revert: Callable[[Any], object],
        confirm: Callable[[Any, Done], object] | None = None,
    ) -> None:
        """
        Declare a kind of action.

        Args:
            name: finds the functions again after a restart.
            apply: changes the state, called with what `submit` was given.
            revert: takes back what `apply` changed.
            confirm: called with that and the answer when the server has done it.
        """
        if name in self._functions:
            raise Misconfigured(f"there are two optimistic actions named {name!r}")
        self._functions[name] = _Functions(apply, revert, confirm)

    def submit(
        self,
        name: str,
        method: str,
        url: str,
        *,
        json: object,
        given: object = None,
        lane: str | None = None,
        reference: str | None = None,
    ) -> Ticket:
        """
        Apply an action and store it; when this returns, a crash does not lose it.

        Args:
            name: the kind of action, as it was registered.
            method: such as "POST".
            url: the address, as the client takes it.
            json: the body, as a value.
            given: what the functions are called with, a value of JSON; by default the body.
            lane: actions that build on each other share a lane, and are sent in their order.
            reference: what the action is for: the same reference is the same action.
        """
        if name not in self._functions:
            raise Misconfigured(f"there is no optimistic action named {name!r}; register it first")
        settings = self._outbox._settings  # noqa: SLF001 - the queue is a part of the outbox
        key = settings.new_key() if reference is None else key_of_reference(reference)
        action = _Stored(key, lane or key, name, json if given is None else given)
        is_new = self._outcome(key) is None
        if is_new:
            self._apply(action)
        try:
            self._store(action)
            return self._outbox.submit(method, url, json=json, lane=action.lane, key=key)
        except BaseException:
            if is_new:
                self._revert(action)
                self._forget(action)
            raise

    def settle(self) -> None:
        """
        Make the state what the outbox knows: confirm, revert, and apply what is open.

        Call it after `outbox.drain()`, or now and then while `outbox.running()` sends; and once
        after a restart. An action whose outcome is unknown stays applied; `outbox.retry` sends it
        again, and `outbox.discard` reverts it.
        """
        stored = self._stored()
        if missing := {action.name for action in stored} - self._functions.keys():
            raise Misconfigured(f"register {', '.join(sorted(missing))} before settle()")
        for action in stored:
            outcome = self._outcome(action.key)
            is_applied = action.key in self._applied
            if outcome is None or isinstance(outcome, Done):
                self._forget(action)
            if isinstance(outcome, Done):
                confirm = self._functions[action.name].confirm
                if self._applied.pop(action.key, None) is not None and confirm is not None:
                    confirm(action.given, outcome)
            elif outcome is None or isinstance(outcome, Refused):
                if is_applied:
                    self._revert(action)
            elif not is_applied:
                self._apply(action)

    def _apply(self, action: _Stored) -> None:
        self._functions[action.name].apply(action.given)
        self._applied[action.key] = action

    def _revert(self, action: _Stored) -> None:
        """Take *action* back, after those that were applied to it; then apply these again."""
        applied = list(self._applied.values())
        position = applied.index(action)
        later = [other for other in applied[position + 1 :] if other.lane == action.lane]
        for other in reversed(later):
            self._functions[other.name].revert(other.given)
        del self._applied[action.key]
        self._functions[action.name].revert(action.given)
        for other in later:
            self._functions[other.name].apply(other.given)

    # --------------------------------------------------------------------------------- the file

    def _outcome(self, key: str) -> Outcome | None:
        stored = self._outbox._file.get(key)  # noqa: SLF001 - the queue is a part of the outbox
        return None if stored is None else outcome_of(stored)

    def _stored(self) -> list[_Stored]:
        with self._connection() as connection:
            rows = connection.execute("select key, lane, name, given from optimistic order by id")
            return [
                _Stored(key, lane, name, json_module.loads(given))
                for key, lane, name, given in rows
            ]

    def _store(self, action: _Stored) -> None:
        row = (action.key, action.lane, action.name, json_module.dumps(action.given))
        with self._connection() as connection:
            connection.execute(
                "insert into optimistic (key, lane, name, given) values (?, ?, ?, ?)"
                " on conflict (key) do nothing",
                row,
            )

    def _forget(self, action: _Stored) -> None:
        with self._connection() as connection:
            connection.execute("delete from optimistic where key = ?", (action.key,))
