"""What came of an action of an outbox: the values of its results and of its probe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from coatcheck.client.outbox_store import Stored
from coatcheck.core.response import Response


@dataclass(frozen=True, slots=True)
class Done:
    """It happened."""

    response: Response


@dataclass(frozen=True, slots=True)
class Refused:
    """It did not happen: the server refused it, or, with no *response*, it could not be sent."""

    response: Response | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """It has no definite answer yet, and is sent again."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """It may have happened; a person has to find out. *response* is the last answer, if any."""

    reason: str
    response: Response | None = None


@dataclass(frozen=True, slots=True)
class SendAgain:
    """
    It did not happen, says a probe: it is sent again.

    With *new_key* it has a key that the server does not know; if it did happen, it happens twice.
    """

    new_key: bool = False


Outcome: TypeAlias = Done | Refused | Pending | Unknown
# What a probe has found out; None: it does not know.
Found: TypeAlias = Done | Refused | SendAgain | None


def outcome_of(stored: Stored) -> Outcome:
    """What the outbox has stored of one action."""
    match stored.state:
        case "done":
            assert stored.answer is not None
            return Done(stored.answer)
        case "refused":
            return Refused(stored.answer, stored.reason)
        case "unknown":
            return Unknown(stored.reason, stored.answer)
        case _:
            return Pending()
