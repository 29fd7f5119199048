"""Every client of ours behind one function, so that each promise is tested on all of them."""

import asyncio
from typing import Any, NamedTuple

import aiohttp
import httpx
import httpx2
import requests

import coatcheck.client.aiohttp
import coatcheck.client.httpx
import coatcheck.client.httpx2
import coatcheck.client.requests
from coatcheck.client import Clock, result_of


class FakeTime:
    """A clock that only pauses move, so that no test waits."""

    def __init__(self):
        self.now_s, self.slept = 1_000.0, []

    @property
    def clock(self):
        return Clock(lambda: self.now_s, lambda: 0.0, lambda: 0.5, self.sleep, self.async_sleep)

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds

    async def async_sleep(self, seconds):
        self.sleep(seconds)
        await asyncio.sleep(0)


class Got(NamedTuple):
    """What the application got of one call."""

    status: int | None
    body: bytes
    result: Any
    error: BaseException | None
    slept: list[float]
    action: Any


class Driver:
    """A client, and how its library spells the options."""

    def __init__(self, name, make, errors, *, is_async=False, is_transport=False):
        self.name, self._make, self.errors = name, make, errors
        self.is_async, self.is_transport = is_async, is_transport
        self.is_aiohttp = name.startswith("aiohttp")
        self.is_requests = name == "requests"

    def __repr__(self):
        return self.name

    def post(self, url, **options):
        return self.call("POST", url, **options)

    def call(self, method, url, *, action=None, follow=False, client_options=None, **options):
        """
        Send one request and return what came of it; other options are split by their names.

        `time` is the clock, if a test moves it too.
        """
        names = {"retry", "preset", "budget", "key_version", "buffer"}
        ours = {name: options.pop(name) for name in names & set(options)}
        time = options.pop("time", None) or FakeTime()
        ours["clock"] = time.clock
        if self.is_aiohttp or self.is_requests:
            options["allow_redirects"] = follow
            if "content" in options:
                options["data"] = options.pop("content")
        else:
            options["follow_redirects"] = follow
        how = {"ours": ours, "client_options": client_options or {}, "action": action}
        how["options"] = options
        made = None
        try:
            if self.is_async:
                status, body, thing, made = asyncio.run(self._call_async(method, url, **how))
            else:
                status, body, thing, made = self._call(method, url, **how)
        except self.errors as error:
            return Got(None, b"", result_of(error), error, time.slept, made)
        return Got(status, body, result_of(thing), None, time.slept, made)

    def _call(self, method, url, *, ours, client_options, action, options):
        with self._make(ours, **client_options) as client:
            made = None if action is None else client.action(**action)
            response = (made or client).request(method, url, **options)
            return response.status_code, response.content, response, made

    async def _call_async(self, method, url, *, ours, client_options, action, options):
        async with self._make(ours, **client_options) as client:
            made = None if action is None else client.action(**action)
            response = await (made or client).request(method, url, **options)
            if self.is_aiohttp:
                body = await response.read()
                return response.status, body, response, made
            return response.status_code, response.content, response, made


def family(ours, library):
    """The drivers of httpx or of httpx2."""
    name, errors = library.__name__, library.HTTPError

    def over_transport(settings, **options):
        return library.Client(transport=ours.Transport(**settings), **options)

    def over_async_transport(settings, **options):
        return library.AsyncClient(transport=ours.AsyncTransport(**settings), **options)

    return [
        Driver(f"{name}-client", lambda s, **o: ours.Client(**s, **o), errors),
        Driver(f"{name}-async", lambda s, **o: ours.AsyncClient(**s, **o), errors, is_async=True),
        Driver(f"{name}-transport", over_transport, errors, is_transport=True),
        Driver(
            f"{name}-async-transport",
            over_async_transport,
            errors,
            is_async=True,
            is_transport=True,
        ),
    ]


def middleware(settings, **options):
    guard = coatcheck.client.aiohttp.Middleware(**settings)
    return aiohttp.ClientSession(middlewares=(guard,), **options)


SESSION = coatcheck.client.aiohttp.ClientSession
AIOHTTP_ERRORS = (aiohttp.ClientError, TimeoutError)
DRIVERS = [
    *family(coatcheck.client.httpx2, httpx2),
    *family(coatcheck.client.httpx, httpx),
    Driver(
        "requests",
        lambda s, **o: coatcheck.client.requests.Session(**s),
        requests.RequestException,
    ),
    Driver("aiohttp", lambda s, **o: SESSION(**s, **o), AIOHTTP_ERRORS, is_async=True),
    Driver("aiohttp-middleware", middleware, AIOHTTP_ERRORS, is_async=True, is_transport=True),
]
CLIENTS = [driver for driver in DRIVERS if not driver.is_transport]
