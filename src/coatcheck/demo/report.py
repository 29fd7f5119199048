"""Counts what happened, and prints it on a screen of 80 by 24.

The provider's table says what was charged, the receipts say what the client received; for each
order both must agree. On a terminal each half has a progress bar; in a file it is one line.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from coatcheck.demo.client import Receipt
from coatcheck.demo.servers import RECOVERY

# Name at most 3 orders in a message.
_NAMED_MAX = 3
# 20 frames a second look smooth.
_FRAME_S = 0.05
_BAR_COLUMNS = 24

_INTRODUCTION = """\
A shop takes {orders:,} orders over HTTP and charges each through a payment
provider. The network loses a third of the responses, so the client retries;
some requests are sent twice; half-way, the shop is killed with kill -9.
"""

# What makes it true: coatcheck alone cannot know what a killed shop had already done.
_CONDITION = """\
The condition: each charge is sent with the key operation.derive("charge"),
which is the same in every attempt at an order, so the provider charges once."""

_BOLD, _DIM, _RED, _GREEN = "1", "2", "31", "32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One half of the demo: a column of the table."""

    orders: int
    requests: int
    responses_lost: int
    repeated: int
    kills: int
    charges: int
    double_charged: int
    overcharged_cents: int
    seconds: float
    broken: tuple[str, ...]  # sentences about orders that were not charged and confirmed once


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One interesting order, and the command that shows it."""

    name: str
    reference: str
    attempt: int
    requests: int
    lookup: str  # "": the files are removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Both halves."""

    seed: int
    without_keys: Summary
    with_coatcheck: Summary
    seconds: float
    directory: Path | None  # None: the files are removed
    example: Example | None

    @property
    def promise_held(self) -> bool:
        """With coatcheck every order was charged once and confirmed with one number."""
        return not self.with_coatcheck.broken


def summarize(
    receipts: Sequence[Receipt], charges: Sequence[tuple[str, int]], *, kills: int, seconds: float
) -> Summary:
    """Compare the charges with the orders."""
    times = Counter(name for name, _cents in charges)
    over = Counter({receipt.order.name: -receipt.order.cents for receipt in receipts})
    for name, cents in charges:
        over[name] += cents
    return Summary(
        orders=len(receipts),
        requests=sum(receipt.requests for receipt in receipts),
        responses_lost=sum(receipt.responses_lost for receipt in receipts),
        repeated=sum(receipt.order.is_repeated for receipt in receipts),
        kills=kills,
        charges=len(charges),
        double_charged=sum(number > 1 for number in times.values()),
        overcharged_cents=sum(cents for cents in over.values() if cents > 0),
        seconds=round(seconds, 2),
        broken=tuple(_broken(receipts, times, over)),
    )


def _broken(receipts: Sequence[Receipt], times: Counter[str], over: Counter[str]) -> list[str]:
    """Return every way in which "each order is charged and confirmed once" is not true."""
    names = [receipt.order.name for receipt in receipts]
    failures = {
        "charged more than once": [name for name in names if times[name] > 1],
        "never charged": [name for name in names if not times[name]],
        "charged a wrong amount": [n for n in names if times[n] == 1 and over[n]],
        "charged but never ordered": sorted(set(times) - set(names)),
        "never confirmed": [r.order.name for r in receipts if not r.is_confirmed],
        "confirmed with several numbers": [r.order.name for r in receipts if len(r.numbers) > 1],
    }
    return [_sentence(failure, named) for failure, named in failures.items() if named]


def _sentence(failure: str, names: list[str]) -> str:
    more = " and more" if len(names) > _NAMED_MAX else ""
    noun = "order was" if len(names) == 1 else "orders were"
    return f"{len(names)} {noun} {failure} ({', '.join(names[:_NAMED_MAX])}{more})"


