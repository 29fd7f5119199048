"""Any WSGI application, guarded by one line.

Run it: flask --app examples.wsgi_app run
"""

from flask import Flask, request

from coatcheck.server.wsgi import IdempotencyMiddleware

app = Flask(__name__)
orders: list[dict[str, object]] = []


@app.post("/orders")
def create_order() -> tuple[dict[str, object], int]:
    """Take an order; each call of this function is an order that will be delivered."""
    order = {"number": len(orders) + 1, **request.get_json()}
    orders.append(order)
    return order, 201


app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="sqlite:///orders.db")  # type: ignore[method-assign]
