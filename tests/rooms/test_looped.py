"""The batcher of event loops over a scripted wire: lanes, order, and that nothing is lost."""

import asyncio
import gc
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest

from coatcheck.core.record import RUNNING, Record, Swap
from coatcheck.errors import StoreUnavailable
from coatcheck.stores import lanes
from coatcheck.stores.batching import BATCH_MAX
from coatcheck.stores.contract import Query, Wire
from coatcheck.stores.fates import Divided
from coatcheck.stores.looped import LoopedStore
from coatcheck.stores.memory import MemoryStore
from coatcheck.stores.prompt import Prompt

# 10 s: nothing here takes a hundredth of it; who waits longer waits for ever.
TIMEOUT_S = 10


class Interrupted(BaseException):
    """What a signal or a debugger may throw anywhere; no `Exception`."""


class ScriptedWire:
    """To a memory store; it writes down its calls, can be held up, and fails where told to."""

    def __init__(self, store: "WiredStore") -> None:
        self.store = store
        self.lanes = store.lanes
        self.loop = asyncio.get_running_loop()
        self.batches: list[list[int]] = []
        self.away: list[set[bytes]] = []
        self.gates: deque[asyncio.Event] = deque()
        self.closings = 0

    async def swap(self, swaps: Sequence[Swap], /) -> Sequence[Record | None]:
        ids = {swap.id for swap in swaps}
        assert len(ids) == len(swaps)
        assert all(ids.isdisjoint(others) for others in self.away)
        assert asyncio.get_running_loop() is self.loop
        self.batches.append([int.from_bytes(swap.id, "big") for swap in swaps])
        self.away.append(ids)
        assert len(self.away) <= self.lanes
        try:
            await self._pass()
            for swap in swaps:
                if swap.id in self.store.failing:
                    raise self.store.failing[swap.id]
            return self.store.swap(swaps)
        finally:
            self.away.remove(ids)

    async def get(self, ids: Sequence[bytes], /) -> Sequence[Record | None]:
        await self._pass()
        self.store.reads.append(list(ids))
        return self.store.get(ids)

    async def _pass(self) -> None:
        if self.gates:
            await self.gates.popleft().wait()

    async def close(self) -> None:
        self.closings += 1

    @property
    def is_closed(self) -> bool:
        assert self.closings <= 1
        return self.closings == 1

    def hold(self) -> asyncio.Event:
        """The next call waits until the event that is given back is set."""
        gate = asyncio.Event()
        self.gates.append(gate)
        return gate


class WiredStore(MemoryStore):
    """A memory store with a wire for each event loop."""

    def __init__(self, lanes: int = 1) -> None:
        super().__init__()
        self.lanes = lanes
        self.wires: list[ScriptedWire] = []
        self.failing: dict[bytes, BaseException] = {}
        self.reads: list[list[bytes]] = []
        self.threads: set[threading.Thread] = set()
        self.is_closed = False

    def wire(self) -> Wire:
        wire = ScriptedWire(self)
        self.wires.append(wire)
        return wire

    def swap(self, swaps: Sequence[Swap]) -> Sequence[Record | None]:
        self.threads.add(threading.current_thread())
        return super().swap(swaps)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def claim(number: int, nonce: int = 1) -> Swap:
    id = id_of(number)
    record = Record(id, 1, RUNNING, 1, id, 1, 1, 1, 1, nonce, "", "", "", None, None)
    return Swap(id, 0, record)


def change(number: int, version: int) -> Swap:
    record = claim(number).record
    assert record is not None
    return Swap(record.id, version, record._replace(version=version + 1))


