"""An outbox: actions that survive a crash of the client.

`submit` returns when the key and the request are on disk. A sender, in this process or another,
sends each action until the answer is definite: in order within a lane, at the same time across
lanes. After a crash or a reboot the next sender continues, with the same keys.

`Outbox` sends in threads and `AsyncOutbox` on an event loop; `outbox_base.py` has the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast

from coatcheck.client.outbox_base import (
    Headers,
    OutboxBase,
    Request,
    log_outage,
    log_probe_failure,
    response_of,
)
from coatcheck.client.outbox_store import Stored
from coatcheck.client.outcomes import Done, Outcome, Pending, Refused, SendAgain, Unknown
from coatcheck.core.client.outbox import Entry
from coatcheck.core.policy import Duration

__all__ = [
    "AsyncOutbox",
    "AsyncTicket",
    "Done",
    "Outbox",
    "Outcome",
    "Pending",
    "Refused",
    "SendAgain",
    "Ticket",
    "Unknown",
]

# How often `outcome` looks into the database, and a sender for new actions of other processes.
LOOK_S = 0.05
IDLE_S = 0.5


class Ticket:
    """One action of an `Outbox`."""

    def __init__(self, outbox: Outbox, key: str) -> None:
        self._outbox = outbox
        self.key = key

    def result(self, timeout: float = 0.0) -> Outcome:
        """What is known of the action; waits for up to *timeout* seconds while it is pending."""
        return self._outbox.outcome(self.key, timeout)


class Outbox(OutboxBase):
    """Actions on disk, sent by threads; *client* is one of httpx2, httpx or requests."""

    _is_async = False

    def submit(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        lane: str | None = None,
        key: str | None = None,
        reference: str | None = None,
        memo: object = None,
    ) -> Ticket:
        """
        Store an action; when this returns, a crash does not lose it.

        Args:
            method: such as "POST".
            url: the address, as the client takes it.
            json: the body, as a value.
            content: the body, as bytes.
            headers: without credentials, because they are stored; see `sign`.
            lane: actions of one lane are sent in their order, each after the one before it ended.
            key: the key; by default a new one.
            reference: what the action is for: the same reference is the same action.
            memo: a value of JSON that is stored with it, for an `OptimisticQueue`.
        """
        entry = self._entry(Request(method, url, json, content, headers, lane, key, reference))
        self.store.add(entry, memo)
        return Ticket(self, entry.key)

    def drain(self) -> int:
        """Send all actions that are due; returns how many calls were made."""
        return self._work(None)

    def _work(self, stopping: threading.Event | None) -> int:
        """Send what is due, until there is nothing, or until *stopping* is set."""
        calls = 0
        with ThreadPoolExecutor(self._workers, "coatcheck-outbox") as pool:
            flying: set[Future[None]] = set()
            while True:
                is_stopping = stopping is not None and stopping.is_set()
                entry = None
                if not is_stopping and len(flying) < self._workers:
                    entry = self._take()
                if entry is not None:
                    flying.add(pool.submit(self._send, entry))
                    calls += 1
                elif flying:  # one that ends may let the next of its lane go
                    ended, flying = wait(flying, IDLE_S, FIRST_COMPLETED)
                    for future in ended:
                        future.result()
                elif stopping is None or is_stopping:
                    return calls
                else:
                    stopping.wait(IDLE_S)

    def _send(self, entry: Entry) -> None:
        if entry.state == "unknown":
            self._look_for(entry)
            return
        action = self._action(entry)
        try:
            signed = self._sign(entry.method, entry.url, entry.body) if self._sign else {}
            options = self._options(entry, cast("Headers", signed))
            response = action.request(entry.method, entry.url, **options)
            answer = response_of(response, response.content)
        except Exception as error:  # noqa: BLE001 - stored, and sent again
            self._failed(entry, action, error)
            return
        assert action.result is not None
        self._settle(entry, action.result, answer)

    def _look_for(self, entry: Entry) -> None:
        stored = self._to_look_for(entry)
        found: object = None
        try:
            assert self._probe is not None
            found = self._probe(stored)
        except Exception as error:  # noqa: BLE001 - logged, and asked again
            log_probe_failure(entry, error)
        self._found(entry, stored.reason, found)

    @contextmanager
    def running(self) -> Iterator[Outbox]:
        """Send in the background while the block runs; at its end, calls in flight are awaited."""
        stopping = threading.Event()

        def work() -> None:
            while not stopping.is_set():
                try:
                    self._work(stopping)
                except Exception as error:  # noqa: BLE001 - logged, and the sender goes on
                    log_outage(error)
                    stopping.wait(IDLE_S)

        sender = threading.Thread(target=work, name="coatcheck-outbox")
        sender.start()
        try:
            yield self
        finally:
            stopping.set()
            sender.join()

    def outcome(self, key: str, timeout: float = 0.0) -> Outcome:
        """
        What is known of the action with this *key*, in whichever process it was submitted.

        Waits for up to *timeout* seconds while it is pending.
        """
        clock = self._settings.clock
        until_s = clock.monotonic_s() + timeout
        while clock.monotonic_s() < until_s and self._is_pending(key):
            clock.sleep(LOOK_S)
        return self._outcome(key)

    def dead_letters(self) -> list[Stored]:
        """The actions that were refused or are unknown, the oldest first."""
        return self.store.dead()

    def retry(self, key: str, *, did_not_happen: bool = False, new_key: bool = False) -> bool:
        """
        Send a refused or unknown action again, with its key; False if there is none.

        Args:
            key: the key of the action.
            did_not_happen: you know that it did not happen; otherwise an action that is older than
                the window of the server becomes unknown again.
            new_key: send it with a new key; if it did happen, it happens twice.
        """
        return self._send_again(key, did_not_happen=did_not_happen, new_key=new_key)

    def discard(self, key: str) -> bool:
        """
        Delete an action, so that its lane continues.

        False if there is none, if it is done, or if it is being sent.
        """
        return self._discard(key)

    def forget(self, older_than: Duration = "7d") -> int:
        """Delete the actions that were done longer ago; returns their number."""
        return self._forget(older_than)


class AsyncTicket:
    """One action of an `AsyncOutbox`."""

    def __init__(self, outbox: AsyncOutbox, key: str) -> None:
        self._outbox = outbox
        self.key = key

    async def result(self, timeout: float = 0.0) -> Outcome:  # noqa: ASYNC109 - as in `Ticket`
        """What is known of the action; waits for up to *timeout* seconds while it is pending."""
        return await self._outbox.outcome(self.key, timeout)


class AsyncOutbox(OutboxBase):
    """
    Actions on disk, sent by tasks; *client* is an `AsyncClient` or a `ClientSession`.

    It waits for the database in threads, so that the event loop goes on.
    """

    _is_async = True

    async def submit(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        lane: str | None = None,
        key: str | None = None,
        reference: str | None = None,
        memo: object = None,
    ) -> AsyncTicket:
        """Store an action; when this returns, a crash does not lose it; see `Outbox.submit`."""
        entry = self._entry(Request(method, url, json, content, headers, lane, key, reference))
        await asyncio.to_thread(self.store.add, entry, memo)
        return AsyncTicket(self, entry.key)

    async def drain(self) -> int:
        """Send all actions that are due; returns how many calls were made."""
        return await self._work(None)

    async def _work(self, stopping: asyncio.Event | None) -> int:
        """Send what is due, until there is nothing, or until *stopping* is set."""
        calls, flying = 0, set[asyncio.Task[None]]()
        try:
            while True:
                is_stopping = stopping is not None and stopping.is_set()
                entry = None
                if not is_stopping and len(flying) < self._workers:
                    entry = await asyncio.to_thread(self._take)
                if entry is not None:
                    flying.add(asyncio.create_task(self._send(entry)))
                    calls += 1
                elif flying:  # one that ends may let the next of its lane go
                    ended, flying = await asyncio.wait(
                        flying, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        task.result()
                elif stopping is None or is_stopping:
                    return calls
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), IDLE_S)
        finally:  # a cancelled caller sends nothing more; the leases of these calls expire
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def _send(self, entry: Entry) -> None:
        if entry.state == "unknown":
            await self._look_for(entry)
            return
        action = self._action(entry)
        try:
            options = self._options(entry, await self._signed(entry))
            response = await action.request(entry.method, entry.url, **options)
            body = response.content if "content" in options else await response.read()
            answer = response_of(response, body)
        except Exception as error:  # noqa: BLE001 - stored, and sent again
            await asyncio.to_thread(self._failed, entry, action, error)
            return
        assert action.result is not None
        await asyncio.to_thread(self._settle, entry, action.result, answer)

    async def _signed(self, entry: Entry) -> Headers:
        if self._sign is None:
            return {}
        # In a thread: one that is not async may ask another server for a token.
        signed = await asyncio.to_thread(self._sign, entry.method, entry.url, entry.body)
        return await signed if inspect.isawaitable(signed) else signed

    async def _look_for(self, entry: Entry) -> None:
        stored = await asyncio.to_thread(self._to_look_for, entry)
        found: Any = None
        try:
            assert self._probe is not None
            found = await asyncio.to_thread(self._probe, stored)
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:  # noqa: BLE001 - logged, and asked again
            log_probe_failure(entry, error)
        await asyncio.to_thread(self._found, entry, stored.reason, found)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncOutbox]:
        """Send in the background while the block runs; at its end, calls in flight are awaited."""
        stopping = asyncio.Event()

        async def work() -> None:
            while not stopping.is_set():
                try:
                    await self._work(stopping)
                except Exception as error:  # noqa: BLE001 - as in `Outbox`
                    log_outage(error)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), IDLE_S)

        sender = asyncio.create_task(work(), name="coatcheck-outbox")
        try:
            yield self
        finally:
            stopping.set()
            await sender

    async def outcome(self, key: str, timeout: float = 0.0) -> Outcome:  # noqa: ASYNC109 - as in `Outbox`
        """What is known of the action with this *key*; see `Outbox.outcome`."""
        clock = self._settings.clock
        until_s = clock.monotonic_s() + timeout
        while clock.monotonic_s() < until_s and await asyncio.to_thread(self._is_pending, key):
            await clock.async_sleep(LOOK_S)
        return await asyncio.to_thread(self._outcome, key)

    async def dead_letters(self) -> list[Stored]:
        """The actions that were refused or are unknown, the oldest first."""
        return await asyncio.to_thread(self.store.dead)

    async def retry(self, key: str, *, did_not_happen: bool = False, new_key: bool = False) -> bool:
        """Send a refused or unknown action again; see `Outbox.retry`."""
        return await asyncio.to_thread(
            self._send_again, key, did_not_happen=did_not_happen, new_key=new_key
        )

    async def discard(self, key: str) -> bool:
        """Delete an action, so that its lane continues; see `Outbox.discard`."""
        return await asyncio.to_thread(self._discard, key)

    async def forget(self, older_than: Duration = "7d") -> int:
        """Delete the actions that were done longer ago; returns their number."""
        return await asyncio.to_thread(self._forget, older_than)
