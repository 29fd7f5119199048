from flask import Flask, request

from coatcheck.server.flask import Coatcheck

app = Flask(__name__)
Coatcheck(app, store="sqlite:///orders.db")
orders = []


@app.post("/orders")
def place():
    orders.append(request.json)
    return {"number": len(orders), **request.json}, 201
