"""What a reconcile function, a probe or an operator answers: did it happen?"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from coatcheck.core.policy import header_name
from coatcheck.core.response import NO_CONTENT
from coatcheck.errors import Misconfigured


@dataclass(frozen=True, slots=True)
class Happened:
    """A reconcile function's answer: it happened, and this is what the client should get."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] | list[tuple[str, str]] = ()
    body: bytes = b""
    # For guarded functions: what the function would have returned.
    value: Any = field(default=None)

    def __post_init__(self) -> None:
        """Refuse what could not be sent as a response: every retry would fail."""
        status: object = self.status
        headers: object = self.headers
        body: object = self.body
        if not isinstance(status, int) or not 200 <= status <= 599:
            raise Misconfigured(f"status is {status!r}; it must be a number from 200 to 599")
        if not isinstance(headers, (tuple, list)):
            raise Misconfigured(f"headers is {headers!r}; it must be a list of pairs of texts")
        for header in headers:
            _check_header(header)
        if not isinstance(body, bytes):
            raise Misconfigured(f"body is a {type(body).__name__}; it must be bytes")
        if body and status in NO_CONTENT:  # servers fail with it, or take it for the next answer
            raise Misconfigured(f"a response of status {int(status)} has no body")


# RFC 9110 §5.5: no control characters but tabs, and what Latin-1 can say.
_HEADER_VALUE = re.compile(r"[\t -~\x80-\xff]*")


def _check_header(header: object) -> None:
    match header:
        case (name, str(value)):
            header_name(name)
            if _HEADER_VALUE.fullmatch(value) is None:
                raise Misconfigured(f"{value!r} cannot be the value of the header {name}")
        case _:
            raise Misconfigured(f"{header!r} is no header; it must be a pair of texts")


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A reconcile function's answer: nothing happened, so it may run."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reconcile function's answer: it is not known; an operator must look."""
