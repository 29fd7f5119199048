"""What errors of redis-py and of a Redis server mean for the store.

redis-py raises an error reply as a `ResponseError`, and the store treats it as the reply to one
command. Everything else that redis-py raises is about the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from redis import exceptions

from coatcheck.errors import StoreUnavailable

# What the server answered to one command: bytes, int, None, a list of them, or a `ResponseError`.
# If one of several servers fails, its `StoreUnavailable`. With `wait=`, perhaps `NotReplicated`.
Reply: TypeAlias = Any

# redis-py removes the code from the message of the errors that it has a class for. All of these
# are about the server, not about one record: each member of a batch gets the same error.
_CODES: dict[type[Exception], str] = {
    exceptions.AskError: "ASK",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.TryAgainError: "TRYAGAIN",
}
# The same for errors without a class of their own.
_SERVER_ERRORS = ("BUSY ", "MISCONF ", "NOREPLICAS ")


class LoginRefused(StoreUnavailable):
    """The server refuses the user or the password."""


def to_store_error(name: str, error: Exception, *, is_ambiguous: bool = False) -> StoreUnavailable:
    """Return what to raise for an *error* of redis-py's or of a socket."""
    kind = LoginRefused if isinstance(error, exceptions.AuthenticationError) else StoreUnavailable
    text = str(error).rstrip(".") or type(error).__name__
    return kind(f"{name}: {text}", is_ambiguous=is_ambiguous)


def is_refusal(error: Exception) -> bool:
    """
    Return whether the server refused the command, though redis-py raises a connection error.

    It does so for NOAUTH and LOADING, and for READONLY from a master that Sentinels have demoted.
    """
    refusals = (exceptions.AuthenticationError, exceptions.BusyLoadingError)
    return isinstance(error, refusals) or type(error.__context__) is exceptions.ReadOnlyError


def is_server_error(error: exceptions.ResponseError) -> bool:
    """Return whether *error* is about the server, so that nothing in this call was applied."""
    text = str(error)
    # An unknown command has no code: it was renamed, or a proxy does not pass it on.
    is_unknown = "unknown " in text.lower()
    return type(error) in _CODES or text.startswith(_SERVER_ERRORS) or is_unknown


def message_of(error: exceptions.ResponseError) -> str:
    """Return the server's message, with its code."""
    code = _CODES.get(type(error))
    return f"{code} {error}" if code else str(error)


def raise_error(name: str, reply: Reply) -> None:
    """Raise `StoreUnavailable` if the server *name* refused a command that writes nothing."""
    if isinstance(reply, exceptions.ResponseError):
        raise StoreUnavailable(f"{name}: {message_of(reply)}") from reply


def is_demoted(replies: Sequence[Reply]) -> bool:
    """Return whether the server is a replica now; a new connection finds the master."""
    return any(type(reply) is exceptions.ReadOnlyError for reply in replies)
