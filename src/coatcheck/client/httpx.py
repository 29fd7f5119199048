"""Clients and transports for httpx: drop-in, with one key for each action and safe retries."""

from __future__ import annotations

from coatcheck.errors import MissingExtra

try:
    import httpx
except ImportError as error:
    raise MissingExtra("httpx", "httpx") from error

from coatcheck.client import httpx_family


class Client(httpx_family.SyncClient[httpx.Response], httpx.Client):
    """`httpx.Client` that sends a request until there is a definite answer."""

    library = httpx


class AsyncClient(httpx_family.AsyncClient[httpx.Response], httpx.AsyncClient):
    """`httpx.AsyncClient` that sends a request until there is a definite answer."""

    library = httpx


class Transport(httpx_family.SyncTransport, httpx.BaseTransport):
    """Safe retries for any `httpx.Client`: `Client(transport=Transport())`."""

    library = httpx


class AsyncTransport(httpx_family.AsyncTransport, httpx.AsyncBaseTransport):
    """Safe retries for any `httpx.AsyncClient`: `AsyncClient(transport=AsyncTransport())`."""

    library = httpx
