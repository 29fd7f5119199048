"""Optimistic actions: shown at once, sent by an outbox, and taken back if the server refuses.

`submit` stores an action and applies it. `settle` looks at what the outbox knows: it confirms what
is done, and reverts what was refused. Actions that build on each other share a lane; when one of
them is refused, the later ones are reverted first and applied again afterwards.

The functions change state that this process holds in memory. After a restart, `settle` applies to
the new state what is still open; the outbox has stored the names of the functions and what
they are called with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from coatcheck.client.outbox import AsyncOutbox, AsyncTicket, Done, Outbox, Ticket
from coatcheck.client.outbox_store import Stored
from coatcheck.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class _Functions:
    """What one kind of action does to the state of the application."""

    apply: Callable[[Any], object]
    revert: Callable[[Any], object]
    confirm: Callable[[Any, Done], object] | None


class _Applied(NamedTuple):
    """One action that the state shows."""

    key: str
    lane: str
    name: str
    given: Any  # to the functions


class _Base:
    """What the queues for threads and for event loops have in common: the functions, and order."""

    def __init__(self) -> None:
        self._functions: dict[str, _Functions] = {}
        self._applied: dict[str, _Applied] = {}  # by key, in the order in which they were applied

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

    def _check(self, name: str) -> None:
        if name not in self._functions:
            raise Misconfigured(f"there is no optimistic action named {name!r}; register it first")

    def _settle(self, stored: list[Stored]) -> Iterable[str]:
        """Make the state what *stored* says; yields the keys of the actions that are settled."""
        if missing := {action.memo["name"] for action in stored} - self._functions.keys():
            raise Misconfigured(f"register {', '.join(sorted(missing))} before settle()")
        known = {action.key for action in stored}
        for gone in [applied for key, applied in self._applied.items() if key not in known]:
            self._revert(gone)  # it was discarded
        for action in stored:
            applied = self._applied.get(action.key)
            if action.state == "done":
                assert action.answer is not None
                yield action.key  # first: what `confirm` does is not done twice
                if applied is not None:
                    del self._applied[action.key]
                    confirm = self._functions[applied.name].confirm
                    if confirm is not None:
                        confirm(applied.given, Done(action.answer))
            elif action.state == "refused":
                if applied is not None:
                    self._revert(applied)
            elif applied is None:
                memo = action.memo
                self._apply(_Applied(action.key, action.lane, memo["name"], memo["given"]))

    def _apply(self, action: _Applied) -> None:
        self._functions[action.name].apply(action.given)
        self._applied[action.key] = action

    def _revert(self, action: _Applied) -> None:
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


class OptimisticQueue(_Base):
    """Actions of *outbox* that the application shows before the server has answered."""

    def __init__(self, outbox: Outbox) -> None:
        """
        Open the queue of an outbox; use one process and one thread for each queue.

        `register` the functions of each kind of action, then call `settle`.
        """
        super().__init__()
        self._outbox = outbox

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
        self._check(name)
        key = self._outbox.key_of(reference)
        action = _Applied(key, lane or key, name, json if given is None else given)
        memo = {"name": name, "given": action.given}
        is_new = key not in self._applied and self._outbox.store.state_of(key) is None
        if is_new:
            self._apply(action)
        try:
            return self._outbox.submit(method, url, json=json, lane=action.lane, key=key, memo=memo)
        except BaseException:
            if is_new:
                self._revert(action)
            raise

    def settle(self) -> None:
        """
        Make the state what the outbox knows: confirm, revert, and apply what is open.

        Call it after `outbox.drain()`, or now and then while `outbox.running()` sends; and once
        after a restart. An action whose outcome is unknown stays applied; `outbox.retry` sends it
        again, and `outbox.discard` reverts it.
        """
        for key in self._settle(self._outbox.store.with_memo()):
            self._outbox.store.clear_memo(key)


class AsyncOptimisticQueue(_Base):
    """
    The same for an `AsyncOutbox`; use one event loop for each queue.

    The functions are not async: they change state in memory.
    """

    def __init__(self, outbox: AsyncOutbox) -> None:
        """Open the queue of an outbox; `register` the functions, then await `settle`."""
        super().__init__()
        self._outbox = outbox
        self._mutex = asyncio.Lock()  # `settle` would revert an action that is not stored yet

    async def submit(
        self,
        name: str,
        method: str,
        url: str,
        *,
        json: object,
        given: object = None,
        lane: str | None = None,
        reference: str | None = None,
    ) -> AsyncTicket:
        """Apply an action and store it; see `OptimisticQueue.submit`."""
        self._check(name)
        outbox = self._outbox
        key = outbox.key_of(reference)
        action = _Applied(key, lane or key, name, json if given is None else given)
        memo = {"name": name, "given": action.given}
        async with self._mutex:
            state = await asyncio.to_thread(outbox.store.state_of, key)
            is_new = key not in self._applied and state is None
            if is_new:
                self._apply(action)
            try:
                return await outbox.submit(
                    method, url, json=json, lane=action.lane, key=key, memo=memo
                )
            except BaseException:
                if is_new:
                    self._revert(action)
                raise

    async def settle(self) -> None:
        """Make the state what the outbox knows; see `OptimisticQueue.settle`."""
        store = self._outbox.store
        async with self._mutex:
            for key in self._settle(await asyncio.to_thread(store.with_memo)):
                await asyncio.to_thread(store.clear_memo, key)
