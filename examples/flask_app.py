"""A guarded Flask application with users and a database, and its own tests: `pytest flask_app.py`."""

import tempfile

import pytest
from flask import Blueprint, Flask, request
from flask.views import MethodView
from flask_login import LoginManager, UserMixin, login_required, login_user
from flask_sqlalchemy import SQLAlchemy
from markupsafe import escape

from coatcheck.errors import KeyRejected
from coatcheck.server.flask import Coatcheck, current_operation, idempotent

db = SQLAlchemy()
login_manager = LoginManager()
coatcheck = Coatcheck(transactions=db.session)
shop = Blueprint("shop", __name__)


def create_app(database: str) -> Flask:
    app = Flask(__name__)
    app.config["SECRET_KEY"] = "change me"
    app.config["SQLALCHEMY_DATABASE_URI"] = database
    app.config["COATCHECK_STORE"] = database
    app.config["COATCHECK_POLICY"] = "payments"
    db.init_app(app)
    login_manager.init_app(app)
    coatcheck.init_app(app)
    app.register_blueprint(shop)
    with app.app_context():
        db.create_all()
    return app


class User(UserMixin):
    """A user who has logged in."""

    def __init__(self, id: str) -> None:
        self.id = id


login_manager.user_loader(User)


@shop.get("/login/<id>")
def login(id: str):
    login_user(User(id))
    return {}


class Order(db.Model):
    """An order, and the reference of the operation that placed it."""

    id = db.Column(db.Integer, primary_key=True)
    item = db.Column(db.String)
    reference = db.Column(db.String)


@shop.post("/orders")
@login_required
@idempotent(required=True, mode="transaction")
def place():
    db.session.add(Order(item=request.json["item"], reference=current_operation.reference))
    return {"orders": db.session.query(Order).count()}, 201


class Addresses(MethodView):
    """The addresses of a user."""

    @idempotent(window="1h")
    def put(self, number: int):
        return {"address": number}

    @idempotent(methods=())  # never guarded
    def post(self, number: int):
        return {"found": [number]}


shop.add_url_rule("/addresses/<int:number>", view_func=Addresses.as_view("addresses"))


@shop.app_errorhandler(422)
def unprocessable(error):
    if request.accept_mimetypes.best == "text/html":
        return f"<p>Please go back and try again: {escape(error.description)}</p>", 422
    return error  # the problem document


@shop.app_errorhandler(KeyRejected)
def rejected(error):
    return {"code": error.problem.code, "detail": str(error)}, error.problem.status


# --- tests ------------------------------------------------------------------------------------


@pytest.fixture
def app():
    with tempfile.TemporaryDirectory() as directory:
        app = create_app(f"sqlite:///{directory}/shop.db")
        yield app
        app.extensions["coatcheck"].engine.close()
        with app.app_context():
            db.engine.dispose()


def place_order(client):
    headers = {"Idempotency-Key": "order-1"}
    return client.post("/orders", json={"item": "coat"}, headers=headers)


def test_a_retried_order_is_placed_once(app):
    client = app.test_client()
    client.get("/login/ada")
    first, again = place_order(client), place_order(client)
    assert (first.status_code, first.json) == (201, {"orders": 1})
    assert again.json == first.json
    assert again.headers["Idempotent-Replayed"] == "true"


def test_two_users_may_use_the_same_key(app):
    ada, bob = app.test_client(), app.test_client()
    ada.get("/login/ada")
    bob.get("/login/bob")
    assert place_order(ada).json == {"orders": 1}
    assert place_order(bob).json == {"orders": 2}


def test_an_order_needs_a_key_and_a_user(app):
    client = app.test_client()
    assert client.post("/orders", json={"item": "coat"}).json["code"] == "key-missing"
    assert place_order(client).status_code == 401
    client.get("/login/ada")
    assert place_order(client).status_code == 201


def test_a_browser_gets_a_page_and_a_program_the_problem_document(app):
    client = app.test_client()
    client.get("/login/ada")
    place_order(client)
    headers = {"Idempotency-Key": "order-1", "Accept": "text/html"}
    page = client.post("/orders", json={"item": "hat"}, headers=headers)
    assert (page.status_code, page.text[:15]) == (422, "<p>Please go ba")
    headers["Accept"] = "application/json"
    document = client.post("/orders", json={"item": "hat"}, headers=headers)
    assert (document.status_code, document.json["code"]) == (422, "key-reused")
