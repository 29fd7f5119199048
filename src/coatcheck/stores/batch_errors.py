"""Errors of a bulk call that belong to single members of it.

A batch may be several requests, or go to several servers, and one part may fail while others
succeed. The store then raises one `BatchError` that carries the outcome of every member. The
batchers and the lease renewer give each caller its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from coatcheck.core.record import Record
from coatcheck.errors import StoreUnavailable

logger = logging.getLogger("coatcheck")

T = TypeVar("T")

# What a member would have got alone: its result, or the exception that a call of its own raises.
Outcome: TypeAlias = Record | Exception | None


class BatchError(StoreUnavailable):
    """
    Some members of a batch failed; *outcomes* has the outcome of each, in their order.

    As a whole it is ambiguous if any member may have been written.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        outages = [error for error in errors if isinstance(error, StoreUnavailable)]
        is_ambiguous = len(outages) < len(outcomes) or any(o.is_ambiguous for o in outages)
        super().__init__(str(errors[0]), is_ambiguous=is_ambiguous)
        self.__cause__ = errors[0].__cause__
        self.outcomes = outcomes


def results_of(outcomes: Sequence[Outcome]) -> list[Record | None]:
    """Return the results if no member failed; raise the one error, or a `BatchError`."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if not errors:
        return list(outcomes)  # type: ignore[arg-type]  # there is no error among them
    raise BatchError(outcomes) if len(outcomes) > 1 else errors[0]


def outcomes_of(
    call: Callable[[Sequence[T]], Sequence[Record | None]], asks: Sequence[T]
) -> Sequence[Outcome]:
    """Make the bulk *call*; return the outcome of each member, if the store knows them."""
    try:
        return call(asks)
    except BatchError as error:
        return error.outcomes


class UndecodableRecord(StoreUnavailable):
    """
    The store holds something under this id that this release cannot decode.

    A newer release may have written it. A request for this id fails, because the record may mean
    that the work was done; other records are not affected.
    """


class SkipUndecodable:
    """Leaves undecodable records out of searches, and logs a warning once per store."""

    def __init__(self) -> None:
        self._has_warned = False

    def warn_once(self, error: UndecodableRecord) -> None:
        """Log *error*, the first time only: a search may meet the record every minute."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "coatcheck: a search leaves out records that cannot be decoded: %s", error
            )

    def read(
        self, get: Callable[[Sequence[bytes]], Sequence[Record | None]], ids: Sequence[bytes]
    ) -> Iterator[Record]:
        """Yield what *get* returns for *ids*, without missing and undecodable records."""
        try:
            outcomes = outcomes_of(get, ids)
        except UndecodableRecord as error:
            outcomes = [error]  # *ids* had one member
        for outcome in outcomes:
            if isinstance(outcome, UndecodableRecord):
                self.warn_once(outcome)
            elif isinstance(outcome, Exception):
                raise outcome
            elif outcome is not None:
                yield outcome
