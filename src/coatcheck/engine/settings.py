"""Settings: what an engine is given is checked when it is made, so that no request fails by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coatcheck.core.not_awaited import refuse_async
from coatcheck.errors import Misconfigured
from coatcheck.stores.at_rest import KeyRing
from coatcheck.telemetry import Observer


def secret_of(secret: object) -> bytes:
    """*secret* as bytes."""
    if isinstance(secret, str):
        return secret.encode("utf-8", "surrogatepass")  # what a variable holds need not be UTF-8
    if not isinstance(secret, bytes):
        raise Misconfigured(f"secret is a {type(secret).__name__}; it is text or bytes")
    return secret


def check_keyring(keyring: object) -> None:
    """Refuse what seals nothing: it would show when work is done, and cannot be written down."""
    if keyring is not None and not isinstance(keyring, KeyRing):
        kind = type(keyring).__name__
        raise Misconfigured(f"keyring is a {kind}; it is a KeyRing: write KeyRing({{name: key}})")


def every(name: str, seconds: object) -> float | None:
    """How often something is done, which was set as *name*."""
    if seconds is None:
        return None
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds < math.inf
    ):
        raise Misconfigured(f"{name} is {seconds!r}; it is a number of seconds, or None for never")
    return seconds


def observing(observers: object) -> tuple[Observer, ...]:
    """*observers*, if they can be told."""
    told = tuple(observers) if isinstance(observers, Iterable) else None
    if told is None or not all(map(callable, told)):
        raise Misconfigured(f"observers is {observers!r}; it is a list of functions")
    for observer in told:
        refuse_async("observers", observer)
    return told
