from flask import Flask, request

from coatcheck.server.wsgi import IdempotencyMiddleware

app = Flask(__name__)
app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="sqlite:///orders.db")
orders = []


@app.post("/orders")
def place():
    orders.append(request.json)
    return {"number": len(orders), **request.json}, 201
