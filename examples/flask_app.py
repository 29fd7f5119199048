"""A guarded Flask application with users and a database, and its own tests: `pytest flask_app.py`."""

import tempfile

import pytest
from flask import Flask, request
from flask.views import MethodView
from flask_login import LoginManager, UserMixin, login_required, login_user
from flask_sqlalchemy import SQLAlchemy

from coatcheck.server.flask import Coatcheck, current_operation, idempotent

db = SQLAlchemy()
login_manager = LoginManager()
coatcheck = Coatcheck(transactions=db.session)


class User(UserMixin):
    def __init__(self, id: str) -> None:
        self.id = id


login_manager.user_loader(User)


class Order(db.Model):
    id = db.Column(db.Integer, primary_key=True)
    item = db.Column(db.String)
    reference = db.Column(db.String)


def create_app(database: str) -> Flask:
    app = Flask(__name__)
    app.config.update(
        SECRET_KEY="change me",
        SQLALCHEMY_DATABASE_URI=database,
        COATCHECK_STORE=database,
        COATCHECK_POLICY="payments",
    )
    db.init_app(app)
    login_manager.init_app(app)
    coatcheck.init_app(app)  # after the secret key is set
    app.add_url_rule("/orders", view_func=place)
    app.add_url_rule("/addresses/<int:number>", view_func=Addresses.as_view("addresses"))
    app.add_url_rule("/login/<id>", view_func=login)
    with app.app_context():
        db.create_all()
    return app


@login_required
@idempotent(required=True, mode="transaction")
def place():
    db.session.add(Order(item=request.json["item"], reference=current_operation.reference))
    return {"orders": db.session.query(Order).count()}, 201


place.methods = ["POST"]


class Addresses(MethodView):
    @idempotent(window="1h")
    def put(self, number: int):
        return {"address": number}

    @idempotent(methods=())  # never guarded
    def post(self, number: int):
        return {"found": [number]}


def login(id: str):
    login_user(User(id))
    return {}


@pytest.fixture
def app():
    with tempfile.TemporaryDirectory() as directory:
        app = create_app(f"sqlite:///{directory}/shop.db")
        yield app
        app.extensions["coatcheck"].engine.close()
        with app.app_context():
            db.engine.dispose()


def test_a_retried_order_is_placed_once(app):
    client = app.test_client()
    client.get("/login/ada")
    headers = {"Idempotency-Key": "order-1"}
    first = client.post("/orders", json={"item": "coat"}, headers=headers)
    again = client.post("/orders", json={"item": "coat"}, headers=headers)
    assert (first.status_code, first.json) == (201, {"orders": 1})
    assert again.json == first.json
    assert again.headers["Idempotent-Replayed"] == "true"


def test_two_users_may_use_the_same_key(app):
    for id, orders in (("ada", 1), ("bob", 2)):
        client = app.test_client()
        client.get(f"/login/{id}")
        headers = {"Idempotency-Key": "order-1"}
        response = client.post("/orders", json={"item": "coat"}, headers=headers)
        assert response.json == {"orders": orders}


def test_an_order_needs_a_key_and_a_user(app):
    client = app.test_client()
    assert client.post("/orders", json={"item": "coat"}).json["code"] == "key-missing"
    headers = {"Idempotency-Key": "order-1"}
    assert client.post("/orders", json={"item": "coat"}, headers=headers).status_code == 401
    client.get("/login/ada")
    assert client.post("/orders", json={"item": "coat"}, headers=headers).status_code == 201