class Scene:
    """A store in a running event loop whose first call, of claim 0, is held up."""

    def __init__(self, lanes: int = 1) -> None:
        self.store = WiredStore(lanes)
        self.looped = LoopedStore(self.store)
        self.gate = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.looped.get([id_of(0)])
        self.gate = self.wire.hold()
        self.first = self.looped.swap([claim(0)])
        await turns()
        return self

    @property
    def wire(self) -> ScriptedWire:
        return self.store.wires[0]

    async def __aexit__(self, *error: object) -> None:
        self.gate.set()
        if error == (None, None, None):
            async with asyncio.timeout(TIMEOUT_S):
                await self.looped.close()

    async def told(self, *asked: Any) -> list[Any]:
        """What became of *asked*, after the first call has come back."""
        self.gate.set()
        async with asyncio.timeout(TIMEOUT_S):
            return await asyncio.gather(*asked, return_exceptions=True)


async def turns() -> None:
    """More turns of the event loop than anything here takes."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_gathers_on_a_loop_leaves_together_without_a_thread():
    """L1: one batch away, all others in the next."""

    async def scene() -> None:
        async with Scene() as on:
            rest = [on.looped.swap([claim(number)]) for number in range(1, 6)]
            rest.append(on.looped.swap([claim(6), claim(7)]))
            await turns()
            assert on.wire.batches == [[0]]
            assert await on.told(on.first, *rest) == [[None]] * 6 + [[None, None]]
            assert on.wire.batches == [[0], [1, 2, 3, 4, 5, 6, 7]]
            assert on.store.threads == {threading.current_thread()}

    asyncio.run(scene())


def test_each_is_told_what_became_of_its_own_where_the_wire_says_so():
    """D2, L1: and nobody is asked for again."""
    away = StoreUnavailable("a shard is away", is_ambiguous=True)

    async def scene() -> None:
        async with Scene() as on:
            results = [None, away, claim(3).record, None]
            on.store.failing[id_of(1)] = Divided(results)
            asked = [on.looped.swap([claim(number)]) for number in range(1, 5)]
            first, *told = await on.told(on.first, *asked)
            error = told.pop(1)
            assert (str(error), error.is_ambiguous) == ("a shard is away", True)
            assert [first, *told] == [[None], [None], [claim(3).record], [None]]
            assert on.wire.batches == [[0], [1, 2, 3, 4]]

    asyncio.run(scene())


def test_who_is_alone_is_sent_in_the_same_turn():
    """L1: nothing is waited for when nobody else is there."""

    class Prompt(ScriptedWire):
        """Its answer is there at once; a coroutine would begin a turn later."""

        def swap(self, swaps: Sequence[Swap], /) -> Any:
            self.batches.append([int.from_bytes(swap.id, "big") for swap in swaps])
            answer = self.loop.create_future()
            answer.set_result(self.store.swap(swaps))
            return answer

    async def scene() -> None:
        store = WiredStore()
        store.wire = lambda: store.wires.append(Prompt(store)) or store.wires[-1]  # type: ignore[method-assign,func-returns-value]
        looped = LoopedStore(store)
        for number in range(3):
            asked = looped.swap([claim(number)])
            assert store.wires[0].batches == [[n] for n in range(number + 1)]
            assert list(await asked) == [None]
        await looped.close()

    asyncio.run(scene())


def test_reads_leave_together_and_wait_for_no_write():
    """L1: many may look for the same record."""

    async def scene() -> None:
        async with Scene() as on:
            on.store.reads.clear()
            gate = on.wire.hold()
            reads = [asyncio.ensure_future(on.looped.get([id_of(1)])) for _ in range(3)]
            await turns()
            gate.set()
            assert await asyncio.gather(*reads) == [[None]] * 3
            assert on.store.reads == [[id_of(1)], [id_of(1)] * 2]
            assert not on.first.done()

    asyncio.run(scene())


# --- lanes -------------------------------------------------------------------------------------


def test_two_lanes_share_what_there_is_in_equal_parts():
    """L1: the server works on one part while the client works on the other."""

    async def scene() -> None:
        async with Scene(lanes=2) as on:
            other = on.wire.hold()
            second = on.looped.swap([claim(1)])
            rest = [on.looped.swap([claim(number)]) for number in range(2, 34)]
            await turns()
            assert on.wire.batches == [[0], [1]]
            gates = [on.gate, other, on.wire.hold(), on.wire.hold()]
            for gate in gates[:2]:
                gate.set()
            await turns()
            assert [len(batch) for batch in on.wire.batches[2:]] == [16, 16]
            for gate in gates[2:]:
                gate.set()
            assert await on.told(on.first, second, *rest) == [[None]] * 34

    asyncio.run(scene())


def test_who_comes_back_in_one_turn_leaves_together():
    """L1: else what two batches have had becomes three, and each is smaller."""

    async def scene() -> None:
        async with Scene(lanes=2) as on:

            async def ask_again(before: asyncio.Future[Any], number: int) -> None:
                assert list(await before) == [None]
                assert list(await on.looped.swap([claim(number)])) == [None]

            other = on.wire.hold()
            second = on.looped.swap([claim(1)])
            rest = [on.looped.swap([claim(number)]) for number in (2, 3)]
            again = [
                asyncio.ensure_future(ask_again(on.first, 4)),
                asyncio.ensure_future(ask_again(second, 5)),
            ]
            await turns()
            on.gate.set()
            other.set()
            assert await on.told(*again, *rest) == [None, None, [None], [None]]
            assert on.wire.batches == [[0], [1], [2, 3], [4, 5]]

    asyncio.run(scene())


def test_a_few_who_come_late_wait_for_the_many_who_are_on_their_way(monkeypatch):
    """L1: alone they would take as long, and who comes back meanwhile would have to wait."""
    monkeypatch.setattr(lanes, "PROMPT_S_MAX", TIMEOUT_S)  # so that nobody is slow here

    async def scene() -> None:
        async with Scene(lanes=3) as on:
            gate = on.wire.hold()
            many = on.looped.swap([claim(number) for number in range(1, 11)])
            await turns()
            late = [on.looped.swap([claim(number)]) for number in (11, 12)]
            await turns()
            assert len(on.wire.batches) == 2
            late.append(on.looped.swap([claim(13)]))
            assert await asyncio.gather(*late) == [[None]] * 3
            assert on.wire.batches[2:] == [[11, 12, 13]]
            gate.set()
            assert await on.told(on.first, many) == [[None], [None] * 10]

    asyncio.run(scene())


def test_a_few_who_come_late_leave_at_once_while_more_than_one_lane_is_free(monkeypatch):
    """L1: nobody has to wait because of them; so with a lane for each, each has its own."""
    monkeypatch.setattr(lanes, "PROMPT_S_MAX", TIMEOUT_S)  # so that nobody is slow here

    async def scene() -> None:
        async with Scene(lanes=40) as on:
            gates = [on.wire.hold() for _ in range(20)]
            many = [on.looped.swap([claim(number)]) for number in range(1, 21)]
            await turns()
            late = on.looped.swap([claim(21)])
            await turns()
            assert on.wire.batches == [[number] for number in range(22)]
            assert list(await late) == [None]
            for gate in gates:
                gate.set()
            assert await on.told(on.first, *many) == [[None]] * 21

    asyncio.run(scene())


def test_nobody_waits_for_a_lane_that_is_stuck_while_another_is_free():
    """D2: the first who comes finds that out, and whoever comes then is sent at once."""

    async def scene() -> None:
        async with Scene(lanes=3) as on:
            gate = on.wire.hold()
            many = on.looped.swap([claim(number) for number in range(1, 11)])
            behind = on.looped.swap([change(1, 1)])
            async with asyncio.timeout(TIMEOUT_S):
                assert list(await on.looped.swap([claim(11)])) == [None]
            late = on.looped.swap([claim(12)])
            await turns()
            assert on.wire.batches[2:] == [[11], [12]]
            assert list(await late) == [None]
            assert not behind.done()
            gate.set()
            assert await on.told(on.first, many, behind) == [[None], [None] * 10, [None]]

    asyncio.run(scene())


def test_a_lane_that_was_stuck_counts_again_when_it_is_back(monkeypatch):
    """L1: else a few would leave alone for ever."""

    async def scene() -> None:
        async with Scene(lanes=3) as on:
            gate = on.wire.hold()
            many = on.looped.swap([claim(number) for number in range(1, 11)])
            async with asyncio.timeout(TIMEOUT_S):
                assert list(await on.looped.swap([claim(11)])) == [None]
            monkeypatch.setattr(lanes, "PROMPT_S_MAX", TIMEOUT_S)
            gate.set()
            assert list(await many) == [None] * 10
            gate = on.wire.hold()
            many = on.looped.swap([claim(number) for number in range(21, 31)])
            await turns()
            late = on.looped.swap([claim(31)])
            await turns()
            assert on.wire.batches[3:] == [list(range(21, 31))]
            gate.set()
            assert await on.told(on.first, many, late) == [[None], [None] * 10, [None]]

    asyncio.run(scene())


def test_a_record_is_on_its_way_once_at_a_time_and_in_the_order_asked():
    """L1, L3: a free lane is no way to overtake."""

    async def scene() -> None:
        async with Scene(lanes=2) as on:
            again = on.looped.swap([change(0, 1), claim(5)])
            third = on.looped.swap([change(5, 1)])
            other = on.looped.swap([claim(1)])
            assert list(await other) == [None]
            assert on.wire.batches == [[0], [1]]
            assert await on.told(on.first, again, third) == [[None], [None, None], [None]]
            assert on.wire.batches == [[0], [1], [0, 5], [5]]

    asyncio.run(scene())


def test_swaps_of_one_record_on_one_loop_never_share_a_batch():
    """L1: nor do two bulk swaps that have one record in common."""

    async def scene() -> None:
        async with Scene() as on:
            rest = [
                on.looped.swap([claim(1), claim(2)]),
                on.looped.swap([claim(2, nonce=2), claim(3)]),
                on.looped.swap([claim(4)]),
                on.looped.swap([claim(1, nonce=2)]),
            ]
            winners = [claim(2).record, None], [claim(1).record]
            told = await on.told(*rest)
            assert told == [[None, None], winners[0], [None], winners[1]]
            assert on.wire.batches == [[0], [1, 2, 4], [2, 3, 1]]

    asyncio.run(scene())


def test_a_batch_of_a_loop_has_a_limit_and_the_rest_follows():
    """D2: the last member of a batch does not wait for a thousand others."""

    async def scene() -> None:
        async with Scene() as on:
            rest = [on.looped.swap([claim(number)]) for number in range(1, 601)]
            assert await on.told(*rest) == [[None]] * 600
            assert [len(batch) for batch in on.wire.batches] == [1, BATCH_MAX, BATCH_MAX, 88]

    asyncio.run(scene())


# --- trouble -----------------------------------------------------------------------------------


def test_a_bad_record_on_a_wire_fails_alone():
    """D2: its company is written all the same."""

    async def scene() -> None:
        async with Scene() as on:
            on.store.failing[id_of(2)] = bad = ValueError("too large")
            rest = [on.looped.swap([claim(number)]) for number in (1, 2, 3)]
            assert await on.told(*rest) == [[None], bad, [None]]
            assert on.wire.batches == [[0], [1, 2, 3], [1], [2], [3]]
            assert list(await on.looped.get([id_of(3)])) == [claim(3).record]

    asyncio.run(scene())


def test_a_loop_is_told_at_once_that_the_server_does_not_answer():
    """D2: every caller gets an error of its own, and the batch is not repeated."""

    async def scene() -> None:
        async with Scene() as on:
            on.store.failing[id_of(2)] = StoreUnavailable("gone", is_ambiguous=True)
            rest = [on.looped.swap([claim(number)]) for number in (1, 2, 3)]
            errors = await on.told(*rest)
            assert [str(error) for error in errors] == ["gone"] * 3
            assert [error.is_ambiguous for error in errors] == [True] * 3
            assert len({id(error) for error in errors}) == 3
            assert len(on.wire.batches) == 2

    asyncio.run(scene())


def test_whatever_a_wire_throws_every_caller_is_answered():
    """D2: fail closed, then go on."""

    async def scene() -> None:
        async with Scene() as on:
            on.store.failing[id_of(2)] = Interrupted()
            rest = [on.looped.swap([claim(number)]) for number in (1, 2)]
            errors = await on.told(*rest)
            assert [type(error) for error in errors] == [StoreUnavailable] * 2
            assert all(error.is_ambiguous for error in errors)
            assert list(await on.looped.swap([claim(3)])) == [None]

    asyncio.run(scene())


@pytest.mark.parametrize("kind", [ValueError, StopIteration])
def test_a_wire_that_raises_before_it_gives_anything_back_is_heard_all_the_same(kind):
    """D2: nobody waits for a batch that never left; no future takes a `StopIteration`."""

    async def scene() -> None:
        async with Scene() as on:
            await on.told(on.first)

            def raise_at_once(_swaps: Sequence[Swap]) -> Any:
                raise kind("not today")

            looped, way = on.looped, on.looped._ways[on.wire.loop]
            way._swaps._call = raise_at_once  # type: ignore[union-attr]
            asked = [looped.swap([claim(number)]) for number in (1, 2, 3)]
            assert [str(error) for error in await on.told(*asked)] == ["not today"] * 3
            way._swaps._call = on.wire.swap  # type: ignore[union-attr]
            assert list(await looped.swap([claim(4)])) == [None]

    asyncio.run(scene())


def test_a_wire_that_is_interrupted_at_once_leaves_nobody_waiting():
    """D2: whoever asked is interrupted, as it would be anywhere; the lane is free again."""

    async def scene() -> None:
        async with Scene() as on:
            await on.told(on.first)

            def interrupt(_swaps: Sequence[Swap]) -> Any:
                raise Interrupted

            way = on.looped._ways[on.wire.loop]
            way._swaps._call = interrupt  # type: ignore[union-attr]
            with pytest.raises(Interrupted):
                on.looped.swap([claim(1)])
            way._swaps._call = on.wire.swap  # type: ignore[union-attr]
            async with asyncio.timeout(TIMEOUT_S):
                assert list(await on.looped.swap([claim(2)])) == [None]

    asyncio.run(scene())


def test_a_wire_that_miscounts_is_asked_for_each_alone():
    """D2: an answer that belongs to nobody is given to nobody."""

    async def scene() -> None:
        async with Scene() as on:
            get = on.store.get
            on.store.get = lambda ids: [*get(ids)][:1]  # type: ignore[method-assign]
            gate = on.wire.hold()
            first = asyncio.ensure_future(on.looped.get([id_of(0)]))
            await turns()
            two = [asyncio.ensure_future(on.looped.get([id_of(0)])) for _ in range(2)]
            both = asyncio.ensure_future(on.looped.get([id_of(0), id_of(1)]))
            await turns()
            gate.set()
            assert await asyncio.gather(first, *two, both) == [[None], [None], [None], [None, None]]

    asyncio.run(scene())


def test_a_prompt_future_tells_in_the_same_turn_and_can_be_awaited():
    """L1: and who comes late is told a turn later."""

    async def scene() -> None:
        heard: list[object] = []
        good: Prompt[int] = Prompt()
        good.tell(lambda future: heard.append(future.result()))
        good.set_result(1)
        assert heard == [1]
        good.tell(lambda future: heard.append(future.result() + 1))
        assert heard == [1]
        assert await good == 1
        await turns()
        assert heard == [1, 2]
        bad: Prompt[int] = Prompt()
        bad.tell(lambda future: heard.append(future.exception()))
        bad.set_exception(ValueError("no"))
        assert str(heard[2]) == "no"

    asyncio.run(scene())


def test_a_caller_that_hangs_up_on_a_loop_is_forgotten_and_its_write_is_not():
    """L11: it cancels neither its neighbours nor what it asked for."""

    async def scene() -> None:
        async with Scene() as on:
            kept, cancelled, other = (on.looped.swap([claim(number)]) for number in (1, 2, 3))
            on.first.cancel()
            cancelled.cancel()
            assert await on.told(kept, other) == [[None], [None]]
            standing = await on.looped.get([id_of(0), id_of(2)])
            assert list(standing) == [claim(0).record, claim(2).record]

    asyncio.run(scene())


def test_a_call_that_is_cancelled_on_its_way_is_made_by_a_thread():
    """L11: as when an event loop ends, which cancels every task it knows."""

    async def scene() -> None:
        async with Scene() as on:
            rest = [on.looped.swap([claim(number)]) for number in (1, 2)]
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            assert await on.told(on.first, *rest) == [[None]] * 3
            assert len(on.store.threads) == 2

    asyncio.run(scene())


def test_a_call_that_was_cancelled_on_its_way_and_finds_no_thread_is_a_doubt(monkeypatch):
    """L1: it was sent, so it may have taken effect."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scene() -> None:
        async with Scene() as on:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                (error,) = await on.told(on.first)
            assert isinstance(error, StoreUnavailable)
            assert error.is_ambiguous
            assert list(await on.looped.swap([claim(1)])) == [None]

    asyncio.run(scene())


