"""FastAPI: an async function finds the user of each request, and refuses revoked tokens."""

import asyncio

import httpx
from fastapi import FastAPI, HTTPException

from coatcheck.server.asgi import IdempotencyMiddleware
from coatcheck.server.request import Request

tokens = {"old": "ada", "new": "ada"}  # in a database, or at your identity provider


async def user_of(request: Request) -> str:
    """Whose key it is; called for every guarded request, also for retries."""
    token = request.header(b"authorization").decode("latin-1").removeprefix("Bearer ")
    user = tokens.get(token)
    if user is None:
        raise HTTPException(401, "log in again", {"WWW-Authenticate": "Bearer"})
    return user


app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="memory://", caller=user_of)
placed = []


@app.post("/orders", status_code=201)
async def place() -> dict[str, int]:
    """Place an order."""
    placed.append(1)
    return {"order": len(placed)}


async def main() -> None:
    """Send one request four times."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        for token in ("old", "new", "stolen", "new"):
            headers = {"Idempotency-Key": "k-1", "Authorization": f"Bearer {token}"}
            response = await client.post("/orders", headers=headers)
            print(token, response.status_code, len(placed), "placed")
            if token == "stolen":  # from now on, no token of Ada's is valid
                tokens.clear()


if __name__ == "__main__":
    asyncio.run(main())
