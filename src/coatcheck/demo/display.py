"""The display: one calm screen of 80 by 24, on a terminal or in a file.

On a terminal each half has one line that grows; elsewhere a line is written when it is finished.
Nothing here counts or decides.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, TextIO

from coatcheck.demo.tally import Tally

if TYPE_CHECKING:
    from coatcheck.demo.story import Outcome

# 20 pictures a second look smooth.
_FRAME_S = 0.05
_BAR_COLUMNS = 24

_INTRODUCTION = """\
A shop takes {orders:,} orders over HTTP and charges each through a payment
provider. The network loses a third of the answers, so the client tries again;
some requests are sent twice at once; half-way, the shop is killed with kill -9.
"""

_BOLD, _DIM, _RED, _GREEN = "1", "2", "31", "32"


class Display:
    """Writes to *stream*; with colours and movement only where there is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colours = self._is_live and not os.environ.get("NO_COLOR")
        self._signs = _Signs(stream.encoding)
        self._drawn_s = 0.0

    def open(self, *, orders: int, seed: int) -> None:
        """Say what will happen."""
        self._line(self._paint("coatcheck demo", _BOLD) + self._paint(f"   seed {seed}", _DIM))
        self._line(_INTRODUCTION.format(orders=orders))

    def progress(self, title: str, done: int, total: int, *, note: str = "") -> None:
        """Draw the line of the half that runs; on a terminal only, and not too often."""
        now_s = time.monotonic()
        if self._is_live and now_s - self._drawn_s >= _FRAME_S:
            self._drawn_s = now_s
            counted = f"{done:>6,} of {total:,}"
            # Cut, because a line that wraps cannot be drawn over.
            left = _columns() - len(f"  {title:<15} {counted}  ") - _BAR_COLUMNS - 1
            note = self._paint(note[: max(0, left)], _DIM)
            line = f"  {title:<15} {self._bar(done / total)}{counted}  {note}"
            self._stream.write(f"\r\x1b[2K{line}")
            self._stream.flush()

    def finish(self, title: str, tally: Tally) -> None:
        """The line of a half that is over."""
        if self._is_live:
            self._stream.write("\r\x1b[2K")
        counted = f"{tally.orders:>6,} orders"
        self._line(f"  {title:<15} {self._bar(1.0)}{counted}  {tally.seconds:5.1f} s")

    def interrupt(self) -> None:
        """Leave the line that is being drawn, so that what follows begins on its own."""
        if self._is_live:
            self._line()

    def close(self, outcome: Outcome) -> None:
        """The table, the verdict, and where to look."""
        self._line()
        self._table(outcome)
        self._line()
        if outcome.promise_held:
            words = f"{self._signs.good} Every order was charged exactly once."
            colour = _GREEN
        else:
            words = f"{self._signs.bad} The promise did not hold (seed {outcome.seed})."
            colour = _RED
        where = f"  {outcome.seconds:.1f} s, files in {outcome.directory}"
        self._line(self._paint(words, _BOLD, colour) + self._paint(where, _DIM))
        for sentence in outcome.with_coatcheck.broken:
            self._line(f"  {sentence}")
        self._witness(outcome)

    def _table(self, outcome: Outcome) -> None:
        left, right = outcome.without_keys, outcome.with_coatcheck
        self._line(self._paint(f"  {'':<28}{'without keys':>16}{'with coatcheck':>18}", _DIM))
        for name, one, other in (
            ("orders", left.orders, right.orders),
            ("requests sent", left.requests, right.requests),
            ("answers lost", left.answers_lost, right.answers_lost),
            ("sent twice at once", left.repeated, right.repeated),
            ("shop killed", left.kills, right.kills),
            ("charges in the ledger", left.charges, right.charges),
        ):
            self._line(f"  {name:<28}{one:>16,}{other:>18,}")
        self._judged("orders charged twice or more", left.double_charged, right.double_charged)
        self._judged("overcharged", left.overcharged_cents, right.overcharged_cents, money=True)

    def _judged(self, name: str, left: int, right: int, *, money: bool = False) -> None:
        """A row in which anything but nothing is bad."""
        cells = [
            self._paint(
                f"{_money(value) if money else format(value, ','):>{columns}}",
                _BOLD,
                _RED if value else _GREEN,
            )
            for value, columns in ((left, 16), (right, 18))
        ]
        self._line(f"  {name:<28}{''.join(cells)}")

    def _witness(self, outcome: Outcome) -> None:
        witness = outcome.witness
        if witness is None:
            return
        if witness.attempt > 1:
            was = f"in the shop's hands when it was killed; attempt {witness.attempt} finished it"
        else:
            was = f"sent {witness.requests} times"
        self._line(f"\n{witness.name} was {was}:")
        lookup = witness.lookup
        if self._is_live and len(lookup) + 2 > _columns():
            lookup = lookup.replace(" --store", " \\\n      --store")
        self._line(f"  {self._paint(lookup, _BOLD)}")

    def _bar(self, share: float) -> str:
        full = round(share * _BAR_COLUMNS)
        empty = self._signs.empty * (_BAR_COLUMNS - full)
        return self._signs.full * full + self._paint(empty, _DIM)

    def _paint(self, text: str, *codes: str) -> str:
        if not self._has_colours or not text:
            return text
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"

    def _line(self, text: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class _Signs:
    """Characters that the stream can write."""

    def __init__(self, encoding: str | None) -> None:
        try:
            "█░✔✘".encode(encoding or "ascii")
        except (LookupError, UnicodeEncodeError):
            self.full, self.empty, self.good, self.bad = "#", ".", "ok:", "FAILED:"
        else:
            self.full, self.empty, self.good, self.bad = "█", "░", "✔", "✘"


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _money(cents: int) -> str:
    return f"${cents / 100:,.2f}"
