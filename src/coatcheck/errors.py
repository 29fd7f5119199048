"""
Every exception that coatcheck raises, in one tree.

CoatcheckError                        never raised itself
├── Refused                           a guarded request was refused; see .problem
│   ├── KeyRejected        400, 401   missing, malformed or too long; or its caller is refused
│   ├── KeyReused          422        same key, different request
│   ├── KeyBusy            409        the first attempt is still running; see .retry_after_s
│   ├── KeyExpired         409        a retry after the window, on a route that refuses those
│   ├── OutcomeUnknown     409        an attempt did not finish; its outcome must be resolved
│   ├── ResultUnavailable  409        the operation completed, but its result was not stored
│   └── LimitExceeded      413, 429   over a limit: size, waiters or keys
├── NotResolved                       no operation in doubt was found to resolve; see .record
├── NotCommitted                      the transaction of an operation could not be committed
├── ClaimLost                         the lease expired and another attempt took over
├── StepInDoubt                       an attempt ended inside a step that must not run twice
├── StepsChanged                      the steps of a handler differ from those of an earlier attempt
├── StepFailed                        a step of a saga failed, and had no effect
├── SagaUndone                        a saga failed, and everything it did was undone
├── SagaBlocked                       a saga cannot continue until a person has decided
├── Resumable                         raised by a handler: it may run again
├── Uncertain                         raised by a handler: it does not know what it did
├── StoreUnavailable       503        the store is unreachable; the driver's error is __cause__
├── Unreadable                        a stored response cannot be decrypted with these keys
├── BodyNotRepeatable                 a client cannot keep a request body for its retries
├── Misconfigured                     found at set-up, not during a request
└── MissingExtra (ImportError)        names the exact `pip install coatcheck[...]`

Each refusal carries the problem document that an HTTP client would get (`.problem`), so a function
guarded by `Engine.run` and a route guarded by a middleware refuse with the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from coatcheck.core.problem import Problem
    from coatcheck.core.record import Record


class CoatcheckError(Exception):
    """The root of the tree; never raised itself."""


class Refused(CoatcheckError):
    """A guarded call was refused: the class names the reason, `problem` has the details."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    def __reduce__(self) -> tuple[type[Refused], tuple[Problem]]:
        return type(self), (self.problem,)

    @property
    def reference(self) -> str | None:
        """The short reference of the operation, for support requests."""
        return self.problem.reference

    @property
    def retry_after_s(self) -> int | None:
        """After how many seconds to retry with the same key; None if a retry does not help."""
        return self.problem.retry_after_s


class KeyRejected(Refused):
    """The key is missing, malformed or too long, or its caller is refused."""


class KeyReused(Refused):
    """The same key came with a different request."""


class KeyBusy(Refused):
    """The first attempt is still running."""


class KeyExpired(Refused):
    """The retry came after the window, on a route that refuses those."""


class OutcomeUnknown(Refused):
    """An attempt did not finish, so it is not known what it did."""


class ResultUnavailable(Refused):
    """The operation completed, but its result was not stored."""


class LimitExceeded(Refused):
    """A limit was reached: size, waiters, keys or work."""


class StoreUnavailable(CoatcheckError):
    """
    The store is unreachable; the driver's own error is `__cause__`.

    *is_ambiguous*: a write was sent and may have been applied, but its answer was lost. The engine
    then repeats the same swap, which is safe; see `stores/batching.py`.
    """

    def __init__(self, message: str, *, is_ambiguous: bool = False) -> None:
        super().__init__(message)
        self.is_ambiguous = is_ambiguous

    def __reduce__(self) -> tuple[Callable[..., StoreUnavailable], tuple[str, bool]]:
        return _store_unavailable, (str(self), self.is_ambiguous)


def _store_unavailable(text: str, is_ambiguous: bool) -> StoreUnavailable:  # noqa: FBT001 - pickle
    return StoreUnavailable(text, is_ambiguous=is_ambiguous)


class Unreadable(CoatcheckError):
    """Stored bytes cannot be read: they are damaged, or encrypted with a key this process lacks."""


class NotResolved(CoatcheckError):
    """
    `resolve` found no operation in doubt, and changed nothing.

    *record* is the current record; None if there is none, or more than one.
    """

    def __init__(self, message: str, record: Record | None = None) -> None:
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple[type[NotResolved], tuple[str, Record | None]]:
        return NotResolved, (str(self), self.record)