# --- loops -------------------------------------------------------------------------------------


def test_several_event_loops_have_a_wire_each():
    """L1: every answer reaches the loop and the task that asked, under load."""
    store = WiredStore(lanes=2)
    looped = LoopedStore(store)
    pause = random.Random(11)

    async def client(number: int) -> int:
        won = 0
        for round in range(10):
            mine = claim(1_000 * number + round, nonce=number)
            shared = claim(1_000_000 + round, nonce=number)
            lost, standing = await looped.swap([mine, shared])
            assert lost is None
            won += standing is None
            assert standing is None or standing.id == shared.id
            for _ in range(pause.randrange(3)):
                await asyncio.sleep(0)
            assert list(await looped.get([mine.id])) == [mine.record]
        return won

    async def clients(start: int) -> int:
        return sum(await asyncio.gather(*(client(start + n) for n in range(10))))

    with ThreadPoolExecutor(4) as threads:
        loops = threads.map(lambda n: asyncio.run(clients(10 * n)), range(4), timeout=TIMEOUT_S)
        assert sum(loops) == 10
    assert len(store.wires) == 4
    assert all(wire.is_closed for wire in store.wires)
    asyncio.run(looped.close())
    assert store.is_closed


def test_a_loop_that_ends_finishes_its_writes_and_lets_go_of_its_wire():
    """D1, D4: also where nobody has closed the store."""
    store = WiredStore()
    looped = LoopedStore(store)

    async def leave() -> None:
        looped.swap([claim(0)])
        looped.swap([claim(1)])

    asyncio.run(leave())
    assert store.wires[0].is_closed
    assert list(store.get([id_of(0), id_of(1)])) == [claim(0).record, claim(1).record]

    async def come_back() -> None:
        assert list(await looped.swap([claim(1)])) == [claim(1).record]
        await looped.close()

    asyncio.run(come_back())
    assert [wire.closings for wire in store.wires] == [1, 1]


