"""Flask: the verified token of a request names its caller."""

import time

import jwt
from flask import Flask

from coatcheck.server import callers
from coatcheck.server.wsgi import IdempotencyMiddleware

SECRET = "at least 32 random bytes, from your secret storage"

app = Flask(__name__)
caller = callers.jwt(SECRET, algorithms=["HS256"], audience="shop", issuer="https://login.example")
app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="memory://", caller=caller)
placed = []


@app.post("/orders")
def place():
    """Place an order."""
    placed.append(1)
    return {"order": len(placed)}, 201


def token(user: str, seconds: int) -> str:
    """Make a token, as the login does."""
    claims = {"sub": user, "aud": "shop", "iss": "https://login.example"}
    return jwt.encode({**claims, "exp": time.time() + seconds}, SECRET, "HS256")


if __name__ == "__main__":
    client = app.test_client()
    for name, sent in (
        ("first", token("ada", 60)),
        ("refreshed", token("ada", 3_600)),
        ("expired", token("ada", -1)),
        ("another user's", token("eve", 60)),
    ):
        headers = {"Idempotency-Key": "k-1", "Authorization": f"Bearer {sent}"}
        response = client.post("/orders", headers=headers)
        print(name, response.status_code, response.headers.get("WWW-Authenticate"), len(placed))
    app.wsgi_app.engine.close()
