"""Sessions at AWS: who we are there and how patient, for the clients of threads and of event loops.

Between `dynamodb_place.py` and whoever makes a client of it: botocore and aiobotocore, whose
sessions and settings have the same names.
"""

from __future__ import annotations

import os
from functools import cache
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.loaders import Loader, create_loader
from botocore.session import Session

from coatcheck.stores.dynamodb_place import Place

S = TypeVar("S", bound=Session)

# 2: a lost packet or a moment of throttling is not an outage; longer trouble is, and an engine
# that must know tries again by itself.
TRIES_MAX = 2
# For callers that send in their own threads beside ours: a heart, a reader, an operator.
_CONNECTIONS_BESIDE = 8


def prepared(session: S, place: Place) -> S:
    """*session*, which knows what DynamoDB is, and who we are at *place*."""
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))
    if _is_loopback(place.endpoint) and not _has_credentials():
        # A stand-in on this machine checks none, but a request without any cannot be signed.
        session.set_credentials("local", "local")
    return session


def settings_of(place: Place) -> dict[str, Any]:
    """How a client for *place* is set."""
    # So that a server which says nothing is given up after the time-out, all tries together.
    try_s = place.timeout_s / TRIES_MAX
    return {
        "connect_timeout": try_s,
        "read_timeout": try_s,
        "retries": {"total_max_attempts": TRIES_MAX, "mode": "standard"},
        "max_pool_connections": place.concurrency + _CONNECTIONS_BESIDE,
        "tcp_keepalive": True,
        "parameter_validation": False,  # they are all our own, and it takes a tenth of the time
    }


@cache
def _loader(data_path: str | None) -> Loader:
    """
    What botocore knows of its services; it is read from disk once, for all clients.

    Reading it takes a tenth of a second, for which an event loop would stand still.
    """
    return create_loader(data_path)


def _is_loopback(endpoint: str | None) -> bool:
    host = urlsplit(endpoint or "").hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _has_credentials() -> bool:
    """Looked for in the environment only: elsewhere botocore would ask the network for seconds."""
    return any(os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"))
