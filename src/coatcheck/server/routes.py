"""Routes: a route's own policy, written beside the route, and how a middleware finds it.

`idempotent` marks an endpoint. A middleware finds the mark through `RoutePolicies`: it asks the
framework which endpoint a request will reach, before the request gets there. So one middleware
guards everything, and each route declares what is particular to it. `starlette_routes.py` has the
implementation for Starlette and FastAPI; another framework needs one of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, Unpack, cast, overload

from coatcheck.core.keep import Outcome, OutcomeKind
from coatcheck.core.policy import Policy, PolicyOptions, changed
from coatcheck.core.response import Response
from coatcheck.engine.settings import policy_of
from coatcheck.errors import Misconfigured
from coatcheck.operation import Operation, current_operation

P = ParamSpec("P")
T = TypeVar("T")

_MARK = "__coatcheck_policy__"


class Mark(dict[str, Any]):
    """
    What `idempotent` has marked an endpoint with: changes of the middleware's policy.

    *reports_begin*: the endpoint notes in the operation that it has begun. *of_class*: the mark of
    a method is only that of its class.
    """

    def __init__(
        self, changes: Mapping[str, Any], *, reports_begin: bool, of_class: bool = False
    ) -> None:
        super().__init__(changes)
        self.reports_begin = reports_begin
        self.of_class = of_class


# The mark that a middleware found for the present request. An endpoint that runs under another
# mark than its own was not found, and must not look as if it were guarded.
_FOUND: ContextVar[object] = ContextVar("coatcheck.mark", default=None)
_UNGUARDED = object()


class Unclaimed:
    """
    The present request passes without a claim: by the kill switch, or in observe mode.

    *operation* is for an endpoint that asks for one; nothing guards it, and it has no record.
    """

    def __init__(self, operation: Callable[[], Operation]) -> None:
        self.operation = functools.cache(operation)  # one for each request


class RoutePolicies(Protocol):
    """Finds the policy that guards a request; made once for each middleware."""

    def lookup(
        self, native: MutableMapping[str, Any], method: str, /
    ) -> tuple[Policy | None, str | None]:
        """
        The policy for a request with an unsafe *method*, and the template of its route.

        *native* is the ASGI scope or the WSGI environ. No policy: the request is not guarded. The
        template is the label of the route's operations; None if it is not known: then the path is
        the label. Keys belong to the path in both cases.
        """
        ...

    def let_pass(self, native: MutableMapping[str, Any], /) -> None:
        """Note that this request is not guarded, whatever its route says: its method is safe."""
        ...


# What `routes=` of a middleware takes: a function of the middleware's policy, and of a function to
# register each declared route with, so that the background can recover its operations.
NewRoutes: TypeAlias = Callable[[Policy, Callable[[str, Policy], None]], RoutePolicies]


class OnePolicy:
    """The same policy for every request."""

    def __init__(self, policy: Policy, _register: Callable[[str, Policy], None]) -> None:
        self._policy = policy

    def lookup(
        self, _native: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """The policy, if *method* is one of its methods."""
        found(None)
        return (self._policy if method in self._policy.methods else None), None

    def let_pass(self, native: MutableMapping[str, Any]) -> None:
        """Nothing to note."""


@overload
def idempotent(endpoint: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def idempotent(
    **changes: Unpack[PolicyOptions],
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def idempotent(
    endpoint: Callable[..., Any] | None = None, /, **changes: Unpack[PolicyOptions]
) -> Any:
    """
    Give an endpoint a policy of its own: the middleware's, with *changes*.

    Every unsafe method of the route is guarded, whatever the middleware's `methods` are;
    `methods=()` takes the route out. Only `status_path` is the same for all routes. Without any
    change it may be written without parentheses.
    """
    if endpoint is not None and not callable(endpoint):
        raise Misconfigured("idempotent takes settings by name: @idempotent(required=True)")
    changes = cast("PolicyOptions", checked_changes(changes))

    # One mark for all that is decorated: Django's `method_decorator` decorates for each request.
    mark = Mark(changes, reports_begin=True)

    def decorate(endpoint: Callable[P, T]) -> Callable[P, T]:
        if hasattr(endpoint, "on_registration"):  # Litestar knows the function inside only
            raise Misconfigured("put @idempotent below Litestar's own decorator of the route")
        # The endpoint itself gets a mark, too: if this decorator stands above the route's own, the
        # framework only knows the endpoint.
        with suppress(AttributeError):  # a bound method cannot have one
            setattr(endpoint, _MARK, Mark(changes, reports_begin=False))
        if isinstance(endpoint, type):  # the framework calls it for each request, not we
            _mark_handlers(endpoint, Mark(changes, reports_begin=True, of_class=True))
            return endpoint
        guarded = _checked(endpoint, mark)
        setattr(guarded, _MARK, mark)
        return guarded

    return decorate if endpoint is None else decorate(endpoint)


def checked_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """*changes* of a middleware's policy for some of its routes; raises `Misconfigured`."""
    checked = dict(changes)
    if "reconcile" in checked:
        checked.setdefault("recovery", "reconcile")
    policy_of(changed(Policy(), checked))
    if "status_path" in checked:
        raise Misconfigured(
            "status_path is the middleware's, which serves it for all routes: give that one "
            f"policy=Policy(status_path={checked['status_path']!r})"
        )
    return checked


