"""Partitions: order in each, others at the same time, and offsets only of completed records (E1)."""

from __future__ import annotations

import asyncio

import pytest

from coatcheck.consumer import Acknowledge, DeadLetter, Message, Redeliver
from coatcheck.consumer.partitions import WAITING_MAX, Partitions
from coatcheck.consumer.running import Running
from coatcheck.core.messages.offset import PartitionOffset
from tests.consumer.waits import arrived

FIRST, SECOND, THIRD = ("orders", 0), ("orders", 1), ("orders", 2)


class ScriptedHandler:
    """Answers as the body of a message says; waits where that is b"wait"."""

    label = "billing.on_paid"

    def __init__(self):
        self.seen = []
        self.offsets = []
        self.may_end = asyncio.Event()
        self.actions = {}

    async def handle(self, message, *, offset=None):
        self.offsets.append(offset)
        self.seen.append(message.delivery_id)
        if message.body == b"wait":
            await self.may_end.wait()
        script = self.actions.get(message.delivery_id)
        return script.pop(0) if script else Acknowledge()


def message(id, body=b""):
    return Message(body, delivery_id=id)


def partitions_of(scene, *, concurrency=10, group=None):
    """Run *scene* with a handler and partitions 0 and 1."""

    async def main():
        handler, letters = ScriptedHandler(), []

        async def keep(message, reason):
            letters.append((message.delivery_id, reason))

        async with asyncio.timeout(20), Running(None) as running:
            partitions = Partitions(handler, running, keep, concurrency=concurrency, group=group)
            partitions.assign([FIRST, SECOND])
            return await scene(partitions, handler, letters)

    return asyncio.run(main())


def test_the_records_of_a_partition_are_handled_in_order_beside_those_of_others():
    async def scene(partitions, handler, _letters):
        partitions.add(FIRST, 0, message("a", b"wait"))
        partitions.add(FIRST, 1, message("b"))
        partitions.add(SECOND, 0, message("c"))
        await arrived(handler.seen, 2)
        before = partitions.offsets()
        handler.may_end.set()
        return handler.seen, before, await partitions.revoke()

    seen, before, after = partitions_of(scene)
    assert sorted(seen[:2]) == ["a", "c"]
    assert FIRST not in before
    assert after.get(FIRST) in (1, 2)  # the revocation may come before the second record


def test_a_record_that_is_to_be_handled_again_holds_up_its_own_partition_only():
    async def scene(partitions, handler, _letters):
        handler.actions["a"] = [Redeliver(0.01, "later"), Redeliver(0.01, "later")]
        partitions.add(FIRST, 0, message("a"))
        partitions.add(FIRST, 1, message("b"))
        partitions.add(SECOND, 0, message("c"))
        await arrived(handler.seen, 5)
        return handler.seen

    seen = partitions_of(scene)
    assert [one for one in seen if one != "c"] == ["a", "a", "a", "b"]


def test_a_revocation_ends_a_pause_and_commits_nothing_of_the_record_that_paused():
    async def scene(partitions, handler, _letters):
        handler.actions["b"] = [Redeliver(3_600, "later")]
        partitions.add(FIRST, 7, message("a"))
        partitions.add(FIRST, 8, message("b"))
        await arrived(handler.seen, 2)
        return await partitions.revoke([FIRST])

    assert partitions_of(scene) == {FIRST: 8}


def test_a_revocation_waits_for_the_handler_that_runs_and_starts_no_other():
    async def scene(partitions, handler, _letters):
        partitions.add(FIRST, 0, message("a", b"wait"))
        partitions.add(FIRST, 1, message("b"))
        await arrived(handler.seen, 1)
        revoking = asyncio.ensure_future(partitions.revoke([FIRST]))
        await asyncio.sleep(0)
        assert not revoking.done()
        handler.may_end.set()
        offsets = await revoking
        partitions.add(FIRST, 2, message("fetched before"))
        return handler.seen, offsets

    assert partitions_of(scene) == (["a"], {FIRST: 1})


def test_a_lost_partition_gives_no_offset_although_its_handler_ends():
    async def scene(partitions, handler, _letters):
        partitions.add(FIRST, 0, message("a", b"wait"))
        await arrived(handler.seen, 1)
        partitions.lose([FIRST])
        handler.may_end.set()
        partitions.assign([FIRST])
        return await partitions.revoke()

    assert partitions_of(scene) == {}


def test_a_dead_letter_is_kept_before_its_offset_is_given():
    async def scene(partitions, handler, letters):
        handler.actions["a"] = [DeadLetter("it cannot be")]
        partitions.add(FIRST, 0, message("a"))
        await arrived(letters, 1)
        return letters, await partitions.revoke()

    assert partitions_of(scene) == ([("a", "it cannot be")], {FIRST: 1})


def test_a_dead_letter_that_cannot_be_kept_ends_the_consumer():
    async def main():
        handler = ScriptedHandler()
        handler.actions["a"] = [DeadLetter("it cannot be")]

        async def keep(_message, _reason):
            raise ConnectionResetError

        async with Running(None) as running:
            partitions = Partitions(handler, running, keep, concurrency=1)
            partitions.assign([FIRST])
            partitions.add(FIRST, 0, message("a"))
            await asyncio.Event().wait()

    with pytest.raises(ConnectionResetError):
        asyncio.run(asyncio.wait_for(main(), 20))


def test_offsets_are_given_once():
    async def scene(partitions, handler, _letters):
        partitions.add(FIRST, 4, message("a"))
        await arrived(handler.seen, 1)
        await asyncio.sleep(0)
        return partitions.offsets(), partitions.offsets()

    assert partitions_of(scene) == ({FIRST: 5}, {})


def test_fetching_stops_for_a_partition_with_too_many_records_and_goes_on_later():
    async def scene(partitions, handler, _letters):
        for offset in range(WAITING_MAX):
            partitions.add(FIRST, offset, message(str(offset), b"" if offset else b"wait"))
        full, again = partitions.changes(), partitions.changes()
        partitions.assign([THIRD])
        assigned = partitions.changes()
        handler.may_end.set()
        await arrived(handler.seen, WAITING_MAX)
        return full, again, assigned, partitions.changes()

    full, again, assigned, later = partitions_of(scene)
    assert full == ([FIRST], [SECOND])
    assert again == ([], [])
    assert assigned == ([], [THIRD])  # a client may remember a pause from before
    assert later == ([], [FIRST])


def test_no_more_records_are_handled_at_one_time_than_are_allowed():
    async def scene(partitions, handler, _letters):
        partitions.add(FIRST, 0, message("a", b"wait"))
        partitions.add(SECOND, 0, message("b", b"wait"))
        await arrived(handler.seen, 1)
        await asyncio.sleep(0)
        before = len(handler.seen)
        handler.may_end.set()
        await arrived(handler.seen, 2)
        return before

    assert partitions_of(scene, concurrency=1) == 1


@pytest.mark.parametrize("group", ["billing", None])
def test_a_handler_gets_the_offset_after_its_record_if_there_is_a_group(group):
    async def scene(partitions, handler, _letters):
        partitions.add(FIRST, 41, message("a"))
        await arrived(handler.offsets, 1)
        return handler.offsets

    expected = None if group is None else PartitionOffset("billing", *FIRST, 42)
    assert partitions_of(scene, group=group) == [expected]
