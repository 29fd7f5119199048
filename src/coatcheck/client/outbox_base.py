"""What the outboxes for threads and for event loops have in common: all but the sending.

A sender takes an action, sends it with its client, and stores what came of it. The methods here do
the first and the last step; they wait for the database, so an event loop calls them in threads.
"""

from __future__ import annotations

import inspect
import json as json_module
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

from coatcheck.client.call import Action, Actions
from coatcheck.client.keys import checked_key, key_of_reference
from coatcheck.client.outbox_store import OutboxStore, Stored, open_outbox
from coatcheck.client.outcomes import Done, Found, Outcome, Refused, SendAgain, outcome_of
from coatcheck.core.client.outbox import (
    Entry,
    Verdict,
    limited,
    pause_ms,
    too_late,
    verdict_of,
)
from coatcheck.core.client.retry_policy import seconds
from coatcheck.core.client.send import Result, result_of
from coatcheck.core.key import redacted
from coatcheck.core.policy import Duration
from coatcheck.core.response import Response
from coatcheck.errors import Misconfigured, StoreUnavailable
from coatcheck.keyring import KeyRing

logger = logging.getLogger("coatcheck")

Headers: TypeAlias = Mapping[str, str]
# Returns headers for a request that is about to be sent, such as `Authorization`.
Sign: TypeAlias = Callable[[str, str, bytes], Headers | Awaitable[Headers]]
# Finds out what came of an action.
Probe: TypeAlias = Callable[[Stored], Found | Awaitable[Found]]

# 8: enough to keep a connection pool busy.
WORKERS = 8
# How much longer a lease lasts than the longest call: another process waits for so long before it
# takes over.
LEASE_MARGIN_S = 30.0
# Headers that are credentials whatever the API is.
_CREDENTIALS = frozenset({"authorization", "proxy-authorization", "cookie"})


class Request(NamedTuple):
    """The arguments of `submit`."""

    method: str
    url: str
    json: object
    content: bytes | None
    headers: Headers | None
    lane: str | None
    key: str | None
    reference: str | None


