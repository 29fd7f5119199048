"""Key quota: how many keys each caller has in use, if a policy limits that.

Counted in each process, and only for policies with a limit: it stops floods, and is not exact
across nodes. A caller's count is bounded by its limit, and the number of callers by a constant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from heapq import heappop, heappush

# The least active callers are forgotten first, which resets their count.
CALLERS_MAX = 10_000


class _Keys:
    """The keys of one caller; routes have different windows, so the first key may end last."""

    __slots__ = ("_ends", "_ids")

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._ends: list[tuple[int, bytes]] = []  # a heap: the next to end is first

    def admit(self, id: bytes, *, now_ms: int, ends_ms: int, keys_max: int) -> bool:
        while self._ends and self._ends[0][0] <= now_ms:
            self._ids.discard(heappop(self._ends)[1])
        if id in self._ids:
            return True
        if len(self._ids) >= keys_max:
            return False
        self._ids.add(id)
        heappush(self._ends, (ends_ms, id))
        return True


class KeyQuota:
    """The keys of each caller whose windows this process saw begin."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, _Keys] = OrderedDict()
        self._mutex = threading.Lock()

    def admits(self, caller: str, id: bytes, *, now_ms: int, ends_ms: int, keys_max: int) -> bool:
        """
        *caller* may use the key of *id*; it counts from now on, until *ends_ms*.

        It counts before it runs, because a flood comes at once, and once however often it is tried.
        """
        with self._mutex:
            keys = self._callers.get(caller)
            if keys is None:
                keys = self._callers[caller] = _Keys()
            self._callers.move_to_end(caller)
            while len(self._callers) > CALLERS_MAX:
                self._callers.popitem(last=False)
            return keys.admit(id, now_ms=now_ms, ends_ms=ends_ms, keys_max=keys_max)
