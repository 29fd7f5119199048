"""The shop: it writes the order, the event and the response in one transaction.

Run it: python -m examples.order_pipeline.api
"""

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.server.starlette import (
    IdempotencyMiddleware,
    current_async_operation,
    idempotent,
)
from examples.order_pipeline.settings import PORT, QUEUE, SHOP


@idempotent(mode="transaction", required=True)
async def place(request: Request) -> JSONResponse:
    number = (await request.json())["number"]
    operation = current_async_operation()
    await operation.connection.execute("insert into orders values (?)", (number,))
    await operation.emit(QUEUE, {"number": number}, key=f"order-{number}")
    return JSONResponse({"number": number}, status_code=201)


app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
app.add_middleware(IdempotencyMiddleware, store=f"sqlite:///{SHOP}")

if __name__ == "__main__":
    uvicorn.run(app, port=PORT, log_level="warning")
