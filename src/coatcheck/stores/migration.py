"""Migrations: what a store's schema is, what it is to be, and who may change it (D4).

Each store keeps a list of its own that only grows; the number of those that were made is the
version. Whoever opens a store makes what is missing, which is right for development; where that is
for a person or a pipeline to do, a URL says `create=0`, and this is what `coatcheck migrate` tells.
"""

from __future__ import annotations

from typing import NamedTuple

# What whoever must not create is told.
HOW = "run `coatcheck migrate --store URL`"


class Migration(NamedTuple):
    """The schema of one store."""

    what: str  # for people, without a password
    found: int  # the version that was there; 0: none
    wanted: int  # the version of this release; 0: such a store has none
    done: bool = False  # it was made or upgraded just now

    @property
    def is_due(self) -> bool:
        """Something is to be done."""
        return self.found < self.wanted and not self.done

    @property
    def sentence(self) -> str:
        """What became of it, or is to become of it."""
        what, found, wanted, done = self
        if not wanted:
            return f"{what}: such a store has no schema, so nothing is to be made"
        if found == wanted:
            return f"{what}: up to date, with schema {found}"
        if done:
            return f"{what}: " + (
                f"upgraded from schema {found} to {wanted}"
                if found
                else f"made, with schema {wanted}"
            )
        if not found:
            return f"{what}: is missing; schema {wanted} is to be made"
        return f"{what}: has schema {found}, and this release wants {wanted}"
