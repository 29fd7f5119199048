"""Optimistic actions: the basket changes at once, and back if the shop refuses.

Run it: python examples/optimistic.py
"""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from coatcheck.client.httpx2 import Client
from coatcheck.client.optimistic import OptimisticQueue
from coatcheck.client.outbox import Outbox


class Shop(BaseHTTPRequestHandler):
    """Has no milk."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(422 if b"milk" in body else 201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def shop(api):
    basket = []
    with Client(base_url=api) as client:
        outbox = Outbox("sqlite:///outbox.db", client=client)
        queue = OptimisticQueue(outbox)
        queue.register("put", apply=basket.append, revert=basket.remove)
        queue.settle()  # after a restart: applies what is still open
        for item in ("tea", "milk", "sugar"):
            queue.submit("put", "POST", "/basket", json=item, lane="basket")
        print("at once:", *basket)
        outbox.drain()
        queue.settle()
        print("settled:", *basket)


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Shop)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shop(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
