"""An outbox: a charge that is on disk until its answer is definite.

Run it: python examples/outbox.py
"""

import threading
from http.server import ThreadingHTTPServer

from client import UnreliableApi, charges

from coatcheck.client.httpx2 import Client
from coatcheck.client.outbox import Outbox


def charge(api):
    with Client(base_url=api) as client:
        outbox = Outbox("sqlite:///outbox.db", client=client, server_window="24h")
        ticket = outbox.submit("POST", "/charges", json={"amount": 30}, lane="order-17")
        outbox.drain()
        print(ticket.result(timeout=10).response.body)


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), UnreliableApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    charge(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    print("charged", len(charges), "time")


if __name__ == "__main__":
    main()
