"""The WSGI adapter: any WSGI application, guarded by one line.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="sqlite:///orders.db")

Requests that are not guarded pass untouched. A guarded one is read to the end of its body and not
a byte further, claimed, and executed in the server's own thread; with `in_flight="202"` in one of
ours, because it may go on after its answer. The response leaves when its record is safe. PEP 3333
is kept in full: `write()`, generators, late and repeated `start_response`, `close()`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable

from coatcheck.core.policy import Policy
from coatcheck.core.problem import Problem
from coatcheck.engine import Engine
from coatcheck.errors import Misconfigured
from coatcheck.operation import current_operation, enter
from coatcheck.server.answers import OUTAGES, refused, unrun
from coatcheck.server.body import Body
from coatcheck.server.callers import Caller
from coatcheck.server.counter import Counter, NaturalKey
from coatcheck.server.request import Request
from coatcheck.server.status import ASKING_METHODS, id_of
from coatcheck.server.wsgi_accepting import AcceptingVisit
from coatcheck.server.wsgi_input import Environ, bytes_of, drain, give, read, request_of, rewound
from coatcheck.server.wsgi_transaction import TransactionVisit
from coatcheck.server.wsgi_visit import App, Said, StartResponse, Visit, respond
from coatcheck.stores import Store

# 100: more than a server has threads, because work goes on when its thread serves the next client.
THREADS_MAX = 100


class IdempotencyMiddleware:
    """
    Guards a WSGI application.

    Args:
        app: the application.
        store: a URL or a store; or give *engine*.
        policy: a `Policy`, the name of a preset, or None for the default.
        caller: whose key it is, a function of the request; see `coatcheck.server.callers`.
        key: takes the key from the request itself where no header brings one (K4).
        secret: makes operation ids unguessable; the same on every node.
        engine: an `Engine` that is shared with other doors.
        transactions: who lends connections for transaction mode; see `Engine`.
        threads_max: with `in_flight="202"`, how many handlers may run at once.
    """

    def __init__(
        self,
        app: App,
        *,
        store: str | Store | None = None,
        policy: Policy | str | None = None,
        caller: Caller | None = None,
        key: NaturalKey | None = None,
        secret: bytes | str = b"",
        engine: Engine | None = None,
        transactions: object = None,
        threads_max: int = THREADS_MAX,
    ) -> None:
        given = (store, policy, secret or None, transactions)
        if engine is not None and any(one is not None for one in given):
            raise Misconfigured("engine= brings its own store, policy and secret; give only it")
        if not isinstance(engine, Engine | None):
            # Not what it is: a URL may have a password in it.
            raise Misconfigured(
                f"engine is a {type(engine).__name__}; it is an Engine, and store= takes URLs"
            )
        self.app = app
        self.engine = engine or Engine(
            store or "sqlite:///coatcheck.db", policy, secret=secret, transactions=transactions
        )
        self.engine.reconciler.know_requests(self.engine.desk.policy)
        self.counter = Counter(self.engine.desk, caller, key, functools.partial(_is_by_host, app))
        self.threads = threading.Semaphore(threads_max)
        self._environ_name = "HTTP_" + self.engine.desk.policy.key_header.upper().replace("-", "_")

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request; only those with unsafe methods concern us."""
        policy = self.engine.desk.policy
        method = environ["REQUEST_METHOD"].upper()  # as Django and Flask take it
        if method in ASKING_METHODS and policy.status_path in environ.get("PATH_INFO", ""):
            return self._tell_status_or_pass(environ, start_response)
        if method not in policy.methods:
            return self.app(environ, start_response)
        value = environ.get(self._environ_name)
        values = () if value is None else (bytes_of(value),)
        key = self.counter.key_of(values, policy)
        if key is None and not self.counter.has_natural_keys:
            return self.app(environ, start_response)
        if isinstance(key, Problem):
            drain(environ)
            request = request_of(environ, Body())
            return respond(start_response, self.counter.refused(request, key, policy))
        return self._guard(environ, start_response, policy, key)

    def _guard(
        self, environ: Environ, start_response: StartResponse, policy: Policy, key: str | None
    ) -> Iterable[bytes]:
        body = read(environ, policy)
        if isinstance(body, Problem):
            request = request_of(environ, Body())
            return respond(start_response, self.counter.refused(request, body, policy))
        give(environ, body)
        said: Iterable[bytes] = ()
        try:
            said = self._serve(request_of(environ, body), start_response, policy, key)
        finally:
            if not isinstance(said, Said):  # nobody reads the request any more
                body.close()
        return said

    def _serve(
        self, request: Request, start_response: StartResponse, policy: Policy, key: str | None
    ) -> Iterable[bytes]:
        if key is None:
            found = self.counter.natural_key_of(request, policy)
            if found is None:
                return self._pass(request, start_response)
            if isinstance(found, Problem):
                return respond(start_response, self.counter.refused(request, found, policy))
            key = found
        if not self.engine.is_started:
            try:
                self.engine.start()
            except OUTAGES as error:
                return respond(start_response, self.counter.refused(request, unrun(error), policy))
        ticket = self.counter.ticket(request, policy, key, None)
        if self.counter.is_held_by(request, ticket):
            return self._pass(request, start_response)
        answer = self.engine.desk.recall(ticket, policy)
        kind = Visit if answer is not None else _kind_of(policy)
        visit = kind(self, request, start_response, ticket=ticket, policy=policy)
        before = current_operation()  # of a guarded function that calls us in its own thread
        try:
            return visit.serve() if answer is None else visit.answer(answer)
        finally:
            enter(before)

    def _pass(self, request: Request, start_response: StartResponse) -> Iterable[bytes]:
        """Serve a request that is not for us to guard, as it is."""
        said = self.app(rewound(request), start_response)
        return Said(b"", said, said, request.body)

    def _tell_status_or_pass(
        self, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        """Answer a client that asks how its operation is doing; whatever else goes on."""
        policy = self.engine.desk.policy
        start, _, token = environ["PATH_INFO"].partition(policy.status_path)
        id = None if start else id_of(token)
        response = None
        if id is not None:
            try:
                if not self.engine.is_started:
                    self.engine.start()
                (record,) = self.engine.store.get((id,))
            except OUTAGES as error:
                return respond(start_response, refused(unrun(error), policy))
            response = self.counter.status(record, token, request_of(environ, Body()))
        if response is None:
            return self.app(environ, start_response)
        return respond(start_response, response)


def _is_by_host(app: App) -> bool:
    """Whether a Flask application matches hosts, too; others do not tell."""
    owner = getattr(app, "__self__", app)  # whose `wsgi_app` it is
    is_by_host = getattr(getattr(owner, "url_map", None), "host_matching", False)
    return is_by_host is True or getattr(owner, "subdomain_matching", False) is True


def _kind_of(policy: Policy) -> type[Visit]:
    if policy.mode == "transaction":
        return TransactionVisit
    return AcceptingVisit if policy.in_flight == "202" else Visit
