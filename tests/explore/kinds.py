"""The kinds of clients that take part."""

from __future__ import annotations

from typing import Any

from coatcheck.core.policy import Policy

from .places import Kind


def kind(fingerprint: bytes = b"F" * 16, *, may_claim: bool = True, **knobs: Any) -> Kind:
    """A client whose policy has these *knobs*."""
    # The window and the margin only have to be longer than the lease, and tell lives apart.
    return Kind(Policy(window="1h", margin="10m", **knobs), fingerprint, may_claim)


RETRY = kind()
MANUAL = kind(recovery="manual")
RECONCILE = kind(recovery="reconcile", reconcile=print)
