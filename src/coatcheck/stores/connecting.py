"""Connecting: for event loops, with drivers that can only block while they do.

Beneath the wires. It is rare, and takes a thread; what is opened is then watched by the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from coatcheck.stores.scarce import started

C = TypeVar("C")


def watching_loop() -> asyncio.AbstractEventLoop:
    """The running event loop; NotImplementedError where it cannot watch sockets, as on Windows."""
    loop = asyncio.get_running_loop()
    if type(loop).add_reader is asyncio.AbstractEventLoop.add_reader:
        raise NotImplementedError
    return loop


def open_in_thread(
    loop: asyncio.AbstractEventLoop,
    new: Callable[[], C],
    let_go: Callable[[C], None],
    *,
    done: Callable[[C], None],
    failed: Callable[[BaseException], None],
) -> None:
    """
    Open a connection in a thread of its own, and say on *loop* what has become of it.

    The event loop's own threads may all be taken, by handlers that wait for us. Where the loop is
    closed meanwhile, nobody wants it any more.
    """

    def work() -> None:
        try:
            connection = new()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(failed, error)
            return
        try:
            loop.call_soon_threadsafe(done, connection)
        except RuntimeError:
            let_go(connection)

    started("coatcheck-connect", work)
