"""An outbox: actions that survive a crash of the client.

`submit` returns when the key and the request are on disk. A sender, in this process or another,
sends each action until the answer is definite: in order within a lane, at the same time across
lanes. After a crash or a reboot the next sender continues, with the same keys.
"""

from __future__ import annotations

import asyncio
import json as json_module
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from coatcheck.client.call import Action, result_of
from coatcheck.client.keys import checked_key, key_of_reference
from coatcheck.client.outbox_file import OutboxFile, Stored
from coatcheck.client.settings import Settings
from coatcheck.core.client.outbox import TOO_LATE, Entry, Verdict, is_too_late, pause_ms, verdict_of
from coatcheck.core.client.retry_policy import seconds
from coatcheck.core.client.send import Result
from coatcheck.core.policy import Duration
from coatcheck.core.response import Response
from coatcheck.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Done:
    """It happened."""

    response: Response


@dataclass(frozen=True, slots=True)
class Refused:
    """It did not happen: the server refused it."""

    response: Response


@dataclass(frozen=True, slots=True)
class Pending:
    """It has no definite answer yet, and is sent again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have happened; a person has to find out. *response* is the last answer, if any."""

    reason: str
    response: Response | None = None


Outcome: TypeAlias = Done | Refused | Pending | Unknown
# Returns headers for a request that is about to be sent, such as `Authorization`.
Sign: TypeAlias = Callable[[str, str, bytes], Mapping[str, str]]

# How often `result` looks into the file, and a sender for new actions of other processes.
LOOK_S = 0.05
IDLE_S = 0.5
# 8: enough to keep a connection pool busy.
WORKERS = 8
# How much longer a lease lasts than the longest call: another process waits for so long before it
# takes over.
LEASE_MARGIN_S = 30.0


