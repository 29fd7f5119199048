"""The rules for what happens between claim and completion: steps, deferred work, decisions.

A part of `rules`. What an attempt has written down is for the next one, so it may not be lost; what
was begun and may happen once is not begun again, unless an operator says so; only deferred work
is taken up elsewhere; and its executor, a reconciler or an operator ends a doubt.
"""

from __future__ import annotations

import functools

from coatcheck.core.progress import Progress, progress_of
from coatcheck.core.record import COMPLETED, GONE, IN_DOUBT, RUNNING, Record
from coatcheck.core.response import decode_value

from .downstream import Generation, generation_of
from .world import World


class ProgressRules:
    """What has happened between claim and completion, and whether it was right."""

    def __init__(self, world: World) -> None:
        self.require = world.require
        self._offered: dict[int, int] = {}  # by the nonce of the attempt that defers: for how long
        self._runs: set[tuple[Generation, str]] = set()  # of steps that may happen at most once
        self._results: dict[tuple[Generation, str], bytes] = {}  # of those that are done

    # --- deferred work ------------------------------------------------------------------------

    def offers(self, nonce: int, lease_ms: int) -> None:
        """The attempt of *nonce* defers its work, to be taken up within *lease_ms*."""
        self._offered[nonce] = lease_ms

    def offered_ms(self, nonce: int) -> int:
        """For how long the attempt of *nonce* has deferred its work; 0: it has not."""
        return self._offered.get(nonce, 0)

    def check_handed(self, before: Record) -> None:
        """Another process continues the attempt of *before*."""
        is_offered = before.nonce in self._offered
        self.require(is_offered, "only deferred work is taken up elsewhere")

    # --- steps --------------------------------------------------------------------------------

    def step_runs(self, claim: Record, name: str, current: Record, *, is_lost: bool) -> None:
        """
        The step *name* begins for *claim*, while *current* is in the store.

        *is_lost*: the attempt knew before that its lease is over.
        """
        self.require(not is_lost, "an attempt that has lost its claim takes no further step")
        if current.nonce == claim.nonce:
            step = _progress(current.progress).step(name)
            is_done = step is not None and step.value is not None
            self.require(not is_done, "a step that is done does not run again")
        if name == "charge":
            run = (generation_of(claim), name)
            self.require(run not in self._runs, "a step at most once does not run again")
            self._runs.add(run)

    def step_result(self, claim: Record, name: str, result: bytes) -> None:
        """The handler of *claim* was given *result* of the step *name*."""
        known = self._results.get((generation_of(claim), name))
        self.require(known == result, "a step has one result, which is the one in the record")

    # --- what is written down -----------------------------------------------------------------

    def check_written(self, before: Record, record: Record, writer: object) -> None:
        """What was written down in a generation stays; *writer* has put *record* there now."""
        is_decision = _is_operator(writer) and getattr(writer, "nonce", 0) != before.nonce
        if before.progress == record.progress:
            self.require(not is_decision, "no decision is without its author and its reason")
            return
        was, now = _progress(before.progress), _progress(record.progress)
        is_kept = now.notes[: len(was.notes)] == was.notes
        self.require(is_kept, "what was noted stays")
        decisions = len(now.resolutions) - len(was.resolutions)
        is_recorded = decisions == is_decision
        is_recorded = is_recorded and now.resolutions[: len(was.resolutions)] == was.resolutions
        self.require(is_recorded, "no decision is without its author and its reason")
        for step in now.steps:
            if step.value is not None:
                self._results.setdefault(
                    (generation_of(record), step.name), decode_value(step.value)
                )
            elif is_decision:
                is_completed = record.state == COMPLETED
                self.require(
                    is_completed, "a step that did not happen, says an operator, may be taken again"
                )
        for step in was.steps:
            later = now.step(step.name)
            if step.value is not None:
                is_kept = later is not None and later.value == step.value
                self.require(is_kept, "what a step has returned stays")
            elif later is None:
                self.require(is_decision, "what was begun stays until an operator decides")
                self._runs.discard((generation_of(record), step.name))

    def check_doubt(self, before: Record, record: Record, writer: object, *, asks: bool) -> None:
        """*record* has replaced *before*: check who ended a doubt."""
        if before.state != IN_DOUBT or _is_operator(writer):
            return
        if record.state == RUNNING:
            self.require(asks, "nothing in doubt runs again before the application is asked")
        else:
            is_own = getattr(writer, "nonce", before.nonce) == before.nonce
            self.require(is_own, "only its executor or an operator ends a doubt")


@functools.lru_cache(maxsize=100)  # what was written last is asked for again
def _progress(written: bytes | None) -> Progress:
    return progress_of(GONE._replace(progress=written))


def _is_operator(writer: object) -> bool:
    return getattr(writer, "is_operator", False)
