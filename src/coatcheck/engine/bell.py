"""The bell: who waits on another node is woken at once, where the store can carry a word.

Nobody says anything unless somebody waits, so an operation that nobody waits for costs nothing.
Three words go round, each about one operation:

    waiting   said by who waits for what is not executed here
    held      said by who executes it and has heard that: its end will be rung
    ended     said by who has executed it

Whoever hears one of the last two looks at the store, because the store is the truth: no word
carries a record, and a word that is lost costs the time until the next look, and nothing else.

Nothing falls between. Who says "held" has first written down that somebody wants to know; whoever
ends the operation looks there after the end is written. So either the end is rung, or it was
written before "held" was said, and is seen by the look that follows it.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress

from coatcheck.engine.waiting import Line, jittered, poll_pauses_s
from coatcheck.stores.contract import Bell

logger = logging.getLogger("coatcheck")

# The pause between two looks where somebody has promised to ring. 1 s: a fourth of the looks there
# would be without a bell, and all that is lost with a word that does not get through.
POLL_PROMISED_S = 1.0
# How long the bell may be silent before we ask whether it is still there.
PING_EVERY_S = 10.0
# Tried again soon, because most restarts are short; then rarely, because waiters do without.
BACKOFF_FIRST_S = 0.1
BACKOFF_LAST_S = 10.0
FAILURES_MAX = 10  # counted no further: the pause does not grow any more
# 10 000 words that could not be said yet; then the oldest are not said at all.
OUTBOX_MAX = 10_000
# 100 words of 34 characters are well below what can be said at once (`BELL_CHARS_MAX`).
WORDS_MAX = 100

_WAITING, _HELD, _ENDED = "w", "h", "e"


class Doorbell:
    """
    One node's end of the bell; made by the desk, for one process.

    Args:
        bell: what carries the words; None where the store has nothing for it.
        line: who waits here.
        here: what is executed in this process, in all its kinds.
    """

    def __init__(self, bell: Bell | None, line: Line, here: Sequence[Container[bytes]]) -> None:
        self.is_idle = bell is not None  # there is one, and nobody has needed it yet
        self.is_open = False
        self._bell = bell
        self._line = line
        self._here = here
        self._outbox: deque[str] = deque(maxlen=OUTBOX_MAX)
        self._failures = 0  # in a row
        self._is_closed = False
        self._waker: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()

    def pauses_s(self, id: bytes) -> Iterator[float]:
        """How long to wait for *id* before each look at the store."""
        for look, pause_s in enumerate(poll_pauses_s(), 1):
            if self._is_here(id):  # its end will wake us
                yield math.inf
            elif self._line.is_promised(id):
                yield jittered(POLL_PROMISED_S)
            else:
                # Said at the first, second, fourth, eighth … look: whoever has won the claim a
                # moment ago may not have known so yet.
                if look & (look - 1) == 0:
                    self.listen()
                    self._say(_WAITING, id)
                yield pause_s

    def listen(self) -> None:
        """Begin to, if there is a bell; in the background, because a request has no time for it."""
        with self._mutex:
            is_first, self.is_idle = self.is_idle, False
        if is_first:
            try:
                self._start()
            except (OSError, RuntimeError) as error:  # no room for it: then it goes without
                self._log_failure(error)

    def _start(self) -> None:
        # Whatever is written to one end wakes the thread, which waits at the other.
        self._ears, self._waker = socket.socketpair()
        self._ears.settimeout(0)
        self._waker.settimeout(0)
        thread = threading.Thread(target=self._attend, name="coatcheck-bell", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """End the thread, and wait for its end."""
        self.end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def end(self) -> None:
        """Have the thread end. Takes no lock: it may be called while anything is thrown away."""
        self._is_closed = True
        self.is_idle = False
        self._wake()

    def _say(self, word: str, id: bytes) -> None:
        if self.is_open:  # else whoever waits is announced when it is
            self._outbox.append(word + id.hex())
            self._wake()

    def _say_ended(self, id: bytes) -> None:
        self._say(_ENDED, id)

    def _is_here(self, id: bytes) -> bool:
        return any(id in executed for executed in self._here)

    def _wake(self) -> None:
        if self._waker is not None:
            with suppress(OSError):  # full: it is being woken; closed: it has ended
                self._waker.send(b"!")

    # --- the thread ---------------------------------------------------------------------------

    def _attend(self) -> None:
        """Keep the bell open for as long as this engine lives."""
        assert self._bell is not None
        while not self._is_closed:
            try:
                if not self._bell.open():
                    logger.info("there is no bell behind a pooler: who waits looks at the store")
                    break
                self._converse(self._bell)
            except Exception as error:  # noqa: BLE001 - requests do without it, whatever it was
                self._log_failure(error)
            finally:
                self._hang_up(self._bell)
            self._wait(jittered(min(BACKOFF_FIRST_S * 2.0**self._failures, BACKOFF_LAST_S)))
            self._failures = min(self._failures + 1, FAILURES_MAX)
        for end in (self._ears, self._waker):
            if end is not None:
                end.close()

    def _converse(self, bell: Bell) -> None:
        """Say and hear, until something breaks or the engine is gone."""
        self.is_open = True
        for id in self._line.ids():  # they have joined before, so they could not be announced
            if not self._is_here(id):
                self._say(_WAITING, id)
        while True:
            is_last = self._is_closed  # what was to be said before that is said
            self._ring(bell)
            if is_last:
                return
            heard = bell.heard()
            for words in heard:
                self._hear(words)
            if heard:
                self._log_success()
            if not self._wait(PING_EVERY_S, bell):
                bell.ping()
                self._log_success()
                self._line.forget_wanted(self._is_here)

    def _ring(self, bell: Bell) -> None:
        words: dict[str, None] = {}  # many may wait for the same
        while self._outbox:
            words[self._outbox.popleft()] = None
        each = list(words)
        for start in range(0, len(each), WORDS_MAX):
            bell.ring(" ".join(each[start : start + WORDS_MAX]))

    def _hear(self, words: str) -> None:
        for word in words.split():
            try:
                id = bytes.fromhex(word[1:])
            except ValueError:  # none of ours
                continue
            is_here = self._is_here(id)
            if word[0] == _WAITING:
                # First written down, then said: see above.
                if is_here and self._line.want(id, self._say_ended):
                    self._say(_HELD, id)
            elif not is_here:  # else it is our own word, and who waits here is told without it
                self._line.nudge(id, is_promised=word[0] == _HELD)

    def _wait(self, timeout_s: float, *bells: Bell) -> bool:
        """Until there is something to say or to hear; False where there was nothing."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ears, selectors.EVENT_READ)
            for bell in bells:
                selector.register(bell, selectors.EVENT_READ)
            is_woken = bool(selector.select(0 if self._is_closed else timeout_s))
        with suppress(BlockingIOError):
            self._ears.recv(1_024)
        return is_woken

    def _hang_up(self, bell: Bell) -> None:
        self.is_open = False
        self._line.forget_promises()
        self._outbox.clear()
        with suppress(Exception):
            bell.close()

    def _log_failure(self, error: Exception) -> None:
        if not self._failures:  # once, however long it takes
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.warning("the bell does not ring, so who waits looks at the store: %s", reason)

    def _log_success(self) -> None:
        if self._failures:
            logger.info("the bell rings again")
            self._failures = 0
