"""The Chromium of the system, without a window, driven by Playwright; it reaches the loopback only."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.servers import find_program


@contextmanager
def chromium() -> Iterator["Chromium"]:
    """A driver; asyncio cannot be used in this thread meanwhile."""
    program = find_program("chromium", package="chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield Chromium(playwright.chromium, program)


class Chromium:
    """Starts browsers."""

    def __init__(self, kind: Any, program: str) -> None:
        self._kind = kind
        # Names other than the loopback do not resolve.
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        is_root = os.getuid() == 0
        self._options = {
            "executable_path": program,
            "args": [rules, *(["--no-sandbox"] if is_root else [])],
        }

    def launch(self) -> Any:
        """A browser, whose contexts share nothing."""
        return self._kind.launch(**self._options)

    def launch_profile(self, directory: Path) -> Any:
        """A browser whose profile is on disk: a context."""
        return self._kind.launch_persistent_context(directory, **self._options)


def crash(context: Any) -> None:
    """Let the browser process end at once, as kill -9 does."""
    from playwright.sync_api import Error

    session = context.new_cdp_session(context.pages[0])
    with suppress(Error):  # it cannot answer
        session.send("Browser.crash")
    context.close()
