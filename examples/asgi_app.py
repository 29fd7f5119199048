"""Any ASGI application, guarded by one line.

Run it: uvicorn examples.asgi_app:app
"""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.server.asgi import IdempotencyMiddleware

orders: list[dict[str, object]] = []


async def create_order(request: Request) -> JSONResponse:
    """Take an order; each call of this function is an order that will be delivered."""
    order = {"number": len(orders) + 1, **await request.json()}
    orders.append(order)
    return JSONResponse(order, status_code=201)


app = Starlette(routes=[Route("/orders", create_order, methods=["POST"])])
app.add_middleware(IdempotencyMiddleware, store="sqlite:///orders.db")
