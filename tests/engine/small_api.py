"""One route behind the middleware of the engine's flavour, for tests of what a client gets."""

import asyncio

from coatcheck.server import asgi, wsgi
from tests.support.http import AsgiExchange, environ_of, exchange_wsgi, with_key


def small_api(guards, handler, store="memory://", **options):
    """
    Return a function that sends POST /orders with the key "k", and returns its response.

    *handler* gets the operation, may be a generator, and returns a status.
    """
    handle = guards.flavoured(handler)
    engine = guards.engine(store, **options)

    async def asgi_app(scope, _receive, send):
        status = await handle(scope["coatcheck.operation"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    def wsgi_app(environ, start_response):
        start_response(f"{handle(environ['coatcheck.operation'])} Status", [])
        return []

    def post():
        if guards.is_async:
            exchange = AsgiExchange("POST", "/orders", with_key("k"), b"{}")
            return asyncio.run(exchange.run(asgi.IdempotencyMiddleware(asgi_app, engine=engine)))
        environ = environ_of("POST", "/orders", with_key("k"), b"{}")
        return exchange_wsgi(wsgi.IdempotencyMiddleware(wsgi_app, engine=engine), environ)

    return post