class _Base:
    """What the outboxes for threads and for event loops have in common."""

    def __init__(
        self,
        url: str,
        *,
        client: Any,
        server_window: Duration = "24h",
        sign: Sign | None = None,
        workers: int = WORKERS,
    ) -> None:
        """
        Open an outbox.

        Args:
            url: the file, `sqlite:///outbox.db`.
            client: a client of `coatcheck.client`, which sends.
            server_window: how long the server remembers keys; an action that has no answer by then
                is `Unknown`.
            sign: returns headers with credentials, which are never stored; called with the method,
                the URL and the body before each call.
            workers: how many actions are sent at the same time.
        """
        settings = getattr(client, "_coatcheck", None)
        if not isinstance(settings, Settings):
            raise Misconfigured("client must be a client of coatcheck.client, which retries safely")
        self._window_ms = round(seconds("server_window", server_window) * 1_000)
        self._horizon_ms = round(settings.retry.horizon_s * 1_000)
        if self._window_ms <= self._horizon_ms:
            raise Misconfigured(
                f"server_window ({server_window!r}) is not longer than the deadline of the client"
            )
        if workers < 1:
            raise Misconfigured(f"workers is {workers!r}; it must be 1 or more")
        self._settings, self._client, self._sign = settings, client, sign
        self._workers = workers
        self._lease_ms = round((settings.retry.deadline_s + LEASE_MARGIN_S) * 1_000)
        self._file = OutboxFile(url)
        self._is_stopping = False

    def _now_ms(self) -> int:
        return round(self._settings.clock.wall_s() * 1_000)

    def _entry(self, method: str, url: str, given: dict[str, Any]) -> Entry:
        """The action that the arguments of `submit` describe."""
        json, content, headers = given["json"], given["content"], dict(given["headers"] or {})
        if json is not None and content is not None:
            raise Misconfigured("submit takes json= or content=, and not both")
        body = content or b""
        if json is not None:
            body = json_module.dumps(json).encode()
            headers.setdefault("Content-Type", "application/json")
        if given["key"] is not None and given["reference"] is not None:
            raise Misconfigured("submit takes key= or reference=, and not both")
        if given["key"] is not None:
            key = checked_key(given["key"], self._settings.preset)
        elif given["reference"] is not None:
            key = key_of_reference(given["reference"])
        else:
            key = self._settings.new_key()
        lane = key if given["lane"] is None else given["lane"]
        pairs = tuple((str(name), str(value)) for name, value in headers.items())
        return Entry(0, key, lane, method.upper(), url, pairs, body, None, 0)

    def _take(self) -> Entry | None:
        """The next action to send; those that are too old become unknown."""
        while not self._is_stopping:
            now_ms = self._now_ms()
            entry = self._file.take(now_ms, self._lease_ms)
            if entry is None or not is_too_late(entry, now_ms, self._window_ms, self._horizon_ms):
                return entry
            self._file.end(entry, TOO_LATE, None, now_ms)
        return None

    def _options(self, entry: Entry) -> dict[str, Any]:
        headers = dict(entry.headers)
        if self._sign is not None:
            headers.update(self._sign(entry.method, entry.url, entry.body))
        return {"headers": headers, "content": entry.body}

    def _action(self, entry: Entry) -> Action[Any]:
        action: Action[Any] = self._client.action(key=entry.key)
        return action

    def _settle(self, entry: Entry, result: Result, answer: Response | None) -> None:
        """Store what came of a call."""
        now_ms = self._now_ms()
        verdict = verdict_of(entry, result, answer and answer.status)
        if verdict.state == "pending":
            wait_ms = pause_ms(entry.calls, self._settings.clock.random())
            self._file.put_off(entry, verdict, now_ms + wait_ms)
        else:
            self._file.end(entry, verdict, answer, now_ms)

    def _failed(self, entry: Entry, error: Exception) -> None:
        """Store what came of a call that raised *error*; one that is not of the network, again."""
        result = result_of(error)
        if result is None:  # the request cannot be sent, or `sign` failed
            wait_ms = pause_ms(entry.calls, self._settings.clock.random())
            verdict = Verdict("pending", f"{type(error).__name__}: {error}")
            self._file.put_off(entry, verdict, self._now_ms() + wait_ms)
            return
        self._settle(entry, result, None)

    def outcome(self, key: str) -> Outcome:
        """What is known of the action with this *key*, in whichever process it was submitted."""
        stored = self._file.get(key)
        if stored is None:
            raise Misconfigured("the outbox has no action with this key; it may be forgotten")
        return outcome_of(stored)

    def dead_letters(self) -> list[Stored]:
        """The actions that were refused or are unknown, the oldest first."""
        return self._file.dead()

    def retry(self, key: str) -> bool:
        """
        Send a refused or unknown action again, with its key; False if there is none.

        If it is older than the window of the server, it becomes unknown again: find out what
        happened, `discard` it, and submit a new action where that is right.
        """
        return self._file.again(key, self._now_ms())

    def discard(self, key: str) -> bool:
        """Delete a refused or unknown action, so that its lane continues; False if none."""
        return self._file.discard(key)

    def forget(self, older_than: Duration = "7d") -> int:
        """Delete the actions that were done longer ago; returns their number."""
        age_ms = round(seconds("older_than", older_than) * 1_000)
        return self._file.forget(self._now_ms() - age_ms)


def outcome_of(stored: Stored) -> Outcome:
    """What the file says of one action."""
    match stored.state:
        case "done":
            assert stored.answer is not None
            return Done(stored.answer)
        case "refused":
            assert stored.answer is not None
            return Refused(stored.answer)
        case "unknown":
            return Unknown(stored.reason, stored.answer)
        case _:
            return Pending()


def _response_of(response: Any, body: bytes) -> Response:
    status = getattr(response, "status_code", None) or response.status
    headers = [
        (str(name).lower().encode("latin-1"), str(value).encode("latin-1"))
        for name, value in response.headers.items()
    ]
    return Response(status, headers, body)


class Ticket:
    """One action of an `Outbox`."""

    def __init__(self, outbox: Outbox, key: str) -> None:
        self._outbox = outbox
        self.key = key

    def result(self, timeout: float = 0.0) -> Outcome:
        """What is known of the action; waits for up to *timeout* seconds while it is pending."""
        clock = self._outbox._settings.clock  # noqa: SLF001 - the ticket is a part of the outbox
        until_s = clock.monotonic_s() + timeout
        while True:
            outcome = self._outbox.outcome(self.key)
            if not isinstance(outcome, Pending) or clock.monotonic_s() >= until_s:
                return outcome
            clock.sleep(LOOK_S)


