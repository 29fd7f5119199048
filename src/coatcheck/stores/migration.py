"""Migrations: the version of a store's schema, and whether this release needs a newer one.

Each store has a list of migrations that only grows; the number of those that were applied is its
version. Opening a store applies missing ones, which suits development. In production a person or
a pipeline may want to do that: then the URL has `create=0`, and `coatcheck migrate` applies them.
"""

from __future__ import annotations

from typing import NamedTuple

from coatcheck.errors import Misconfigured

# What to do, for errors of a store that may not create or upgrade its schema.
HOW = "run `coatcheck migrate --store URL`"


def supported(what: str, found: int, wanted: int) -> int:
    """Return the version *found* in the store *what*; raise if a newer release made it."""
    if found > wanted:
        raise Misconfigured(
            f"{what} has coatcheck schema {found}, but this release of coatcheck supports schemas "
            f"up to {wanted}; upgrade coatcheck here"
        )
    return found


def outdated(what: str, found: int, wanted: int) -> str:
    """Return the message for tables that are missing, or older than this release."""
    older = f"has coatcheck schema {found}, older than {wanted} of this release"
    return f"{what} {older if found else 'is missing'}; {HOW}"


def migration_of(what: str, found: int, wanted: int, *, only_look: bool) -> Migration:
    """Return the report on a schema that was upgraded just now, unless it was *only_look*."""
    return Migration(what, found, wanted, done=found < wanted and not only_look)


class Migration(NamedTuple):
    """The schema of one store."""

    what: str  # the store, for people, without a password
    found: int  # the version that was there; 0: none
    wanted: int  # the version of this release; 0: the store has no schema
    done: bool = False  # the schema was created or upgraded just now

    @property
    def is_due(self) -> bool:
        """The schema is still to be created or upgraded."""
        return self.found < self.wanted and not self.done

    @property
    def sentence(self) -> str:
        """What was done, or what is to be done."""
        what, found, wanted, done = self
        if not wanted:
            return f"{what}: this store has no schema; nothing to do"
        if found == wanted:
            return f"{what}: up to date, schema version {found}"
        if done:
            return f"{what}: " + (
                f"upgraded from schema version {found} to {wanted}"
                if found
                else f"created, schema version {wanted}"
            )
        if not found:
            return f"{what}: missing; schema version {wanted} is to be created"
        return f"{what}: has schema version {found}, this release needs {wanted}"
