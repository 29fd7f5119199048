"""DynamoDB's stand-in as a program: moto, which does what DynamoDB does, behind a small server.

python dynamodb_stand_in.py 8000      # on that port of the loopback

Moto looks at a condition and then writes, and another thread may come between; DynamoDB does both
in one step. So everything happens in one thread, one request at a time, and connections stay open
as those of AWS do. Moto's own server takes as long for what is around a request as for it, which
would be a large part of the time that all tests take.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from functools import cache
from http import HTTPStatus
from io import BytesIO
from typing import Any

from moto.core import responses, utils
from moto.core.request import Request
from moto.core.serialize import ResponseSerializer
from moto.dynamodb.responses import DynamoHandler

END_OF_HEAD = b"\r\n\r\n"
TYPES = {"S", "N", "B", "SS", "NS", "BS", "M", "L", "NULL", "BOOL"}


class Connection(asyncio.Protocol):
    """One client, who asks and waits for the answer."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.come = b""

    def data_received(self, data: bytes) -> None:
        self.come += data
        while (request := self.next_request()) is not None:
            self.transport.write(answer_to(request))
            if request.headers.get("Connection") == "close":
                self.transport.close()

    def next_request(self) -> Request | None:
        """As soon as all of it has come."""
        head, end, rest = self.come.partition(END_OF_HEAD)
        if not end:
            return None
        lines = head.decode("latin-1").split("\r\n")
        lengths = [line[15:] for line in lines if line[:15].lower() == "content-length:"]
        length = int(lengths[0]) if lengths else 0
        if len(rest) < length:
            return None
        self.come = rest[length:]
        return request_of(lines, rest[:length])


def request_of(lines: list[str], body: bytes) -> Request:
    """As moto knows requests."""
    method, target, _ = lines[0].split(" ")
    path, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(body),
    }
    for line in lines[1:]:
        name, _, value = line.partition(":")
        name = name.upper().replace("-", "_")
        environ[name if name.startswith("CONTENT_") else f"HTTP_{name}"] = value.strip()
    return Request(environ)


def answer_to(request: Request) -> bytes:
    """What moto says, as it goes over the wire."""
    try:
        status, headers, said = DynamoHandler.dispatch(request, request.raw_url, request.headers)
    except Exception as error:  # noqa: BLE001 - sent to the client
        status, headers, said = HTTPStatus.INTERNAL_SERVER_ERROR, {}, repr(error)
    content = said if isinstance(said, bytes) else said.encode()
    head = [f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    head += [f"Content-Length: {len(content)}"]
    return "\r\n".join(head).encode("latin-1") + END_OF_HEAD + content


def make_moto_quick() -> None:
    """Spare it what it finds out anew for each request, or each value."""
    responses.method_names_from_class = cache(utils.method_names_from_class)
    looked_for = ResponseSerializer.get_value

    def get_value(self: ResponseSerializer, value: Any, key: str, shape: Any) -> Any:
        # It looks for each of the ten types, under half a dozen names; a value has but one type,
        # under its own name.
        is_plain = type(value) is dict and value.keys() <= TYPES
        return value.get(key) if is_plain else looked_for(self, value, key, shape)

    ResponseSerializer.get_value = get_value
    gc.freeze()  # what was imported stays, and need not be looked through for what may go


async def serve(port: int) -> None:
    """Until it is killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    make_moto_quick()
    asyncio.run(serve(int(sys.argv[1])))
