"""A network between a client and a server that loses answers, as a script says.

Each request takes the next fault: "lose" hangs up instead of passing the answer on, "half" passes
the first half of it, "reset" resets the connection. After the last fault, everything is passed on.
"""

import socket
import struct
import threading
from contextlib import suppress


class LossyRelay:
    """A port of the loopback before the port *target*."""

    def __init__(self, target, *script):
        self._target, self.script, self.requests = target, list(script), []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join()

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client):
        server = socket.create_connection(("127.0.0.1", self._target))
        fault = [None]  # of the request that is being answered on this connection
        answers = threading.Thread(target=self._answers, args=(server, client, fault), daemon=True)
        answers.start()
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if data.split(b" ", 1)[0] in {b"GET", b"POST", b"PATCH", b"PUT", b"DELETE"}:
                    self.requests.append(data)
                    fault[0] = self.script.pop(0) if self.script else None
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        answers.join()
        server.close()
        client.close()

    @staticmethod
    def _answers(server, client, fault):
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if fault[0] is None:
                    client.sendall(data)
                    continue
                if fault[0] == "half":
                    client.sendall(data[: len(data) // 2])
                if fault[0] == "reset":
                    linger = struct.pack("ii", 1, 0)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                break
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
