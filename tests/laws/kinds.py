"""The stores under law, and what each of them declares.

A promise that a store cannot keep is a field here, never a skipped test: the law that needs it
asks (`ReadDeclaration`) and asserts what the store does instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coatcheck.core.record import Record


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of store; *fresh_url* names an empty one that may use the given directory."""

    name: str
    fresh_url: Callable[[Path], str]
    durable: bool = True  # what was acknowledged is there after close, crash and reopening
    shared: bool = True  # every process that opens the URL sees the same records
    closes: bool = True  # a closed store refuses further use with StoreUnavailable
    sweeps: bool = True  # forgets when told to, on the caller's clock; else by itself, on its own
    keeps_labels: bool = True  # label, scope and key come back; a compact store drops them

    def as_kept(self, record: Record) -> Record:
        """What this store gives back of *record*."""
        return record if self.keeps_labels else record._replace(label="", scope="", key="")


KINDS = (
    Kind(
        name="memory",
        fresh_url=lambda _directory: "memory://",
        durable=False,
        shared=False,
        closes=False,
    ),
    Kind(name="sqlite", fresh_url=lambda directory: f"sqlite:///{directory}/laws.db"),
    Kind(
        name="sqlite-compact",
        fresh_url=lambda directory: f"sqlite:///{directory}/laws.db?compact=1",
        keeps_labels=False,
    ),
)
