"""An HTTP API that fails as a script says: answers are lost, broken off, late or refusals.

It is not guarded by our own code: it remembers the answers of keys in a dictionary. Each request
takes the next fault of the script; after the last one, all is well.
"""

import json
import socket
import struct
import threading
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

PROBLEM = "application/problem+json"
# The time of day that dates in `Retry-After` are relative to, sent as `Date`.
WALL_S = 1_700_000_000


REDIRECTS = {
    "redirect": (307, "/moved"),
    "see-other": (303, "/moved"),
    "other-origin": (307, "{other}/moved"),
    "see-other-origin": (303, "{other}/moved"),
}


class Seen(NamedTuple):
    """A request, as it arrived."""

    method: str
    path: str
    key: str | None
    body: bytes
    headers: dict[str, str]


class FaultyServer(ThreadingHTTPServer):
    """Serves on loopback in a thread of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *script, key_header="Idempotency-Key", key_member=None, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.script, self.seen, self.effects, self.answers = list(script), [], [], {}
        self.key_header, self.key_member = key_header, key_member
        self.polls = 0
        self.lock = threading.Lock()
        self.other = None  # where "other-origin" redirects to
        self.before_answer = lambda: None  # what a test does while a client waits
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def keys(self):
        return [seen.key for seen in self.seen]

    def __exit__(self, *error):
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that hung up is what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    server: FaultyServer

    def log_message(self, *args):
        """Nothing is printed."""

    def do_GET(self):
        read = self._read()
        if read is None:  # the client was killed while it sent: nothing happens
            self.close_connection = True
        else:
            self._answer(read)

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET  # noqa: N815 - names of http.server

    def _read(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            if len(body) < length:
                return None
        key = self.headers.get(self.server.key_header)
        if self.server.key_member is not None and body:
            key = json.loads(body).get(self.server.key_member)
        seen = Seen(self.command, self.path, key, body, dict(self.headers.items()))
        with self.server.lock:
            self.server.seen.append(seen)
            fault = self.server.script.pop(0) if self.server.script else "ok"
        return seen, fault

    def _answer(self, read):
        seen, fault = read
        self.server.before_answer()
        if isinstance(fault, tuple):
            status, headers, document = fault
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self._send(status, {"Content-Type": PROBLEM, **headers}, body)
        elif fault in REDIRECTS:
            status, location = REDIRECTS[fault]
            self._send(status, {"Location": location.format(other=self.server.other)}, b"")
        elif fault == "reset":  # before anything has happened
            self._hang_up(reset=True)
        else:
            self._answer_after(fault, *self._effect(seen))

    def _answer_after(self, fault, status, headers, body):
        """The effect has happened; what the client learns of it depends on the *fault*."""
        if fault == "ok":
            self._send(status, headers, body)
        elif fault == "500":
            self._send(500, {}, b"")
        elif fault == "accept":
            self._send(202, {"Location": "/operations/1", "Retry-After": "1"}, b"")
        else:
            if fault == "half":
                self._send(status, {"Content-Length": str(len(body))}, body[: len(body) // 2])
            elif fault == "hang":
                with suppress(OSError):
                    self.rfile.read(1)  # until the client has gone
            else:
                assert fault in {"lose", "lose-by-reset"}
            self._hang_up(reset=fault == "lose-by-reset")

    def _effect(self, seen):
        """What the API does: once for each key, and every time without one."""
        with self.server.lock:
            known = self.server.answers.get(seen.key) if seen.key else None
            if known is not None:
                status, headers, body = known
                return status, {**headers, "Idempotent-Replayed": "true"}, body
            self.server.effects.append(seen.body)
            body = json.dumps({"charge": len(self.server.effects)}).encode()
            answer = 201, {"Content-Type": "application/json"}, body
            if seen.key:
                self.server.answers[seen.key] = answer
            return answer

    def _send(self, status, headers, body):
        head = {"Content-Length": str(len(body)), "Date": formatdate(WALL_S, usegmt=True)} | headers
        self.send_response_only(status)
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _hang_up(self, *, reset=False):
        self.wfile.flush()
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self.close_connection = True


IN_PROGRESS = (
    409,
    {"Retry-After": "1"},
    {"code": "in-progress", "retry": "same-key", "type": "https://docs.example#in-progress"},
)


def later(status, seconds, *, as_date=False):
    """A refusal with `Retry-After`, in seconds or as a date."""
    value = formatdate(WALL_S + seconds, usegmt=True) if as_date else str(seconds)
    return status, {"Retry-After": value}, {}
