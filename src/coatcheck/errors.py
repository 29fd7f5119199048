"""
Everything coatcheck raises, in one tree.

CoatcheckError                        never raised itself
├── Refused                           a guarded request was refused; see .problem
│   ├── KeyRejected        400        missing, malformed or too long
│   ├── KeyReused          422        same key, different request
│   ├── KeyBusy            409        the first attempt is still running; see .retry_after_s
│   ├── KeyExpired         409        a late retry on a route that refuses them
│   ├── OutcomeUnknown     409        an attempt died in the middle; a person must say what happened
│   ├── ResultUnavailable  409        it happened once, but its result was not kept
│   └── LimitExceeded  413, 429, 503  over a size, waiter, key or work limit
├── NotResolved                       there is no such operation in doubt; see .record
├── NotCommitted                      the transaction of an operation was ended by somebody else
├── ClaimLost                         our lease ended and another attempt took over
├── StepInDoubt                       an attempt died in a step that may not run twice
├── StepsChanged                      a handler's steps are not those of the attempt before it
├── Resumable                         raised by a handler: nothing was done that may not be repeated
├── StoreUnavailable       503        the store did not answer; the driver's error is __cause__
├── Unreadable                        what is stored cannot be opened with the keys that are here
├── Misconfigured                     found when something is set up, never during a request
└── MissingExtra (ImportError)        names the exact `pip install coatcheck[...]`

Each refusal of a request carries the problem document it would be over HTTP (`.problem`), so that
a function guarded by `Engine.run` and a route guarded by a middleware refuse with the same words.
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
    """A guarded call was refused; the concrete class says why, `problem` says it in full."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    def __reduce__(self) -> tuple[type[Refused], tuple[Problem]]:
        return type(self), (self.problem,)

    @property
    def reference(self) -> str | None:
        """The short reference of the operation, for support."""
        return self.problem.reference

    @property
    def retry_after_s(self) -> int | None:
        """When a retry with the same key makes sense, if it ever does."""
        return self.problem.kind.retry_after_s


class KeyRejected(Refused):
    """The key is missing, malformed or too long."""


class KeyReused(Refused):
    """The same key came with a different request."""


class KeyBusy(Refused):
    """The first attempt is still running."""


class KeyExpired(Refused):
    """A late retry came after the window, on a route that refuses them."""


class OutcomeUnknown(Refused):
    """An attempt died in the middle; what it did is not known."""


class ResultUnavailable(Refused):
    """The work happened once, but its result was not kept."""


class LimitExceeded(Refused):
    """A size, waiter, key or work limit was reached."""


class StoreUnavailable(CoatcheckError):
    """
    The store did not answer; the driver's own error is `__cause__`.

    *is_ambiguous*: a write was on its way and may have taken effect (its acknowledgement was
    lost). An engine then tries the same swap again, which is safe: see `stores/batching.py`.
    """

    def __init__(self, message: str, *, is_ambiguous: bool = False) -> None:
        super().__init__(message)
        self.is_ambiguous = is_ambiguous

    def __reduce__(self) -> tuple[Callable[..., StoreUnavailable], tuple[str, bool]]:
        return _store_unavailable, (str(self), self.is_ambiguous)


def _store_unavailable(text: str, is_ambiguous: bool) -> StoreUnavailable:  # noqa: FBT001 - pickle
    return StoreUnavailable(text, is_ambiguous=is_ambiguous)


class Unreadable(CoatcheckError):
    """What is stored is sealed, and no key here opens it. The work was done, and stays done."""


class NotResolved(CoatcheckError):
    """
    A person's decision found nothing to decide, and changed nothing.

    *record* is what stands, None where there is none or more than one.
    """

    def __init__(self, message: str, record: Record | None = None) -> None:
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple[type[NotResolved], tuple[str, Record | None]]:
        return NotResolved, (str(self), self.record)


class NotCommitted(CoatcheckError):
    """What was done in an operation's transaction is not there: its handler has ended it itself."""


class ClaimLost(CoatcheckError):
    """Our lease ended and another attempt took over."""


class StepInDoubt(CoatcheckError):
    """An attempt died in this step, and nobody can tell what it did: the operation is parked."""

    def __init__(
        self, name: str, why: str = "an attempt died in it, and what it did is not known"
    ) -> None:
        super().__init__(f"the step {name!r} is in doubt: {why}")
        self.name = name
        self.why = why

    def __reduce__(self) -> tuple[type[StepInDoubt], tuple[str, str]]:
        return type(self), (self.name, self.why)


class StepsChanged(CoatcheckError):
    """
    The handler's steps are not those of the attempt before it: it was changed in between.

    *name* is the step that is new; None where the handler has ended without asking for *expected*.
    """

    def __init__(self, name: str | None, expected: str) -> None:
        found = "this attempt has ended" if name is None else f"the step {name!r} is new"
        super().__init__(
            f"{found}, but an earlier attempt has taken {expected!r}, which this "
            "one has not asked for: finish such operations with the code that began them, or "
            "resolve them"
        )
        self.name = name
        self.expected = expected

    def __reduce__(self) -> tuple[type[StepsChanged], tuple[str | None, str]]:
        return type(self), (self.name, self.expected)


class Resumable(CoatcheckError):
    """
    Raised by a handler that has failed and knows that it may simply run again.

    Whatever the recovery policy says: the claim is given back, and the next retry runs.
    """


class Misconfigured(CoatcheckError):
    """Something was set up wrongly; found at start, never during a request."""


class MissingExtra(CoatcheckError, ImportError):
    """A third-party package is needed; the message is the exact command that installs it."""

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(f"{package} is needed here: pip install 'coatcheck[{extra}]'")
        self.extra = extra
        self.package = package

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return MissingExtra, (self.extra, self.package)
