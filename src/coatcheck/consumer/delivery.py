"""One delivery of a message: the call of the handler's function, inside its operation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from coatcheck.consumer.message import Message
from coatcheck.core.messages.offset import PartitionOffset
from coatcheck.engine.functions import refuse_unstarted
from coatcheck.errors import CoatcheckError, Misconfigured
from coatcheck.operation import Operation, Transaction, current_operation

AWAITED_CANCELLED = "the handler awaited something that was cancelled"


class AwaitedCancelled(CoatcheckError):
    """The failure of a handler that awaited something, such as a task, that was cancelled."""


class Delivery:
    """One delivery: calls the function, and notes in which operation, and what it raised."""

    def __init__(
        self,
        function: Callable[..., Any],
        message: Message,
        offset: PartitionOffset | None,
        *,
        takes_operation: bool,
    ) -> None:
        self.message = message
        self.operation: Operation | None = None  # None: the function was not called
        self.error: Exception | None = None
        self._function = function
        self._offset = offset
        self._takes_operation = takes_operation

    def call(self) -> None:
        """Call a sync function; its result is not kept, because no retry needs it."""
        try:
            refuse_unstarted(self._function(*self._arguments()))
        except asyncio.CancelledError as error:  # nothing cancels a thread
            self.error = AwaitedCancelled(AWAITED_CANCELLED)
            raise self.error from error
        except Exception as error:
            self.error = error
            raise
        if self._offset is not None:
            self._transaction.store_offset(self._offset)

    async def call_async(self) -> None:
        """Call an async function."""
        try:
            await self._function(*self._arguments())
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the consumer ends
                raise
            # The handler awaited something that was cancelled: the message is not handled, and
            # without an answer the broker would never deliver it again.
            self.error = AwaitedCancelled(AWAITED_CANCELLED)
            raise self.error from error
        except Exception as error:
            self.error = error
            raise
        if self._offset is not None:
            await self._transaction.store_offset(self._offset)

    @property
    def _transaction(self) -> Transaction:
        assert self.operation is not None
        transaction = self.operation._transaction  # noqa: SLF001 - no handler stores an offset
        assert transaction is not None  # see `stored_offsets.check_mode`
        return transaction

    def _arguments(self) -> tuple[Any, ...]:
        operation = current_operation()
        assert operation is not None
        self.operation = operation
        return (self.message, operation) if self._takes_operation else (self.message,)


def takes_operation(function: Callable[..., object]) -> bool:
    """*function* has a second parameter, for the operation."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    count = len([parameter for parameter in parameters if parameter.kind in kinds])
    if count not in (1, 2):
        raise Misconfigured(
            f"{function!r} takes {count} arguments; a handler takes the message, and the operation "
            "if it wants"
        )
    return count == 2
