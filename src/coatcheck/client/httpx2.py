"""Clients and transports for httpx2: drop-in, with one key for each action and safe retries."""

from __future__ import annotations

from coatcheck.errors import MissingExtra

try:
    import httpx2
except ImportError as error:
    raise MissingExtra("httpx2", "httpx2") from error

from coatcheck.client import httpx_family


class Client(httpx_family.SyncClient[httpx2.Response], httpx2.Client):
    """`httpx2.Client` that sends a request until there is a definite answer."""

    library = httpx2


class AsyncClient(httpx_family.AsyncClient[httpx2.Response], httpx2.AsyncClient):
    """`httpx2.AsyncClient` that sends a request until there is a definite answer."""

    library = httpx2


class Transport(httpx_family.SyncTransport, httpx2.BaseTransport):
    """Safe retries for any `httpx2.Client`: `Client(transport=Transport())`."""

    library = httpx2


class AsyncTransport(httpx_family.AsyncTransport, httpx2.AsyncBaseTransport):
    """Safe retries for any `httpx2.AsyncClient`: `AsyncClient(transport=AsyncTransport())`."""

    library = httpx2