def test_what_a_loop_that_was_closed_has_not_written_is_written_by_a_thread():
    """D1: such a loop has had no time to finish anything."""
    store = WiredStore()
    looped = LoopedStore(store)
    ended = asyncio.new_event_loop()

    def ask_and_stop() -> None:
        looped._ways[ended] = looped._way_of(ended)
        looped._ways[ended]._swaps._is_busy = True  # type: ignore[union-attr]
        looped.swap([claim(1)])
        ended.stop()

    ended.call_soon(ask_and_stop)
    ended.run_forever()
    ended.close()
    assert store.get([id_of(1)]) == [None]

    async def scene() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            assert list(await looped.swap([claim(2)])) == [None]
            await looped.close()

    asyncio.run(scene())
    assert list(store.get([id_of(1)])) == [claim(1).record]
    assert [wire.is_closed for wire in store.wires] == [True, True]


def test_a_store_that_is_forgotten_lets_go_of_its_wire():
    """D4: nobody can use it any more."""

    async def scene() -> None:
        store = WiredStore()
        looped = LoopedStore(store)
        await looped.swap([claim(1)])
        del looped
        gc.collect()
        await turns()
        assert store.wires[0].is_closed

    asyncio.run(scene())


def test_a_loop_that_can_have_no_wire_is_served_by_a_thread():
    """L1: such as one that cannot watch sockets."""

    class Wireless(WiredStore):
        def wire(self) -> Wire:
            raise NotImplementedError

    async def scene() -> None:
        store = Wireless()
        looped = LoopedStore(store)
        async with asyncio.timeout(TIMEOUT_S):
            assert list(await looped.swap([claim(1)])) == [None]
            assert list(await looped.get([id_of(1)])) == [claim(1).record]
            await looped.close()
        assert threading.current_thread() not in store.threads
        assert store.is_closed

    asyncio.run(scene())