class Display:
    """Writes to *stream*, with colours and a progress bar if it is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colours = self._is_live and not os.environ.get("NO_COLOR")
        self._drawn_s = 0.0
        self._full, self._empty, self._good, self._bad = "█", "░", "✔", "✘"
        try:
            "█░✔✘".encode(stream.encoding or "ascii")
        except (LookupError, UnicodeEncodeError):
            self._full, self._empty, self._good, self._bad = "#", ".", "ok:", "FAILED:"

    def show_introduction(self, *, orders: int, seed: int) -> None:
        """Print what is about to happen."""
        self._line(self._paint("coatcheck demo", _BOLD) + self._paint(f"   seed {seed}", _DIM))
        self._line(_INTRODUCTION.format(orders=orders))

    def show_progress(self, title: str, done: int, total: int, *, note: str = "") -> None:
        """Draw the progress bar of the current half; on a terminal only, and not too often."""
        now_s = time.monotonic()
        if self._is_live and now_s - self._drawn_s >= _FRAME_S:
            self._drawn_s = now_s
            count = f"{done:>6,} of {total:,}"
            # Cut, because a line that wraps cannot be overwritten.
            left = _columns() - len(f"  {title:<15} {count}  ") - _BAR_COLUMNS - 1
            note = self._paint(note[: max(0, left)], _DIM)
            line = f"  {title:<15} {self._bar(done / total)}{count}  {note}"
            self._stream.write(f"\r\x1b[2K{line}")
            self._stream.flush()

    def show_half(self, title: str, summary: Summary) -> None:
        """Print the line of a finished half."""
        if self._is_live:
            self._stream.write("\r\x1b[2K")
        count = f"{summary.orders:>6,} orders"
        self._line(f"  {title:<15} {self._bar(1.0)}{count}  {summary.seconds:5.1f} s")

    def interrupt(self) -> None:
        """End the line of the progress bar."""
        if self._is_live:
            self._line()

    def show_result(self, result: Result) -> None:
        """Print the table, the result, and how to look at an order."""
        self._line()
        self._show_table(result)
        self._line()
        words, colour = f"{self._good} Every order was charged exactly once.", _GREEN
        if not result.promise_held:
            words = f"{self._bad} Not every order was charged exactly once (seed {result.seed})."
            colour = _RED
        where = "" if result.directory is None else f", files in {result.directory}"
        took = self._paint(f"  {result.seconds:.1f} s{where}", _DIM)
        self._line(self._paint(words, _BOLD, colour) + took)
        for sentence in result.with_coatcheck.broken:
            self._line(f"  {sentence}")
        if result.promise_held:
            self._line(_CONDITION)
        if result.example is not None:
            self._show_example(result.example)

    def _show_table(self, result: Result) -> None:
        left, right = result.without_keys, result.with_coatcheck
        self._line(self._paint(f"  {'':<28}{'without keys':>16}{'with coatcheck':>18}", _DIM))
        for name, one, other in (
            ("orders", left.orders, right.orders),
            ("requests sent", left.requests, right.requests),
            ("responses lost", left.responses_lost, right.responses_lost),
            ("sent twice at the same time", left.repeated, right.repeated),
            ("shop killed", left.kills, right.kills),
            ("recovery after the kill", "-", RECOVERY),
            ("charges by the provider", left.charges, right.charges),
        ):
            cells = [cell if isinstance(cell, str) else f"{cell:,}" for cell in (one, other)]
            self._line(f"  {name:<28}{cells[0]:>16}{cells[1]:>18}")
        twice = (left.double_charged, right.double_charged)
        self._show_errors("orders charged twice or more", twice, "{:,}")
        dollars = (left.overcharged_cents / 100, right.overcharged_cents / 100)
        self._show_errors("overcharged", dollars, "${:,.2f}")

    def _show_errors(self, name: str, values: tuple[float, float], form: str) -> None:
        """Print a row whose cells are red unless they are zero."""
        cells = [
            self._paint(f"{form.format(value):>{columns}}", _BOLD, _RED if value else _GREEN)
            for value, columns in zip(values, (16, 18), strict=True)
        ]
        self._line(f"  {name:<28}{''.join(cells)}")

    def _show_example(self, example: Example) -> None:
        if example.attempt > 1:
            what = f"running when the shop was killed; attempt {example.attempt} completed it"
        else:
            what = f"sent {example.requests} times"
        if not example.lookup:
            self._line(f"{example.name} was {what}.")
            return
        self._line(f"{example.name} was {what}:")
        lookup = example.lookup
        if self._is_live and len(lookup) + 2 > _columns():
            lookup = lookup.replace(" --store", " \\\n      --store")
        self._line(f"  {self._paint(lookup, _BOLD)}")

    def _bar(self, share: float) -> str:
        full = round(share * _BAR_COLUMNS)
        return self._full * full + self._paint(self._empty * (_BAR_COLUMNS - full), _DIM)

    def _paint(self, text: str, *codes: str) -> str:
        if not self._has_colours or not text:
            return text
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"

    def _line(self, text: str = "") -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def _columns() -> int:
    return shutil.get_terminal_size().columns