def _checked(endpoint: Callable[P, T], mark: Mark) -> Callable[P, T]:
    """
    *endpoint*, which notes that it has begun.

    It refuses to run if no middleware guards it, because a mark alone does nothing.
    """

    def check() -> None:
        found = _FOUND.get()
        if found is not mark and found is not _UNGUARDED and not isinstance(found, Unclaimed):
            raise Misconfigured(
                f"{endpoint.__qualname__} is marked @idempotent, but no IdempotencyMiddleware "
                "guards it: app.add_middleware(IdempotencyMiddleware, store=...), in Flask "
                "Coatcheck(app, store=...), in Django the MIDDLEWARE setting"
            )
        _note_begin()

    return _preceded(check, endpoint)


def _mark_handlers(view: type, mark: Mark) -> None:
    """
    Mark the methods of a class-based *view*, which then note that they have begun.

    One that has a mark of its own keeps it. A method with another name has the mark of the class.
    """
    for name in dir(view):
        handler = inspect.getattr_static(view, name)
        is_handler = name in _HANDLERS or hasattr(handler, "mapping")  # an `action` of DRF
        own = mark_of(handler)
        if is_handler and inspect.isfunction(handler) and (own is None or own.of_class):
            marked = _preceded(_note_begin, handler)
            set_mark(marked, mark)
            setattr(view, name, marked)


# The methods that frameworks call, by the method of a request or the action of a DRF view set.
_HANDLERS = frozenset(
    {"delete", "patch", "post", "put", "create", "destroy", "partial_update", "update"}
)


def _note_begin() -> None:
    """Note in the operations of the present request that its endpoint has begun."""
    operation = current_operation()
    while operation is not None:
        operation.has_begun = True
        operation = operation.outer


def _preceded(before: Callable[[], None], endpoint: Callable[P, T]) -> Callable[P, T]:
    """*endpoint*, and before it a call of *before*."""

    @functools.wraps(endpoint)
    async def guarded_async(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's own
        before()
        return await endpoint(*args, **kwargs)  # type: ignore[misc]  # it is a coroutine function

    @functools.wraps(endpoint)
    def guarded_sync(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's own
        before()
        return endpoint(*args, **kwargs)

    guarded: Any = guarded_async if inspect.iscoroutinefunction(endpoint) else guarded_sync
    try:  # frameworks would look up annotations that are text in this module, not in its own
        guarded.__signature__ = inspect.signature(endpoint, eval_str=True)
    except NameError:
        pass
    checked: Callable[P, T] = guarded
    return checked


def mark_of(endpoint: object) -> Mark | None:
    """The mark of *endpoint*; None: it has none."""
    mark: Mark | None = getattr(endpoint, _MARK, None)
    return mark


def set_mark(marked: object, mark: Mark) -> None:
    """Give *marked*, an endpoint or a route, this *mark*."""
    setattr(marked, _MARK, mark)


def policy_of_mark(policy: Policy, method: str, mark: Mapping[str, Any]) -> Policy:
    """The middleware's *policy* with the changes of *mark*, for this *method*."""
    changes = {"methods": {method}, **mark}
    if mark.get("recovery", "reconcile") != "reconcile":  # then no function is called
        changes["reconcile"] = None
    if mark.get("recovery", "retry") != "retry" or mark.get("mode") == "transaction":
        changes.setdefault("on_outage", "refuse")  # the middleware's "execute" contradicts it
    return changed(policy, changes)


def found(mark: Mark | Unclaimed | None) -> None:
    """Note the mark that was found for the present request."""
    _FOUND.set(mark)


def unclaimed_operation_of_request() -> Operation | None:
    """An operation that nothing guards, if the present request passes without a claim."""
    found = _FOUND.get()
    return found.operation() if isinstance(found, Unclaimed) else None


def is_refused_early(response: Response, operation: Operation) -> bool:
    """
    *response* refuses a request to a marked route before its handler began.

    Then nothing has run, and the key may be used for a corrected request.
    """
    mark = _FOUND.get()
    reports_begin = isinstance(mark, Mark) and mark.reports_begin
    is_refusal = response.status >= HTTPStatus.BAD_REQUEST
    return is_refusal and reports_begin and not operation.has_begun


def note_raised(error: Exception) -> None:
    """
    Note what the handler of the present request raised.

    Some frameworks make a response of every exception, before a middleware could see it. Such a
    response is sent, but it is no answer of the handler: the attempt has failed with *error*.
    """
    operation = current_operation()
    while operation is not None:
        operation.raised = error
        operation = operation.outer


def raised_instead(response: Response, outcome: Outcome, operation: Operation) -> Exception | None:
    """What the handler raised, if its framework has made *response* of it."""
    is_error = response.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    # If the handler had not begun, the key is free for a corrected request.
    return operation.raised if is_error and outcome.kind is not OutcomeKind.REJECT else None


def found_unguarded() -> None:
    """Note that the present request is not guarded, and may reach any endpoint."""
    _FOUND.set(_UNGUARDED)