# --- the end -----------------------------------------------------------------------------------


def test_an_empty_swap_on_a_loop_is_answered():
    """D1: with as many answers as questions."""

    async def scene() -> None:
        store = WiredStore()
        looped = LoopedStore(store)
        async with asyncio.timeout(TIMEOUT_S):
            assert list(await looped.swap([])) == []
            assert list(await looped.get([])) == []
        assert store.wires[0].batches == []
        assert looped.blocking is store
        await looped.close()

    asyncio.run(scene())


def test_closing_finishes_what_is_on_its_way_and_refuses_what_comes_after():
    """D2: nobody hangs on a closed store, and it is closed once however often it is told."""

    async def scene() -> None:
        async with Scene() as on:
            before = [on.looped.swap([claim(1)]), asyncio.ensure_future(on.looped.get([id_of(9)]))]
            closing = [asyncio.ensure_future(on.looped.close()) for _ in range(2)]
            await turns()
            after = [
                on.looped.swap([claim(2)]),
                asyncio.ensure_future(on.looped.get([id_of(0)])),
            ]
            refused = await asyncio.gather(*after, return_exceptions=True)
            assert {type(error) for error in refused} == {StoreUnavailable}
            assert not on.wire.is_closed
            assert await on.told(on.first, *before) == [[None], [None], [None]]
            await asyncio.gather(*closing)
            assert on.wire.is_closed
            assert on.store.is_closed
            with pytest.raises(StoreUnavailable):
                await on.looped.swap([claim(3)])
            with pytest.raises(StoreUnavailable):
                await on.looped.find(Query())
        assert id_of(2) not in on.store._records

    asyncio.run(scene())


# Loads like a server that forks its workers: used before the fork, and after it in both.
FORKED = """
import asyncio, os
from coatcheck.stores.looped import LoopedStore
from coatcheck.stores.memory import MemoryStore

class Wire:
    lanes = 1
    def __init__(self):
        self.pid = os.getpid()
    async def swap(self, swaps):
        raise NotImplementedError
    async def get(self, ids):
        assert self.pid == os.getpid()
        return [None for _ in ids]
    async def close(self):
        assert self.pid == os.getpid()

class Store(MemoryStore):
    def wire(self):
        return Wire()

store = LoopedStore(Store())

async def use():
    async with asyncio.timeout(10):
        return list(await store.get([b""]))

kept = asyncio.new_event_loop()
assert kept.run_until_complete(use()) == [None]
child = os.fork()
assert asyncio.run(use()) == [None]
if child == 0:
    os._exit(0)  # else it would close its parent's event loop
else:
    assert kept.run_until_complete(use()) == [None]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kept.run_until_complete(store.close())
    kept.close()
"""


def test_a_looped_store_works_on_in_a_forked_child():
    """L1, D2: with a wire of its own, while the parent keeps the old one."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        command, env=environment, timeout=3 * TIMEOUT_S, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (0, "")
