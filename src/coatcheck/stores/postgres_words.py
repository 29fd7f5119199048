"""Rows of the PostgreSQL store, spelled out: what stands in a text that takes no parameters.

Beside `postgres_rows.py`, for the ledger.

Invariant: a value stands there as a number, as hexadecimal digits, or as it is where it has
neither quotes nor backslashes; so no value can say anything, whatever the session takes a
backslash for.
"""

from __future__ import annotations

import re

from coatcheck.stores.postgres_rows import Row

_is_plain = re.compile(r"[ -&(-\[\]-~]*").fullmatch


def words_of(row: Row) -> list[str]:
    """The values of *row* as the table keeps them, in its order."""
    id, version, state, attempt, fingerprint, age_ms, lease_until_ms, margin_ms = row[:8]
    expires_ms, nonce, label, scope, key, progress, response = row[8:]
    return [
        f"'{id.hex()}'::uuid",
        f"{version:d}",
        f"{state:d}",
        number(attempt, unless=1),
        f"'{fingerprint.hex()}'::uuid" if fingerprint else "null",
        number(age_ms, unless=1),
        number(lease_until_ms, unless=0),
        number(margin_ms, unless=3_600_000),
        f"{expires_ms:d}",
        f"{nonce:d}",
        text(label),
        text(scope),
        text(key),
        octets(progress),
        octets(response),
    ]


def number(value: int, *, unless: int) -> str:
    """*value*, or nothing where it is what most have."""
    return "null" if value == unless else f"{value:d}"


def text(value: str) -> str:
    """*value*, or nothing where it is empty."""
    if not value:
        return "null"
    if _is_plain(value):
        return f"'{value}'"
    return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"


def octets(value: bytes | None) -> str:
    """The bytes of *value*."""
    return "null" if value is None else f"decode('{value.hex()}', 'hex')"