class Outbox(_Base):
    """Actions on disk, sent by threads; *client* is one of httpx2, httpx or requests."""

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
        """
        given = {
            "json": json,
            "content": content,
            "headers": headers,
            "lane": lane,
            "key": key,
            "reference": reference,
        }
        entry = self._entry(method, url, given)
        self._file.add(entry, self._now_ms())
        return Ticket(self, entry.key)

    def drain(self) -> int:
        """Send all actions that are due; returns how many calls were made."""
        if self._workers == 1:
            return self._drain_one_by_one()
        with ThreadPoolExecutor(self._workers, "coatcheck-outbox") as pool:
            sent = [pool.submit(self._drain_one_by_one) for _ in range(self._workers)]
            return sum(future.result() for future in sent)

    def _drain_one_by_one(self) -> int:
        calls = 0
        while (entry := self._take()) is not None:
            self._send(entry)
            calls += 1
        return calls

    def _send(self, entry: Entry) -> None:
        action = self._action(entry)
        try:
            options = self._options(entry)
            if not hasattr(self._client, "build_request"):  # of httpx; requests says data=
                options["data"] = options.pop("content")
            response = action.request(entry.method, entry.url, **options)
        except Exception as error:  # noqa: BLE001 - stored, and sent again
            self._failed(entry, error)
            return
        assert action.result is not None
        self._settle(entry, action.result, _response_of(response, response.content))

    @contextmanager
    def running(self) -> Iterator[Outbox]:
        """Send in the background while the block runs; at its end, calls in flight are awaited."""
        stopping = threading.Event()

        def work() -> None:
            while not stopping.is_set():
                if self.drain() == 0:
                    stopping.wait(IDLE_S)

        sender = threading.Thread(target=work, name="coatcheck-outbox")
        sender.start()
        try:
            yield self
        finally:
            self._is_stopping = True
            stopping.set()
            sender.join()
            self._is_stopping = False


class AsyncTicket:
    """One action of an `AsyncOutbox`."""

    def __init__(self, outbox: AsyncOutbox, key: str) -> None:
        self._outbox = outbox
        self.key = key

    async def result(self, timeout: float = 0.0) -> Outcome:  # noqa: ASYNC109 - as in `Ticket`
        """What is known of the action; waits for up to *timeout* seconds while it is pending."""
        clock = self._outbox._settings.clock  # noqa: SLF001 - the ticket is a part of the outbox
        until_s = clock.monotonic_s() + timeout
        while True:
            outcome = await asyncio.to_thread(self._outbox.outcome, self.key)
            if not isinstance(outcome, Pending) or clock.monotonic_s() >= until_s:
                return outcome
            await clock.async_sleep(LOOK_S)


class AsyncOutbox(_Base):
    """Actions on disk, sent by tasks; *client* is an `AsyncClient` or a `ClientSession`."""

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
    ) -> AsyncTicket:
        """Store an action; when this returns, a crash does not lose it; see `Outbox.submit`."""
        given = {
            "json": json,
            "content": content,
            "headers": headers,
            "lane": lane,
            "key": key,
            "reference": reference,
        }
        entry = self._entry(method, url, given)
        await asyncio.to_thread(self._file.add, entry, self._now_ms())
        return AsyncTicket(self, entry.key)

    async def drain(self) -> int:
        """Send all actions that are due; returns how many calls were made."""
        return sum(await asyncio.gather(*(self._drain_one() for _ in range(self._workers))))

    async def _drain_one(self) -> int:
        calls = 0
        while (entry := await asyncio.to_thread(self._take)) is not None:
            await self._send(entry)
            calls += 1
        return calls

    async def _send(self, entry: Entry) -> None:
        action = self._action(entry)
        try:
            options = self._options(entry)
            is_httpx = hasattr(self._client, "build_request")
            if not is_httpx:  # aiohttp says data=
                options["data"] = options.pop("content")
            response = await action.request(entry.method, entry.url, **options)
            body = response.content if is_httpx else await response.read()
        except Exception as error:  # noqa: BLE001 - stored, and sent again
            await asyncio.to_thread(self._failed, entry, error)
            return
        assert action.result is not None
        answer = _response_of(response, body)
        await asyncio.to_thread(self._settle, entry, action.result, answer)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncOutbox]:
        """Send in the background while the block runs; at its end, calls in flight are awaited."""
        stopping = asyncio.Event()

        async def work() -> None:
            while not stopping.is_set():
                if await self.drain() == 0:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), IDLE_S)

        sender = asyncio.create_task(work(), name="coatcheck-outbox")
        try:
            yield self
        finally:
            self._is_stopping = True
            stopping.set()
            await sender
            self._is_stopping = False
