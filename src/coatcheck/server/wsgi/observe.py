"""Observe mode over WSGI: requests pass untouched, and what they would have got is reported."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem
from coatcheck.operation import current_operation, enter
from coatcheck.server.body import MEMORY_BYTES_MAX
from coatcheck.server.observe import (
    NOT_OBSERVED,
    Observations,
    ObservedRequest,
    give_body,
    refusal_of_length,
)
from coatcheck.server.wsgi.request import Environ, bytes_of, request_of

logger = logging.getLogger("coatcheck")

StartResponse = Callable[..., Callable[[bytes], object]]


class Middleware(Protocol):
    """What an observed WSGI request needs of its middleware."""

    app: Callable[[Environ, StartResponse], Iterable[bytes]]
    observations: Observations


def serve_observed(
    middleware: Middleware,
    environ: Environ,
    start_response: StartResponse,
    found: tuple[Policy, str | None],
) -> Iterable[bytes]:
    """Pass a request on, and observe it; *found*: its policy and the template of its route."""
    observed = None
    try:
        observed = _begin(middleware.observations, environ, found)
    except Exception:  # whatever it is, the request runs
        logger.exception(NOT_OBSERVED)
    if observed is None:
        return middleware.app(environ, start_response)

    def watch(status: str, headers: Sequence[tuple[str, str]], *rest: Any) -> Any:  # noqa: ANN401 - the write function
        observed.status = int(status[:3])
        return start_response(status, headers, *rest)

    watched = _WatchedBody(middleware.observations, observed)
    environ["coatcheck.operation"] = observed.operation
    returned = watched.call(middleware.app, environ, watch)
    if isinstance(returned, (list, tuple)):  # servers send these in a shorter way
        watched.end()
        return returned
    watched.returned, watched.chunks = returned, iter(returned)
    return watched


def _begin(
    observations: Observations, environ: Environ, found: tuple[Policy, str | None]
) -> ObservedRequest | None:
    """Begin to observe a request; a small body is read, and put back."""
    policy, template = found
    guard, value = observations.guard, environ.get(policy.key_environ)
    key = guard.key_of(() if value is None else (bytes_of(value),), policy)
    if "coatcheck.operation" in environ or (key is None and not guard.has_natural_keys):
        return None
    request = request_of(environ, b"")
    declared = environ.get("CONTENT_LENGTH") or ""
    length = int(declared[:20]) if declared.isdecimal() else None
    checked = refusal_of_length(length, policy) or key
    if isinstance(checked, Problem):
        observations.would_refuse(checked, request, template)
        return None
    key = checked
    body = None
    if length is None and "HTTP_TRANSFER_ENCODING" not in environ:
        body = b""
    elif length is not None and length <= MEMORY_BYTES_MAX:
        body = environ["wsgi.input"].read(length)
        environ["wsgi.input"] = io.BytesIO(body)
    if not give_body(observations, request, found, key, body=body, length=length):
        return None
    if guard.caller is not None:
        try:
            guard.identify(request)
        except Exception as error:  # noqa: BLE001 - a refusal, or raised again
            observations.would_refuse_caller(error, request, found)
            return None
    return observations.begin(request, policy, template, key)


class _WatchedBody:
    """What an observed application returned; its operation is the current one while it runs."""

    def __init__(self, observations: Observations, observed: ObservedRequest) -> None:
        self.returned: Iterable[bytes] = ()
        self.chunks: Iterator[bytes] = iter(())
        self._observations = observations
        self._observed = observed
        self._is_ended = False

    def call(self, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - what it returns
        """Call a function of the application."""
        before = current_operation()
        enter(self._observed.operation)
        try:
            return function(*args)
        except StopIteration:
            raise
        except BaseException as error:
            self.end(error)
            raise
        finally:
            enter(before)

    def end(self, error: BaseException | None = None) -> None:
        """The application has ended, or failed with *error*."""
        if not self._is_ended:
            self._is_ended = True
            self._observations.end(self._observed, error)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk: bytes = self.call(next, self.chunks)
        return chunk

    def close(self) -> None:
        """The server has sent it, or the client has hung up."""
        try:
            close = getattr(self.returned, "close", None)
            if close is not None:
                self.call(close)
        finally:
            self.end()
