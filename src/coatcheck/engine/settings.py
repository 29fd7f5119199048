"""Settings: the arguments of an engine are checked when it is made, not during a request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

from coatcheck.core.callables import refuse_async
from coatcheck.core.identity import digest_key
from coatcheck.core.policy import Policy, PresetName
from coatcheck.errors import Misconfigured
from coatcheck.keyring import KeyRing


def secret_of(secret: object) -> bytes:
    """*secret* as the key of digests."""
    if isinstance(secret, str):
        secret = secret.encode("utf-8", "surrogatepass")  # an environment variable: any bytes
    if not isinstance(secret, bytes):
        raise Misconfigured(f"secret is a {type(secret).__name__}; it must be text or bytes")
    return digest_key(secret)


def check_keyring(keyring: object) -> None:
    """Refuse anything but a key ring: it would fail when work is done and cannot be stored."""
    if keyring is not None and not isinstance(keyring, KeyRing):
        kind = type(keyring).__name__
        raise Misconfigured(
            f"keyring is a {kind}; it must be a KeyRing: write KeyRing({{name: key}})"
        )


def every(name: str, seconds: object) -> float | None:
    """The setting *name*: a number of seconds between two runs, or None."""
    if seconds is None:
        return None
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 < seconds < math.inf
    ):
        raise Misconfigured(
            f"{name} is {seconds!r}; it must be a number of seconds, or None for never"
        )
    return seconds


def functions(name: str, given: object) -> tuple[Callable[[Any], object], ...]:
    """The setting *name*: *given*, as a tuple of plain functions."""
    found = tuple(given) if isinstance(given, Iterable) else None
    if found is None or not all(map(callable, found)):
        raise Misconfigured(f"{name} is {given!r}; it must be a list of functions")
    for function in found:
        refuse_async(name, function)
    return found


def policy_of(policy: Policy | str | None) -> Policy:
    """A policy, or the preset of that name."""
    if policy is None:
        policy = Policy()
    elif isinstance(policy, str):
        policy = Policy.preset(cast("PresetName", policy))  # which refuses other names
    elif not isinstance(policy, Policy):
        raise Misconfigured(f"{policy!r} is not a policy; give a Policy, or the name of a preset")
    return policy


# 50 characters without spaces: the name is part of every label, which has 200.
_SERVICE = re.compile(r"[!-~]{0,50}")


def service_name(service: object) -> str:
    """The name that the requests of this service are labelled with; "": none."""
    if not isinstance(service, str) or _SERVICE.fullmatch(service) is None:
        raise Misconfigured(
            f"service is {service!r}; it must be a name of up to 50 characters without spaces"
        )
    return service
