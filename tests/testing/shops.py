"""Small shops for the tests of the test kit: guarded and not, over ASGI and WSGI."""

import json
import threading

from flask import Flask, request
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.flask import Coatcheck


class Shop:
    """Orders, and an application that takes them."""

    def __init__(self, interface, *, guarded=True, engine=None):
        self.orders = []
        self._mutex = threading.Lock()
        settings = {"engine": engine} if engine is not None else {"store": "memory://"}
        make = self._asgi if interface == "asgi" else self._wsgi
        self.app = make(settings if guarded else None)

    def place(self, item):
        with self._mutex:
            self.orders.append(item)
            return {"order": len(self.orders)}

    def _asgi(self, settings):
        async def place(request):
            return JSONResponse(self.place((await request.json())["item"]), status_code=201)

        app = Starlette(routes=[Route("/orders", place, methods=["POST", "PUT"])])
        if settings is not None:
            app.add_middleware(IdempotencyMiddleware, **settings)
        return app

    def _wsgi(self, settings):
        app = Flask("shop")

        @app.route("/orders", methods=["POST", "PUT"])
        def place():
            return self.place(json.loads(request.data)["item"]), 201

        if settings is not None:
            Coatcheck(app, **settings)
        return app
