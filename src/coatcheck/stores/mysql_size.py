"""What fits: a MySQL server takes no statement above its `max_allowed_packet`.

Used by `mysql_talk.py` and `mysql_ledger.py`, before anything is sent. Work that was done must be
known as done, also where its response is too large to be kept: else every retry would do it again.

Invariant: what is said to fit does, however it is sent.
"""

from __future__ import annotations

import logging

from coatcheck.core.key import reference_of
from coatcheck.core.record import Record, Swap

logger = logging.getLogger("coatcheck")

# 2 KiB: names, numbers, digests and what stands around blobs, generously.
_REST_BYTES = 2_048
# What a character takes at most: 4 bytes of UTF-8, each of them 2 digits.
_TEXT_BYTES = 8


def fitting(swap: Swap, statement_bytes_max: int) -> Swap:
    """*swap*, without a response that does not fit; all else of it is written."""
    record = swap.record
    if record is None or record.response is None or _bytes_max(record) <= statement_bytes_max:
        return swap
    return Swap(swap.id, swap.expected, record._replace(response=None))


def _bytes_max(record: Record) -> int:
    """How long the statement for *record* is at most: blobs are sent in base 64, if as a text."""
    texts = len(record.label) + len(record.scope) + len(record.key)
    blobs = len(record.progress or b"") + len(record.response or b"")
    return _REST_BYTES + texts * _TEXT_BYTES + blobs * 4 // 3


def warn_of_dropped(record: Record) -> None:
    """Say that the response of *record* is not kept."""
    logger.warning(
        "%s: its response of %d bytes is over what max_allowed_packet lets through; it is not "
        "kept, and a retry is told so",
        reference_of(record.id),
        len(record.response or b""),
    )