class NotCommitted(CoatcheckError):
    """
    The transaction could not be committed, because of what the handler did with its connection.

    It committed, rolled back or closed the connection, or left a statement running on it.
    """


class ClaimLost(CoatcheckError):
    """The lease of this attempt expired, and another attempt took over."""


class StepInDoubt(CoatcheckError):
    """An attempt ended inside this step, so its effect is not known: the operation is in doubt."""

    def __init__(
        self, name: str, why: str = "an attempt ended inside it, so its effect is not known"
    ) -> None:
        super().__init__(f"the step {name!r} is in doubt: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[type[StepInDoubt], tuple[str, str]]:
        return type(self), (self.name, self.why)


class StepsChanged(CoatcheckError):
    """
    The handler's steps differ from those of an earlier attempt: its code has changed since.

    *name* is the new step; None if the handler ended without asking for *expected*.
    """

    def __init__(self, name: str | None, expected: str) -> None:
        found = "this attempt has ended" if name is None else f"the step {name!r} is new"
        super().__init__(
            f"{found}, but an earlier attempt ran the step {expected!r}, and this one did not ask "
            "for it: let the code that began the operation finish it, or resolve it"
        )
        self.name = name
        self.expected = expected

    def __reduce__(self) -> tuple[type[StepsChanged], tuple[str | None, str]]:
        return type(self), (self.name, self.expected)


class StepFailed(CoatcheckError):
    """
    A step of a saga failed; raised by `saga.step`, the same in every attempt.

    *error* is the name of the type that the function raised, and *text* the beginning of its text.
    In the attempt that called the function, its own error is `__cause__`.
    """

    def __init__(self, step: str, error: str, text: str) -> None:
        failed = f"the step {step!r} failed: {error}: {text}".rstrip(": ")
        super().__init__(f"{failed}; unless its function catches this, the saga is undone")
        self.step = step
        self.error = error
        self.text = text

    def __reduce__(self) -> tuple[type[StepFailed], tuple[str, str, str]]:
        return type(self), (self.step, self.error, self.text)


class SagaUndone(CoatcheckError):
    """
    A saga failed, and the undos of all its steps have run; every later call raises the same.

    *step* is the step that failed, empty if the function failed outside of its steps. *error* and
    *text* are as in `StepFailed`.
    """

    def __init__(self, saga: str, key: str, step: str, error: str, text: str) -> None:
        where = f"its step {step!r}" if step else "its function"
        failed = f"{where} failed: {error}: {text}".rstrip(": ")
        super().__init__(
            f"the saga {saga!r} was undone, because {failed}; for another try, use another key"
        )
        self.saga = saga
        self.key = key
        self.step = step
        self.error = error
        self.text = text

    def __reduce__(self) -> tuple[type[SagaUndone], tuple[str, str, str, str, str]]:
        return type(self), (self.saga, self.key, self.step, self.error, self.text)


class SagaBlocked(CoatcheckError):
    """
    A saga cannot continue until a person has decided: resume, resolve or skip.

    *step* is where it is blocked ("charge", "charge:undo"), empty if it is at no step; *reference*
    is what `coatcheck sagas show` takes.
    """

    def __init__(self, saga: str, reference: str, step: str, why: str) -> None:
        at = f" at {step!r}" if step else ""
        super().__init__(
            f"the saga {saga!r} ({reference}) is blocked{at}: {why}; a person decides: see "
            f"coatcheck sagas show {reference}"
        )
        self.saga = saga
        self.reference = reference
        self.step = step
        self.why = why

    def __reduce__(self) -> tuple[type[SagaBlocked], tuple[str, str, str, str]]:
        return type(self), (self.saga, self.reference, self.step, self.why)


class Resumable(CoatcheckError):
    """
    Raised by a handler that has failed and knows that it may run again.

    The claim is released under every recovery policy, and the next retry runs.
    """


class Uncertain(CoatcheckError):
    """
    Raised by a handler that does not know whether its effect took place: the opposite of Resumable.

    For example, a call to another service has timed out. The operation is in doubt under every
    recovery policy.
    """


class BodyNotRepeatable(CoatcheckError):
    """A client cannot keep a body for its retries: it is too large, or the disk is full."""


class Misconfigured(CoatcheckError):
    """A setting or an argument is wrong; where possible it is found at start, not in a request."""


class MissingExtra(CoatcheckError, ImportError):
    """A third-party package is missing; the message has the command that installs it."""

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'coatcheck[{extra}]'")
        self.extra = extra
        self.package = package

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, (self.extra, self.package)
