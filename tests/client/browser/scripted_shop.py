"""The example shop under uvicorn, whose answers to orders follow a script.

Each request with a key takes the next word: "half" breaks the answer off, "hang" never sends it,
a tuple is a refusal before the shop sees the request. In all but the last, the effect has happened.
"""

import json
import socket
import threading

import uvicorn

from examples.browser_shop.app import shop_app


class ScriptedShop:
    """Serves on loopback in a thread of its own."""

    def __init__(self):
        self.app, self.script, self.keys, self.in_flight = shop_app(), [], [], []
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = {"log_config": None, "date_header": False, "timeout_graceful_shutdown": 1}
        config = uvicorn.Config(self._answer, interface="asgi3", **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._server.should_exit = True
        self._thread.join()

    @property
    def items(self):
        """What was ordered: one item for each effect."""
        return [order["item"] for order in self.app.state.orders]

    async def _answer(self, scope, receive, send):
        key = dict(scope.get("headers", ())).get(b"idempotency-key")
        if key is None:
            await self.app(scope, receive, send)
            return
        self.keys.append(key.decode())
        fault = self.script.pop(0) if self.script else "ok"
        if isinstance(fault, tuple):
            await refuse(send, *fault)
        elif fault == "ok":
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, to_nowhere)
            if fault == "half":
                headers = [(b"content-type", b"application/json"), (b"content-length", b"99")]
                await send({"type": "http.response.start", "status": 201, "headers": headers})
                return  # uvicorn then closes the connection
            self.in_flight.append(key.decode())
            while (await receive())["type"] != "http.disconnect":
                pass
            self.in_flight.remove(key.decode())


async def refuse(send, status, headers, document):
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    pairs.append((b"content-type", b"application/problem+json"))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": json.dumps(document).encode()})


async def to_nowhere(message):
    """Nothing is sent."""
