"""Sessions in signed cookies: a new signature does not make a retry another request."""

import asyncio

import httpx
from flask import Flask, session
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from coatcheck.server import asgi, wsgi

SECRET = "random bytes from your secret storage"


# --- Starlette: the session middleware stands in front, so it is added last


async def log_in(request):
    """Begin a session; each call signs it anew."""
    request.session["user"] = "ada"
    return JSONResponse({})


async def place(request):
    """Place an order."""
    return JSONResponse({"for": request.session.get("user")}, 201)


app = Starlette(routes=[Route("/login", log_in), Route("/orders", place, methods=["POST"])])
app.add_middleware(asgi.IdempotencyMiddleware, store="memory://")
app.add_middleware(SessionMiddleware, secret_key=SECRET)


# --- Flask: its session is behind the middleware, which needs the secret to verify it

shop = Flask(__name__)
shop.secret_key = SECRET
shop.wsgi_app = wsgi.IdempotencyMiddleware(
    shop.wsgi_app, store="memory://", session_secret=SECRET, session_cookies=["acme_*"]
)


@shop.post("/orders")
def place_in_shop():
    """Place an order."""
    return {"for": session.get("user")}, 201


@shop.get("/login")
def log_in_to_shop():
    """Begin a session."""
    session["user"] = "ada"
    return {}


KEY = {"Idempotency-Key": "k-1"}


async def send_to_starlette() -> None:
    """Send one request in a session, after another login, and with a forged cookie."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        for _ in range(2):
            await client.get("/login")
            response = await client.post("/orders", headers=KEY)
            print("Starlette", response.status_code, response.json())
        client.cookies["session"] = client.cookies["session"][:-1]
        print("forged", (await client.post("/orders", headers=KEY)).status_code)


if __name__ == "__main__":
    asyncio.run(send_to_starlette())
    client = shop.test_client()
    for _ in range(2):
        client.get("/login")
        response = client.post("/orders", headers=KEY)
        print("Flask", response.status_code, response.json)
    shop.wsgi_app.engine.close()
