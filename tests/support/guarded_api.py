"""An API that our middleware guards, in a real uvicorn."""

import asyncio
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.server.asgi import IdempotencyMiddleware
from tests.support.times import eventually


class Api:
    """Charges: each run of the handler is a charge."""

    def __init__(self, policy):
        self.charges, self.failures = [], 0
        app = Starlette(
            routes=[
                Route("/charges", self._charge, methods=["POST"]),
                Route("/v1/customers", self._customer, methods=["POST"]),
                Route("/slow", self._slow, methods=["POST"]),
            ]
        )
        app.add_middleware(IdempotencyMiddleware, store="memory://", policy=policy)
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self):
        self._thread.start()
        eventually(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error):
        self._server.should_exit = True
        self._thread.join()

    async def _charge(self, request):
        self.charges.append(await request.body())
        if self.failures > 0:
            self.failures -= 1
            return JSONResponse({}, 503)
        return JSONResponse({"charge": len(self.charges)}, 201)

    async def _customer(self, request):
        self.charges.append(await request.body())
        return JSONResponse({"id": f"cus_{len(self.charges)}", "object": "customer"})

    async def _slow(self, request):
        self.charges.append(await request.body())
        await asyncio.sleep(0)
        return JSONResponse({"report": 1}, 201)
