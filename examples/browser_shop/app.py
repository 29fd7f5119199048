"""A shop whose page orders once, however often an answer is lost or its tab is closed.

python -m examples.browser_shop.app
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coatcheck.server.fastapi import IdempotencyMiddleware, idempotent

HERE = Path(__file__).parent
SOLD_OUT = {"Golden teapot"}
# How many answers to each order are lost while the switch is on.
LOST_ANSWERS = 2


class Order(BaseModel):
    """An order for one item."""

    item: str


class Losing:
    """A network that may lose answers: the shop has done its work, and the browser waits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lost: dict[bytes, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; with the switch on, keep the first answers to an order."""
        key = dict(scope.get("headers", ())).get(b"idempotency-key")
        is_on = scope["type"] == "http" and scope["app"].state.is_losing
        if not is_on or key is None or self._lost.get(key, 0) >= LOST_ANSWERS:
            await self._app(scope, receive, send)
            return
        self._lost[key] = self._lost.get(key, 0) + 1
        await self._app(scope, receive, _nowhere)
        while (await receive())["type"] != "http.disconnect":
            pass


async def _nowhere(_message: Message) -> None:
    """Nothing is sent."""


def shop_app(store: str = "memory://") -> FastAPI:
    """Return the shop, which keeps its orders in memory."""
    app = FastAPI()
    app.state.orders = []
    app.state.is_losing = False

    @app.post("/orders", status_code=201)
    @idempotent(required=True)
    async def order(body: Order) -> Any:
        if body.item in SOLD_OUT:
            return JSONResponse({"code": "sold-out", "detail": "It is sold out."}, 409)
        placed = {"number": len(app.state.orders) + 1, "item": body.item}
        app.state.orders.append(placed)
        return placed

    @app.get("/orders")
    async def orders() -> list[dict[str, Any]]:
        return list(app.state.orders)

    @app.get("/network")
    async def network() -> dict[str, bool]:
        return {"losing": app.state.is_losing}

    @app.put("/network")
    async def set_network(body: dict[str, bool]) -> dict[str, bool]:
        app.state.is_losing = body["losing"]
        return body

    @app.get("/")
    async def page() -> Response:
        return FileResponse(HERE / "shop.html")

    @app.get("/shop.css")
    async def style() -> Response:
        return FileResponse(HERE / "shop.css")

    @app.get("/shop.js")
    async def script() -> Response:
        return FileResponse(HERE / "shop.js")

    @app.get("/coatcheck.js")
    async def module() -> Response:
        source = files("coatcheck.client").joinpath("browser/coatcheck.js").read_bytes()
        return Response(source, media_type="text/javascript")

    app.add_middleware(IdempotencyMiddleware, store=store)
    app.add_middleware(Losing)  # outside: the answer is stored, and then lost
    return app


if __name__ == "__main__":
    uvicorn.run(shop_app(), host="127.0.0.1", port=8000)
