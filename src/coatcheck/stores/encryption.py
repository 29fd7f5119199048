"""Encryption and compression of what is stored: a store around a store.

It changes two fields of a record before they are written, `response` and `progress`, and changes
them back after they are read, so that no other code knows of it. Large responses are compressed
where that saves space, which every engine can read. With a key ring both fields are encrypted with
AES-256-GCM under the newest key. The record's id and the field's name are authenticated with them:
a value that was copied to another record cannot be decrypted there. Values that were stored before
there was a key ring stay readable.

Invariant: a value that cannot be decrypted is an error (`Unreadable`), never an empty response. An
unreadable record still means that the work was done.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from coatcheck.core.record import Record, Swap
from coatcheck.core.response import COMPRESSED, KINDS, PACKED, SEALED, decompressed
from coatcheck.errors import Unreadable
from coatcheck.keyring import KeyRing
from coatcheck.stores.batch_errors import Outcome, outcomes_of, results_of
from coatcheck.stores.batching import BATCH_MAX
from coatcheck.stores.contract import Page, Query, Store
from coatcheck.stores.registry import StoreInfo
from coatcheck.stores.transaction_statements import TransactionStatements

# 1 KiB: below this there is little to save. Saving less than an eighth is not worth the CPU time.
COMPRESSED_BYTES_MIN = 1_024
_SAVED_MIN = 1 / 8

# The names of the fields, which are authenticated with them.
_PROGRESS = b"progress"
_RESPONSE = b"response"


class EncryptedStore:
    """*store*, with responses compressed where that pays, and encrypted if there is a *keyring*."""

    def __init__(self, store: Store, keyring: KeyRing | None = None) -> None:
        self._store = store
        self._keyring = keyring
        # The rest is the store's own.
        self.sweep, self.check = store.sweep, store.check
        self.now_ms, self.close = store.now_ms, store.close
        self.info: StoreInfo | None = getattr(store, "info", None)
        self.batch_max: int = getattr(store, "batch_max", BATCH_MAX)
        self.in_flight: int = getattr(store, "in_flight", 1)
        inner = getattr(store, "transaction_statements", None)
        self.transaction_statements: TransactionStatements | None = None
        if isinstance(inner, TransactionStatements):
            self.transaction_statements = inner.over(self._packed_swap)

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        """Write each record if its version is still the expected one."""
        outcomes = outcomes_of(self._store.swap, [self._packed_swap(swap) for swap in swaps])
        pairs = zip(outcomes, swaps, strict=True)
        return results_of([self._unpacked(outcome, swap.record) for outcome, swap in pairs])

    def get(self, ids: Sequence[bytes]) -> Sequence[Record | None]:
        """Return the current records, in the order of *ids*."""
        return results_of([self._unpacked(o) for o in outcomes_of(self._store.get, ids)])

    def find(self, query: Query) -> Page:
        """Return records for operators; values that cannot be decrypted stay encrypted."""
        page = self._store.find(query)
        pairs = [(record, self._unpacked(record)) for record in page.records]
        shown = [after if isinstance(after, Record) else before for before, after in pairs]
        return Page(shown, page.next_after_id)

    def _packed_swap(self, swap: Swap) -> Swap:
        record = swap.record
        if record is None or (record.response is None and record.progress is None):
            return swap
        # Progress that is not encrypted stays as it is: an engine without this wrapper, which
        # knows nothing of compressed progress, may continue the operation.
        is_encrypted = self._keyring is not None
        packed = record._replace(
            progress=self._packed(record.progress, record.id + _PROGRESS, compresses=is_encrypted),
            response=self._packed(record.response, record.id + _RESPONSE),
        )
        return Swap(swap.id, swap.expected, packed)

    def _packed(
        self, blob: bytes | None, context: bytes, *, compresses: bool = True
    ) -> bytes | None:
        if blob is None:
            return None
        # None of our responses begins like this. Compressed, any bytes are returned unchanged.
        looks_packed = blob[:1] in PACKED
        if looks_packed or (compresses and len(blob) >= COMPRESSED_BYTES_MIN):
            smaller = b"%c%b" % (COMPRESSED, zlib.compress(blob))
            if looks_packed or len(smaller) <= len(blob) * (1 - _SAVED_MIN):
                blob = smaller
        return blob if self._keyring is None else self._keyring.encrypt(blob, context)

    def _unpacked(self, outcome: Outcome, wanted: Record | None = None) -> Outcome:
        """
        Return *outcome*, decrypted if it is a record; `Unreadable` if that fails.

        A record may have made a swap to *wanted* conflict. If its window was over when *wanted* was
        created, its values are not needed any more, so it need not be decrypted.
        """
        if not isinstance(outcome, Record):
            return outcome
        id, progress, response = outcome.id, outcome.progress, outcome.response
        try:
            return outcome._replace(
                progress=self._unpacked_blob(progress, id + _PROGRESS),
                response=self._unpacked_blob(response, id + _RESPONSE),
            )
        except Unreadable as error:
            if wanted is None or wanted.created_ms < outcome.window_until_ms:
                return error
            return outcome._replace(progress=None, response=None)

    def _unpacked_blob(self, blob: bytes | None, context: bytes) -> bytes | None:
        if blob is None:
            return None
        is_encrypted = blob.startswith(b"%c" % SEALED)
        if self._keyring is not None and (is_encrypted or not blob):  # empty: it was cut off
            blob = self._keyring.decrypt(blob, context)
        elif is_encrypted:
            raise Unreadable("the stored value is encrypted, and this engine has no key ring")
        elif self._keyring is not None and context.endswith(_RESPONSE) and blob[0] not in KINDS:
            raise Unreadable("the stored value is neither encrypted nor a response: it was changed")
        return decompressed(blob) if blob.startswith(b"%c" % COMPRESSED) else blob
