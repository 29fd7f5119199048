"""An outbox that looks for what the server cannot tell: a probe asks for the charge itself.

Run it: python examples/outbox_probe.py
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2

from coatcheck import Response
from coatcheck.client.httpx2 import Client
from coatcheck.client.outbox import Done, Outbox, SendAgain

charges = {}  # by order


class Bank(BaseHTTPRequestHandler):
    """Charges, crashes, and does not know what came of it; another page lists the charges."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
        charges[order] = 30
        self.answer(409, {"code": "outcome-unknown", "retry": "never"})

    def do_GET(self):
        found = charges.get(self.path.rpartition("/")[2])
        self.answer(404 if found is None else 200, {"amount": found})

    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def charge(api):
    def find_charge(action):
        order = json.loads(action.body)["order"]
        found = httpx2.get(f"{api}/charges/{order}")
        if found.status_code == 404:
            return SendAgain()
        return Done(Response(200, [], found.content))

    with Client(base_url=api) as client:
        outbox = Outbox("sqlite:///outbox.db", client=client, probe=find_charge)
        ticket = outbox.submit("POST", "/charges", json={"order": "order-17"})
        outbox.drain()
        print(ticket.result())
        outbox.close()


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bank)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    charge(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    main()
