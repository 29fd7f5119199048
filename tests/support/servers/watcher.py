"""A program that waits for the end of a test process, and then ends all that this one has started.

python watcher.py OWNER MARK DIRECTORY …

OWNER is the process that has started this program. MARK is in the environment of every process
that the owner starts, and in the name of every directory that it makes in one of the *directories*.
A process that is killed cannot clean up after itself, and its servers would run for ever.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# 0.2 s: soon for someone who looks, and seldom enough to cost nothing.
LOOK_EVERY_S = 0.2
# 10 s: a process that survives a kill for so long waits for a disk, and nothing can end it.
END_S_MAX = 10


def main(owner: int, mark: str, directories: list[str]) -> None:
    while os.getppid() == owner:  # a process whose parent has died gets another one
        time.sleep(LOOK_EVERY_S)
    deadline = time.monotonic() + END_S_MAX
    while (pids := marked_with(mark)) and time.monotonic() < deadline:
        for pid in pids:
            end(pid)
        time.sleep(0.01)
    for directory in directories:
        for path in Path(directory).glob(f"*{mark}*"):
            shutil.rmtree(path, ignore_errors=True)


def marked_with(mark: str) -> list[int]:
    """The processes that run, and that have *mark* in one of the places where it may be.

    All have it in their environment. But Redis writes its title over that, and works in its
    directory; and the environment of another user's process cannot be read without the right to
    trace it, but its arguments can, and they have its directory.
    """
    places = [path for path in Path("/proc").glob("[0-9]*") if int(path.name) != os.getpid()]
    return [int(path.name) for path in places if mark.encode() in _words_of(path)]


def _words_of(process: Path) -> bytes:
    words = b""
    # The arguments first: anyone may read them.
    with suppress(OSError):  # it has ended, or is another user's
        words += (process / "cmdline").read_bytes()
        words += (process / "environ").read_bytes()
        words += os.fsencode((process / "cwd").readlink())
    return words


def end(pid: int) -> None:
    """Kill it; it may have ended by itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
