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
│   └── LimitExceeded      413, 429   over a size, waiter or key limit
├── ClaimLost                         our lease ended and another attempt took over
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
    """A size, waiter or key limit was reached."""


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


class ClaimLost(CoatcheckError):
    """Our lease ended and another attempt took over."""


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
