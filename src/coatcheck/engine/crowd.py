"""The crowd: how many keys each caller has in use, where a policy limits that (X2).

Counted in each process, and only for policies that ask for it: a limit against floods, not an
account. A caller's count is bounded by its limit, and the number of callers by a constant.
"""

from __future__ import annotations

from collections import OrderedDict

# The quietest callers are forgotten first, which frees them.
CALLERS_MAX = 10_000


class Crowd:
    """When the windows of each caller's keys end, as this process saw them begin."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, dict[bytes, int]] = OrderedDict()

    def is_full(self, caller: str, now_ms: int, keys_max: int) -> bool:
        """*caller* has *keys_max* keys whose window is not over."""
        keys = self._callers.get(caller)
        if keys is None:
            return False
        try:
            while keys[oldest := next(iter(keys))] <= now_ms:
                del keys[oldest]
        except (StopIteration, KeyError, RuntimeError):  # empty, or another thread was quicker
            pass
        return len(keys) >= keys_max

    def add(self, caller: str, id: bytes, ends_ms: int, keys_max: int) -> None:
        """*caller* used the key of *id*, whose window ends at *ends_ms*; each key counts once."""
        keys = self._callers.setdefault(caller, {})
        if id in keys or len(keys) < keys_max:
            keys.setdefault(id, ends_ms)
        self._callers.move_to_end(caller)
        while len(self._callers) > CALLERS_MAX:
            self._callers.popitem(last=False)
