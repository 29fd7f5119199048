"""The crowd: how many keys each caller has in use, where a policy limits that (X2).

Counted in each process, and only for policies that ask for it: a limit against floods, not an
account. A caller's count is bounded by its limit, and the number of callers by a constant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

# The quietest callers are forgotten first, which frees them.
CALLERS_MAX = 10_000


class Crowd:
    """When the windows of each caller's keys end, as this process saw them begin."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, dict[bytes, int]] = OrderedDict()
        self._mutex = threading.Lock()

    def admits(self, caller: str, id: bytes, *, now_ms: int, ends_ms: int, keys_max: int) -> bool:
        """
        *caller* may use the key of *id*, and has it in use from now on, until *ends_ms*.

        Counted before it runs, because a flood comes at once; and once, however often it is tried.
        """
        with self._mutex:
            keys = self._callers.setdefault(caller, {})
            self._callers.move_to_end(caller)
            while len(self._callers) > CALLERS_MAX:
                self._callers.popitem(last=False)
            while keys and keys[oldest := next(iter(keys))] <= now_ms:
                del keys[oldest]
            if id not in keys and len(keys) >= keys_max:
                return False
            keys.setdefault(id, ends_ms)
            return True