class OutboxBase:
    """An outbox without its sender."""

    _is_async: ClassVar[bool]

    def __init__(
        self,
        url: str,
        *,
        client: Actions[Any],
        server_window: Duration = "24h",
        lane_wait: Duration = "7d",
        sign: Sign | None = None,
        probe: Probe | None = None,
        keyring: KeyRing | None = None,
        workers: int = WORKERS,
    ) -> None:
        """
        Open an outbox.

        Args:
            url: `sqlite:///outbox.db` or `postgresql://host/database`.
            client: a client of `coatcheck.client`, which sends.
            server_window: how long the server remembers keys; an action that has no answer by then
                is `Unknown`.
            lane_wait: how long an action that cannot be sent, or whose outcome is unknown, holds
                back the later ones of its lane.
            sign: returns headers with credentials, which are never stored; called with the method,
                the URL and the body before each call. Of an `AsyncOutbox`, it may be async.
            probe: finds out what came of an action whose outcome is unknown; called with the
                action, returns `Done`, `Refused`, `SendAgain`, or None if it does not know. Of an
                `AsyncOutbox`, it may be async.
            keyring: encrypts requests and answers.
            workers: how many actions are sent at the same time.
        """
        self._check(client, workers, sign=sign, probe=probe)
        settings = client._coatcheck  # noqa: SLF001 - an outbox is a part of its client
        self._window_ms = round(seconds("server_window", server_window) * 1_000)
        self._lane_wait_ms = round(seconds("lane_wait", lane_wait) * 1_000)
        self._horizon_ms = round(settings.retry.horizon_s * 1_000)
        if self._window_ms <= self._horizon_ms:
            raise Misconfigured(
                f"server_window ({server_window!r}) is not longer than the deadline of the client"
            )
        self._settings, self._client, self._sign, self._probe = settings, client, sign, probe
        # A new key has to be stored before it is sent, so the outbox renews keys itself.
        self._retry = replace(settings.retry, renew_expired=False)
        self._workers = workers
        self._lease_ms = round((settings.retry.deadline_s + LEASE_MARGIN_S) * 1_000)
        # The actions in the database; an `OptimisticQueue` has its memos there.
        self.store: OutboxStore = open_outbox(url, keyring)

    def _check(self, client: Any, workers: int, **functions: object) -> None:
        if not isinstance(client, Actions):
            raise Misconfigured("client must be a client of coatcheck.client, which retries safely")
        if client.is_async != self._is_async:
            given, wanted = ("async", "AsyncOutbox") if client.is_async else ("not async", "Outbox")
            raise Misconfigured(f"the {type(client).__name__} is {given}: use an {wanted}")
        if workers < 1:
            raise Misconfigured(f"workers is {workers!r}; it must be 1 or more")
        for name, function in functions.items():
            if inspect.iscoroutinefunction(function) and not self._is_async:
                raise Misconfigured(f"{name} is async: use an AsyncOutbox, or a function")

    def close(self) -> None:
        """Close the connections to the database; the client stays open."""
        self.store.close()

    def key_of(self, reference: str | None) -> str:
        """The key of the action with this *reference*; a new one without."""
        return self._settings.new_key() if reference is None else key_of_reference(reference)

    def _now_ms(self) -> int:
        return round(self._settings.clock.wall_s() * 1_000)

    def _pause_ms(self, entry: Entry) -> int:
        return pause_ms(entry.calls, self._settings.clock.random())

    # ------------------------------------------------------------------------- before the sending

    def _entry(self, given: Request) -> Entry:
        """The action that the arguments of `submit` describe."""
        if given.json is not None and given.content is not None:
            raise Misconfigured("submit takes json= or content=, and not both")
        if given.key is not None and given.reference is not None:
            raise Misconfigured("submit takes key= or reference=, and not both")
        headers, body = dict(given.headers or {}), given.content or b""
        if not isinstance(body, bytes):
            raise Misconfigured(f"content is a {type(body).__name__}; it must be bytes")
        if found := [name for name in headers if name.lower() in _CREDENTIALS]:
            raise Misconfigured(f"headers= has {found[0]}, and is stored: return it from sign=")
        if given.json is not None:
            body = json_module.dumps(given.json, allow_nan=False).encode()
            headers.setdefault("Content-Type", "application/json")
        if given.key is not None:
            key = checked_key(given.key, self._settings.preset)
        else:
            key = self.key_of(given.reference)
        return Entry(
            id=0,
            key=key,
            sent_key=key,
            lane=key if given.lane is None else given.lane,
            method=given.method.upper(),
            url=given.url,
            headers=tuple((str(name), str(value)) for name, value in headers.items()),
            body=body,
            state="pending",
            submitted_ms=self._now_ms(),
            first_sent_ms=None,
            calls=0,
        )

    def _take(self) -> Entry | None:
        """The next action to send or to look for; those that are too old become unknown."""
        while True:
            now_ms = self._now_ms()
            entry = self.store.take(now_ms, self._lease_ms, probes=self._probe is not None)
            if entry is None or entry.state == "unknown":
                return entry
            verdict = too_late(entry, now_ms, self._window_ms, self._horizon_ms)
            if verdict is None:
                return entry
            self._end(entry, verdict, None)

    def _action(self, entry: Entry) -> Action[Any]:
        action: Action[Any] = self._client.action(key=entry.sent_key, retry=self._retry)
        return action

    def _options(self, entry: Entry, signed: Headers) -> dict[str, Any]:
        """What the client is called with; *signed* are the headers that `sign` returned."""
        # httpx says content=, the others say data=.
        body = "content" if hasattr(self._client, "build_request") else "data"
        return {"headers": {**dict(entry.headers), **signed}, body: entry.body}

    # -------------------------------------------------------------------------- after the sending

    def _settle(self, entry: Entry, result: Result, answer: Response | None) -> None:
        """Store what came of a call."""
        renews = self._settings.retry.renew_expired
        verdict = verdict_of(entry, result, answer and answer.status, renews=renews)
        self._store_verdict(entry, verdict, answer)

    def _failed(self, entry: Entry, action: Action[Any], error: Exception) -> None:
        """Store what came of a call that raised *error*; it is sent again."""
        result, words = result_of(error), f"{type(error).__name__}: {error}"
        if result is not None:
            verdict = verdict_of(entry, result, None)._replace(reason=words)
        else:  # `sign` failed, or a hook of the library
            was_sent = entry.first_sent_ms is not None or action.attempts > 0
            verdict = Verdict("pending", words, was_sent)
        self._store_verdict(entry, verdict, None)

    def _store_verdict(self, entry: Entry, verdict: Verdict, answer: Response | None) -> None:
        now_ms = self._now_ms()
        verdict = limited(verdict, entry, now_ms, self._lane_wait_ms)
        if verdict.needs_new_key:
            self.store.send_again(entry, self._settings.new_key(), now_ms)
        elif verdict.state == "pending":
            self.store.put_off(entry, verdict, now_ms + self._pause_ms(entry))
        else:
            self._end(entry, verdict, answer)

    def _end(self, entry: Entry, verdict: Verdict, answer: Response | None) -> None:
        now_ms = self._now_ms()
        hold_until_ms = now_ms + self._lane_wait_ms if verdict.state == "unknown" else 0
        self.store.end(entry, verdict, answer, now_ms=now_ms, hold_until_ms=hold_until_ms)

    def _to_look_for(self, entry: Entry) -> Stored:
        stored = self.store.get(entry.key)
        assert stored is not None
        return stored

    def _found(self, entry: Entry, reason: str, found: object) -> None:
        """Store what the probe has found out; *reason* is why the outcome was unknown."""
        if isinstance(found, Done):
            self._end(entry, Verdict("done"), found.response)
        elif isinstance(found, Refused):
            self._end(entry, Verdict("refused", found.reason), found.response)
        elif isinstance(found, SendAgain):
            key = self._settings.new_key() if found.new_key else entry.sent_key
            self.store.send_again(entry, key, self._now_ms() + self._pause_ms(entry))
        else:
            if found is not None:
                logger.warning(
                    "coatcheck: the probe returned %r for the action %s; it returns Done, "
                    "Refused, SendAgain or None",
                    found,
                    redacted(entry.key),
                )
            verdict = Verdict("unknown", reason)
            self.store.put_off(entry, verdict, self._now_ms() + self._pause_ms(entry))

    # --------------------------------------------------------------------------------- for people

    def _outcome(self, key: str) -> Outcome:
        stored = self.store.get(key)
        if stored is None:
            raise Misconfigured("the outbox has no action with this key; it may be forgotten")
        return outcome_of(stored)

    def _is_pending(self, key: str) -> bool:
        return self.store.state_of(key) == "pending"

    def _send_again(self, key: str, *, did_not_happen: bool, new_key: bool) -> bool:
        sent_key = self._settings.new_key() if new_key else None
        is_new = did_not_happen or new_key
        return self.store.retry(key, self._now_ms(), sent_key=sent_key, is_new=is_new)

    def _discard(self, key: str) -> bool:
        return self.store.discard(key, self._now_ms())

    def _forget(self, older_than: Duration) -> int:
        age_ms = round(seconds("older_than", older_than) * 1_000)
        return self.store.forget(self._now_ms() - age_ms)


def response_of(response: Any, body: bytes) -> Response:
    """The response of an HTTP library, as it is stored."""
    status = getattr(response, "status_code", None) or response.status
    # As they came: httpx decodes them, and joins those of the same name.
    raw = getattr(response.headers, "raw", None) or getattr(response, "raw_headers", None)
    if raw is None:  # of requests, which decodes them as Latin-1
        items = response.headers.items()
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in items]
    return Response(status, [(name.lower(), value) for name, value in raw], body)


def log_outage(error: Exception) -> None:
    """The sender in the background goes on; tell why it sends nothing."""
    logger.warning(
        "coatcheck: the outbox sends nothing for now, and tries again: %s",
        error,
        exc_info=None if isinstance(error, StoreUnavailable) else error,
    )


def log_probe_failure(entry: Entry, error: Exception) -> None:
    """The outcome stays unknown, and the probe is asked again."""
    logger.error(
        "coatcheck: the probe failed for the action %s", redacted(entry.key), exc_info=error
    )
