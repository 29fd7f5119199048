"""The same charge with requests, with aiohttp, and with a client that you already have.

Run it: python examples/client_libraries.py
"""

import asyncio
import threading
from http.server import ThreadingHTTPServer

import httpx2
from client import UnreliableApi, charges

from coatcheck.client import RetryBudget
from coatcheck.client.aiohttp import ClientSession
from coatcheck.client.httpx2 import Transport
from coatcheck.client.requests import Session

# The clients of one server share a budget: while it fails, they do not add to its load.
BUDGET = RetryBudget(tokens_max=100, refill=0.1)


def with_requests(api):
    with Session(budget=BUDGET) as session:
        return session.post(f"{api}/charges", json={"amount": 30}).json()


async def with_aiohttp(api):
    async with (
        ClientSession(budget=BUDGET) as session,
        session.post(f"{api}/charges", json={"amount": 30}) as response,
    ):
        return await response.json(content_type=None)


def with_your_own_client(api):
    with httpx2.Client(transport=Transport(budget=BUDGET)) as client:
        return client.post(f"{api}/charges", json={"amount": 30}).json()


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), UnreliableApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    api = f"http://127.0.0.1:{server.server_port}"
    print(with_requests(api), asyncio.run(with_aiohttp(api)), with_your_own_client(api))
    server.shutdown()
    server.server_close()
    print("charged", len(charges), "times for 3 actions")


if __name__ == "__main__":
    main()
