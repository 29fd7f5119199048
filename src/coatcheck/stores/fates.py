"""Fates: what became of each member of a bulk call whose parts were asked for apart.

For stores whose batch is several requests, or goes to several servers: one of them may fail where
the others have succeeded. Whoever calls such a store gets a list of results or an exception, as of
any other; but the exception says what became of each, and those who group (`batching.py`,
`engine/apart.py`) tell each member its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from coatcheck.core.record import Record
from coatcheck.errors import StoreUnavailable

R = TypeVar("R")

# What a member would have got alone: its result, or what would have been raised.
Fate: TypeAlias = Record | Exception | None


class Divided(StoreUnavailable):
    """
    Some members of a batch have failed; *fates* has what became of each, in their order.

    For whoever takes it as one, it is ambiguous if anything may have taken effect.
    """

    def __init__(self, fates: Sequence[Fate]) -> None:
        errors = [fate for fate in fates if isinstance(fate, Exception)]
        outages = [error for error in errors if isinstance(error, StoreUnavailable)]
        is_ambiguous = len(outages) < len(fates) or any(o.is_ambiguous for o in outages)
        super().__init__(str(errors[0]), is_ambiguous=is_ambiguous)
        self.__cause__ = errors[0].__cause__
        self.fates = fates


def results_of(fates: Sequence[Fate]) -> list[Record | None]:
    """The results, if all have one; else raise what says what became of each."""
    errors = [fate for fate in fates if isinstance(fate, Exception)]
    if not errors:
        return list(fates)  # type: ignore[arg-type]  # there is no error among them
    raise Divided(fates) if len(fates) > 1 else errors[0]
