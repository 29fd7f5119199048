"""Labels: few enough for a metrics database, whatever paths clients send.

The label of a declared route is its template, but that of another route is the path itself, and
there is no end of paths. A metrics database keeps a time series for each label. So a part of a path
that looks like an id is replaced, and there is a limit for all labels together.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from coatcheck.core.callables import check_function
from coatcheck.errors import Misconfigured

# 200: more than the routes of most APIs. With eight outcomes a metric has 1 600 series at most.
LABELS_MAX = 200
# The label of everything beyond the limit.
OTHER = "other"

# Labels whose answer is remembered; for more of them it is computed each time.
_REMEMBERED_MAX = 1_000
# A segment of a path with a digit, unless it is a word with one digit at its end ("v1", "oauth2")
# or a parameter of a template ("{order1}", "<int:order1>").
_ID = re.compile(r"(?<=/)(?!(?:[A-Za-z]+\d(?:[/ ]|$))|[{<])[^/ ]*\d[^/ ]*")


class Labels:
    """
    At most *labels_max* different labels, and "other".

    Args:
        label: returns the label of a metric for the label of a decision, in place of `without_ids`.
    """

    def __init__(self, labels_max: int, label: Callable[[str], str] | None) -> None:
        if label is not None:
            check_function("label", label)
        self._max = _limit(labels_max)
        self._label = label or without_ids
        self._remembered: dict[str, str] = {}
        self._used: set[str] = set()
        self._mutex = threading.Lock()

    def of(self, label: str) -> str:
        """The label of a metric for *label*, which is that of a decision."""
        found = self._remembered.get(label)
        return self._find(label) if found is None else found

    def _find(self, label: str) -> str:
        # A path may have bytes that are no text; a page of metrics must not fail because of them.
        found = self._label(label).encode("utf-8", "replace").decode()
        with self._mutex:
            if found not in self._used:
                if len(self._used) < self._max:
                    self._used.add(found)
                else:
                    found = OTHER
            if len(self._remembered) < _REMEMBERED_MAX:
                self._remembered[label] = found
        return found


def _limit(labels_max: object) -> int:
    if not isinstance(labels_max, int) or labels_max < 0:
        raise Misconfigured(f"labels_max is {labels_max!r}; it must be a number, 0 or more")
    return labels_max


def without_ids(label: str) -> str:
    """*label*, with `{id}` for each segment of its path that looks like an id."""
    return _ID.sub("{id}", label)
