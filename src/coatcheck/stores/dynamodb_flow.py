"""Flows of the DynamoDB store: what is asked for a swap or a read, and what the answers mean.

Between those who ask, `dynamodb_line.py` in threads and `dynamodb_wire.py` on event loops, and
`dynamodb_items.py`, which packs. All that is decided about a request is decided here, once.

A request that fails in passing is sent once more by botocore, and by us where somebody else's
transaction was in the way. A write that had taken effect the first time then loses against itself;
its caller gets its own record and recognises it, as after any lost acknowledgement.

Invariant: a swap is one request, whether it wins or loses, unless something was in its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from coatcheck.core.flow import Effect, Flow
from coatcheck.core.key import reference_of
from coatcheck.core.record import GONE, Record, Swap, is_same_write_cut
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import dynamodb_items as items
from coatcheck.stores.dynamodb_faults import CONFLICT, LOST, code_of, is_too_large, standing_of
from coatcheck.stores.dynamodb_place import Place
from coatcheck.stores.fates import Fate, results_of
from coatcheck.stores.unread import Unread

R = TypeVar("R")
Answer: TypeAlias = dict[str, Any]

# 5: botocore takes a conflict for final, but the transaction that holds the item is over in
# milliseconds.
CONFLICT_TRIES_MAX = 5
# Up to 20 ms before the second try, twice as long before each further one.
_PAUSE_S = 0.02
_PAUSE_S_MAX = 1.0
# The most that BatchGetItem takes.
_READ_MAX = 100
# A claim that finds a record which is gone when it is looked at; twice in a row is a wonder.
_VANISHED_MAX = 8


@dataclass(slots=True)
class Ask(Effect[Answer]):
    """Send one request; a failure is raised as `dynamodb_faults.explained` has it."""

    operation: str
    parameters: dict[str, Any]


@dataclass(slots=True)
class Pause(Effect[None]):
    """Wait for a part of *s_max*, drawn at random, so that the same two do not meet again."""

    s_max: float


@dataclass(slots=True)
class Tell(Effect[None]):
    """Warn whoever reads the log."""

    message: str


@dataclass(frozen=True, slots=True)
class Flows:
    """The requests about the table at *place*."""

    place: Place

    def swap(self, swap: Swap) -> Flow[Record | None]:
        """Write a record if the version its caller saw still stands; else what stands."""
        for _ in range(_VANISHED_MAX):
            record = swap.record
            standing = yield from self._delete(swap) if record is None else self._put(swap, record)
            if standing is None:
                return None
            if standing.version or swap.expected:
                return standing
            # A claim was refused, but not in favour of anybody: what stood is gone, so once more.
        raise StoreUnavailable(f"{self.place}: a record comes and goes while it is claimed")

    def _delete(self, swap: Swap) -> Flow[Record | None]:
        item = yield from self._write("delete_item", swap, Key={"id": {"B": swap.id}})
        return None if item is None else self._standing(item)

    def _put(self, swap: Swap, record: Record) -> Flow[Record | None]:
        """None where it won; of a record whose response does not fit, all else is written."""
        written = items.item_of(record, compact=self.place.compact)
        try:
            item = yield from self._write("put_item", swap, Item=written)
        except StoreUnavailable as error:
            if not is_too_large(error) or not items.keeps_response(written):
                raise
            # It is counted differently over there. The work was done, and that is to be known.
            written = items.without_response(written)
            item = yield from self._write("put_item", swap, Item=written)
        is_whole = record.response is None or items.keeps_response(written)
        if item is None:
            if not is_whole:
                yield from Tell(_dropped(record))
            return None
        standing = self._standing(item)
        if not is_whole and is_same_write_cut(standing, record):
            return record  # our own, from a try whose answer was lost; so its writer will know it
        return standing

    def _write(self, operation: str, swap: Swap, **what: object) -> Flow[items.Item | None]:
        """One conditional write. None: it took effect; else what stands, empty if nothing does."""
        what["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
        try:
            yield from self.call(operation, **what, **items.condition_of(swap))
        except StoreUnavailable as error:
            if code_of(error) == LOST:
                return standing_of(error)
            raise
        return None

    def read(self, ids: Sequence[bytes]) -> Flow[dict[bytes, Fate]]:
        """
        What stands of at most a hundred *ids*, never older than what was written.

        One request; more where the answer would be over 16 MB, or capacity runs short. Where there
        is none for a part of the table, the error is about what lies there, and about nothing else.
        """
        found: dict[bytes, Fate] = {}
        table = self.place.table
        keys = [{"id": {"B": id}} for id in ids]
        pause_s, paused_s = _PAUSE_S, 0.0
        while True:
            asked = {table: {"Keys": keys, "ConsistentRead": True}}
            answer = yield from self._sent(Ask("batch_get_item", {"RequestItems": asked}))
            for item in answer["Responses"].get(table, ()):
                found[item["id"]["B"]] = self._fate(item)
            left = answer.get("UnprocessedKeys", {}).get(table, {}).get("Keys", [])
            if not left:
                return found
            if len(left) == len(keys):  # nothing at all: there is no capacity
                if paused_s > self.place.timeout_s:
                    error = StoreUnavailable(f"{self.place}: throttled while reading")
                    return found | {key["id"]["B"]: error for key in left}
                yield from Pause(pause_s)
                paused_s += pause_s
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            keys = left

    def _fate(self, item: items.Item) -> Record | Unread:
        try:
            return items.record_of(item)
        except items.UnreadableItem as error:
            return Unread(f"{self.place}: {error}")

    def _standing(self, item: items.Item) -> Record:
        fate = self._fate(item) if item else GONE
        if isinstance(fate, Unread):
            raise fate
        return fate

    def call(self, operation: str, **parameters: object) -> Flow[Answer]:
        """One request about the table, and its answer."""
        return self._sent(Ask(operation, {"TableName": self.place.table, **parameters}))

    def _sent(self, ask: Ask) -> Flow[Answer]:
        """The answer to *ask*, which is sent again where somebody's transaction was in the way."""
        pause_s, is_ambiguous = _PAUSE_S, False
        for tries_left in reversed(range(CONFLICT_TRIES_MAX)):
            try:
                answer = yield from ask
            except StoreUnavailable as error:
                error.is_ambiguous = is_ambiguous = error.is_ambiguous or is_ambiguous
                if code_of(error) != CONFLICT or not tries_left:
                    raise
            else:
                return self._believed(answer)
            yield from Pause(pause_s)
            pause_s *= 2
        raise AssertionError  # the last one has returned or raised

    def _believed(self, answer: Answer) -> Answer:
        """Botocore takes any page with the status 200 for a yes, also one of a proxy's."""
        if not answer["ResponseMetadata"].get("RequestId"):
            message = f"{self.place}: something answered that is not DynamoDB"
            raise StoreUnavailable(message, is_ambiguous=True)
        return answer


def portions_of(ids: Sequence[bytes]) -> list[list[bytes]]:
    """*ids* by the hundred, as `Flows.read` takes them; each once, else DynamoDB refuses them."""
    wanted = list(dict.fromkeys(ids))
    return [wanted[start : start + _READ_MAX] for start in range(0, len(wanted), _READ_MAX)]


def in_order(
    ids: Sequence[bytes], found: Sequence[dict[bytes, Fate] | Exception]
) -> list[Record | None]:
    """The records for *ids*, from what was *found* of their portions."""
    fates: dict[bytes, Fate] = {}
    for portion, some in zip(portions_of(ids), found, strict=True):
        fates |= dict.fromkeys(portion, some) if isinstance(some, Exception) else some
    return results_of([fates.get(id) for id in ids])


def each_of(outcomes: Sequence[R | BaseException]) -> list[R | Exception]:
    """What became of flows that ran at the same time; an interruption is none of theirs."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome
    return cast("list[R | Exception]", list(outcomes))


def _dropped(record: Record) -> str:
    size = len(record.response or b"")
    message = f"{reference_of(record.id)}: its response of {size} bytes is over what DynamoDB keeps"
    return f"{message}; it is not kept, and a retry is told so"
