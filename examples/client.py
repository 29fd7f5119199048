"""A client that sends a charge until it knows what became of it.

Run it: python examples/client.py
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from coatcheck.client import RetryPolicy, result_of
from coatcheck.client.httpx2 import Client

charges: dict[str, int] = {}


class UnreliableApi(BaseHTTPRequestHandler):
    """Charges once for each key, and loses the first answer."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers["Idempotency-Key"]
        is_first = key not in charges
        charges.setdefault(key, len(charges) + 1)
        if is_first:
            self.close_connection = True  # without an answer
            return
        body = json.dumps({"charge": charges[key]}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Idempotent-Replayed", "true")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def charge(api):
    retry = RetryPolicy(deadline="30s", attempts_max=5, timeout="5s")
    with Client(base_url=api, retry=retry) as client:
        # Every POST and PATCH has a key of its own.
        response = client.post("/charges", json={"amount": 30})
        result = result_of(response)
        print(response.json(), result.outcome, f"after {result.attempts} attempts")

        # The application names the action: a second click, or a restart, has the same key.
        with client.action(reference="order-17") as action:
            response = action.post("/charges", json={"amount": 30})
            print(response.json(), "replayed" if action.was_replayed else "new")


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), UnreliableApi)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    charge(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    print("charged", len(charges), "times for 2 actions")


if __name__ == "__main__":
    main()
