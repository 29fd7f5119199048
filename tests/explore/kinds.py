"""The kinds of clients."""

from __future__ import annotations

from typing import Any

from coatcheck.core.policy import Policy

from .places import Kind


def kind(fingerprint: bytes = b"F" * 16, *, may_claim: bool = True, **settings: Any) -> Kind:
    """A client whose policy has these *settings*."""
    # The window and the margin only have to be longer than the lease.
    return Kind(Policy(window="1h", margin="10m", **settings), fingerprint, may_claim)


RETRY = kind()
MANUAL = kind(recovery="manual")
RECONCILE = kind(recovery="reconcile", reconcile=print)
