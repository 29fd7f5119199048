"""The Flask extension: configuration, marks, callers, transactions and commands."""

import contextlib
import json
import sqlite3

import flask
import flask_login
import pytest
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from werkzeug.middleware.proxy_fix import ProxyFix

import coatcheck
from coatcheck import Engine, Policy
from coatcheck.errors import Misconfigured
from coatcheck.server.flask import Coatcheck, current_operation, idempotent
from coatcheck.stores import Query


@pytest.fixture
def new_app():
    """Makes guarded applications: `new_app(COATCHECK_POLICY=…)`."""
    with contextlib.ExitStack() as after:

        def new(*, extension=None, **config):
            app = flask.Flask("shop")
            app.config.update({"COATCHECK_STORE": "memory://", "SECRET_KEY": "secret", **config})
            (extension or Coatcheck()).init_app(app)
            after.callback(engine_of(app).close)
            return app

        yield new


def engine_of(app) -> Engine:
    return app.extensions["coatcheck"].engine


def post(client, path="/orders", key="k-1", body=None, **headers):
    if key is not None:
        headers["Idempotency-Key"] = key
    return client.post(path, json=body or {"item": "coat"}, headers=headers)


def is_replay(response) -> bool:
    return "Idempotent-Replayed" in response.headers


def counting(app, path="/orders", **options):
    """Adds a view that counts its calls, marked if there are *options*; returns the count."""
    calls = []

    def place(**_arguments):
        calls.append(flask.request.get_json())
        return {"number": len(calls)}, 201

    view = idempotent(**options)(place) if options else place
    app.add_url_rule(path, f"view {path}", view, methods=["POST", "PUT"])
    return calls


# --- configuration --------------------------------------------------------------------------


def test_one_line_guards_an_application_and_its_test_client_sees_it():
    """R1: routes may be declared later, and other middlewares may stand around it."""
    app = flask.Flask("shop")
    Coatcheck(app, store="memory://")
    calls = counting(app)
    first, second = post(app.test_client()), post(app.test_client())
    assert (first.status_code, second.status_code, len(calls)) == (201, 201, 1)
    assert is_replay(second)
    assert second.data == first.data
    refusal = post(app.test_client(), body={"item": "hat"})
    assert (refusal.status_code, refusal.json["code"]) == (422, "key-reused")
    assert refusal.content_type == "application/problem+json"
    engine_of(app).close()


def test_arguments_win_over_the_configuration(new_app, tmp_path):
    switch = tmp_path / "disabled"
    app = new_app(
        extension=Coatcheck(policy=Policy(required=True)),
        COATCHECK_POLICY="payments",
        COATCHECK_SECRET="s",
        COATCHECK_DISABLED_BY=str(switch),
        COATCHECK_CALLER=lambda request: request.header(b"x-tenant"),
    )
    calls = counting(app)
    assert engine_of(app).policy == Policy(required=True)
    assert post(app.test_client(), key=None).json["code"] == "key-missing"
    assert [is_replay(post(app.test_client(), X_Tenant=t)) for t in "aba"] == [False, False, True]
    switch.write_text("POST /orders\n")
    assert len(calls) == 2


def test_an_engine_replaces_what_the_configuration_says_about_one(new_app):
    engine = Engine("memory://", "payments")
    app = new_app(extension=Coatcheck(engine=engine), COATCHECK_POLICY=Policy())
    assert engine_of(app) is engine


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"COATCHECK_STOER": "memory://"}, "COATCHECK_STOER is no setting"),
        ({"COATCHECK_STORE": "nothing://"}, "nothing"),
        ({"COATCHECK_POLICY": "paymnets"}, "paymnets"),
        ({"COATCHECK_SESSION_COOKIES": "sid"}, "session_cookies"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_application_is_made(new_app, config, message):
    with pytest.raises(Misconfigured, match=message):
        new_app(**config)


def test_one_extension_guards_several_applications_each_with_its_store(new_app):
    """R1: as application factories do it."""
    extension = Coatcheck()
    apps = [new_app(extension=extension) for _ in range(2)]
    counts = [counting(app) for app in apps]
    assert [is_replay(post(app.test_client())) for app in (*apps, *apps)] == [0, 0, 1, 1]
    assert [len(calls) for calls in counts] == [1, 1]
    with pytest.raises(Misconfigured, match="already"):
        extension.init_app(apps[0])


# --- policies of views ----------------------------------------------------------------------


def methods_view(class_mark=None, method_mark=None, decorators=()):
    def post(_self, number):
        return {"number": number}, 201

    post = post if method_mark is None else idempotent(**method_mark)(post)
    view = type("Orders", (MethodView,), {"post": post, "decorators": list(decorators)})
    return view if class_mark is None else idempotent(**class_mark)(view)


@pytest.mark.parametrize(
    "view",
    [
        methods_view(class_mark={"required": True}),
        methods_view(method_mark={"required": True}),
        methods_view(class_mark={"methods": ()}, method_mark={"required": True}),
        methods_view(decorators=[idempotent(required=True)]),
    ],
    ids=["class", "method", "method wins", "decorators"],
)
def test_a_method_view_is_marked_as_a_class_a_method_or_by_its_decorators(new_app, view):
    """V2"""
    app = new_app()
    app.add_url_rule("/orders/<int:number>", view_func=view.as_view("orders"))
    client = app.test_client()
    assert post(client, "/orders/7", key=None).json["code"] == "key-missing"
    assert [is_replay(post(client, "/orders/7")) for _ in range(2)] == [False, True]
    (record,) = engine_of(app).store.find(Query()).records
    assert record.label == "POST /orders/<int:number>"


def test_a_class_that_inherits_from_a_marked_one_may_have_a_mark_of_its_own(new_app):
    """S3: the nearest class decides, and `super()` may be called."""

    class Plain(idempotent(required=True)(methods_view())):
        def post(self, number):
            return super().post(number)

    other = idempotent(required=False)(type("Other", (methods_view({"required": True}),), {}))
    app = new_app()
    app.add_url_rule("/plain/<int:number>", view_func=Plain.as_view("plain"))
    app.add_url_rule("/other/<int:number>", view_func=other.as_view("other"))
    client = app.test_client()
    assert post(client, "/plain/7", key=None).json["code"] == "key-missing"
    assert [is_replay(post(client, "/plain/7")) for _ in range(2)] == [False, True]
    assert post(client, "/other/7", key=None).status_code == 201


@pytest.mark.parametrize("is_above", [False, True])
def test_a_mark_may_stand_above_or_below_the_route_of_a_nested_blueprint(new_app, is_above):
    """V2"""
    app = new_app()
    outer, inner = flask.Blueprint("outer", "shop"), flask.Blueprint("inner", "shop")

    def place(number):
        return {"number": number}, 201

    if is_above:
        idempotent(required=True)(inner.post("/orders/<number>")(place))
    else:
        inner.post("/orders/<number>")(idempotent(required=True)(place))
    outer.register_blueprint(inner, url_prefix="/inner")
    app.register_blueprint(outer, url_prefix="/outer")
    path = "/outer/inner/orders/7"
    assert post(app.test_client(), path, key=None).status_code == 400
    assert [is_replay(post(app.test_client(), path)) for _ in range(2)] == [False, True]


def test_async_views_and_views_that_are_taken_out_are_found(new_app):
    app, calls = new_app(COATCHECK_POLICY=Policy(required=True)), []

    @app.put("/orders")
    @idempotent
    async def place():
        calls.append(current_operation.key)
        return {"number": len(calls)}

    open_calls = counting(app, "/searches", methods=())
    client = app.test_client()
    statuses = [client.put("/orders", headers={"Idempotency-Key": "k"}).status_code for _ in "12"]
    assert (statuses, calls) == ([200, 200], ["k"])
    assert [post(client, "/searches").status_code for _ in "12"] == [201, 201]
    assert len(open_calls) == 2


def test_a_route_that_is_added_after_its_path_was_requested_is_guarded(new_app):
    app = new_app(COATCHECK_POLICY=Policy(required=True))
    assert post(app.test_client(), key=None).status_code == 400
    calls = counting(app, required=False)
    assert [post(app.test_client(), key=None).status_code for _ in "12"] == [201, 201]
    assert len(calls) == 2


def test_an_unknown_path_or_method_is_flasks_to_answer(new_app):
    app = new_app()
    counting(app)
    client = app.test_client()
    assert post(client, "/nothing").status_code == 404
    assert client.patch("/orders", headers={"Idempotency-Key": "k"}).status_code == 405


def test_a_request_that_is_refused_before_its_view_begins_keeps_its_key_free(new_app):
    app = new_app()
    calls = counting(app, required=True)
    app.before_request(lambda: flask.abort(403) if "Bad" in flask.request.headers else None)
    assert post(app.test_client(), Bad="1").status_code == 403
    assert (post(app.test_client()).status_code, len(calls)) == (201, 1)


def test_two_hosts_are_two_tenants_also_behind_proxy_fix(new_app):
    """S1"""
    app = flask.Flask("shop", host_matching=True, static_host="static.example")
    app.wsgi_app = ProxyFix(app.wsgi_app)
    Coatcheck(app, store="memory://")
    calls = []

    @app.post("/orders", host="<host>")
    @idempotent(required=True)
    def place(host):
        calls.append(host)
        return host

    bodies = [post(app.test_client(), Host=host).text for host in ("a.test", "b.test", "a.test")]
    assert (bodies, calls) == (["a.test", "b.test", "a.test"], ["a.test", "b.test"])
    engine_of(app).close()


# --- the operation --------------------------------------------------------------------------


def test_the_current_operation_is_there_in_guarded_requests_only(new_app):
    app = new_app(COATCHECK_DISABLED_BY=lambda label: label == "POST /off")

    def view():
        seen = (bool(current_operation), current_operation() is not None)
        if seen == (False, False):
            with pytest.raises(RuntimeError, match="not guarded"):
                _ = current_operation.key
            return {"seen": seen}
        assert current_operation() is current_operation()
        return {"seen": seen, "attempt": current_operation.attempt}

    for path in ("/orders", "/off"):
        app.add_url_rule(path, path, idempotent(view), methods=["POST"])
    client = app.test_client()
    assert post(client).json == {"seen": [True, True], "attempt": 1}
    assert post(client, key=None).json == {"seen": [False, False]}
    assert post(client, "/off").json == {"seen": [True, True], "attempt": 1}


# --- the caller -----------------------------------------------------------------------------


class User(flask_login.UserMixin):
    def __init__(self, id):
        self.id = id


@pytest.fixture
def login_app(new_app):
    """An application whose users log in with Flask-Login; `/touch` changes their session."""
    app = new_app()
    flask_login.LoginManager(app).user_loader(User)
    app.calls = counting(app)

    @app.get("/login/<id>")
    def login(id):
        flask_login.login_user(User(id), remember="remember" in flask.request.args)
        return {}

    @app.get("/touch/<what>")
    def touch(what):
        flask.session["seen"] = what
        return {"user": flask_login.current_user.get_id()}

    return app


def test_the_user_of_flask_login_is_the_caller_whatever_else_the_session_holds(login_app):
    """S1, S2, S4: a session that was changed or signed anew is the same user's."""
    ada, other_browser, bob = (login_app.test_client() for _ in range(3))
    for client, who in ((ada, "ada"), (other_browser, "ada"), (bob, "bob")):
        client.get(f"/login/{who}")
    assert not is_replay(post(ada))
    ada.get("/touch/something")
    assert is_replay(post(ada))
    assert is_replay(post(other_browser))
    assert not is_replay(post(bob))
    assert not is_replay(post(ada, Authorization="Bearer another"))
    assert len(login_app.calls) == 3


def test_a_forged_session_is_nobodys_and_replays_nothing(login_app, new_app):
    """S1, S3: a session that was signed with another secret, or not at all."""
    ada = login_app.test_client()
    ada.get("/login/ada")
    post(ada)
    forger = new_app(SECRET_KEY="guessed")
    forged = forger.session_interface.get_signing_serializer(forger).dumps({"_user_id": "ada"})
    for cookie in (f"session={forged}", "session=é", "remember_token=ada|é", "remember_token=ada"):
        client = login_app.test_client(use_cookies=False)
        key = cookie.encode().hex()
        assert not is_replay(post(client, Cookie=cookie)) or "session=" not in cookie
        assert post(client, key=key, Cookie=cookie).status_code == 201


def test_a_remembered_user_who_gets_a_session_is_the_same_caller(login_app):
    """S4"""
    client = login_app.test_client()
    client.get("/login/ada?remember=1")
    client.delete_cookie("session")
    assert not is_replay(post(client))
    assert client.get("/touch/it").json == {"user": "ada"}
    assert client.get_cookie("session") is not None
    assert is_replay(post(client))


def test_a_session_without_a_user_is_compared_by_its_verified_content(new_app):
    """S4: under any name of its cookie, and while the secret is rotated."""
    app = new_app(SESSION_COOKIE_NAME="basket", SECRET_KEY_FALLBACKS=["old"])
    counting(app)
    signed = []
    for secret in ("secret", "old", "guessed"):
        signer = flask.Flask("signer")
        signer.secret_key = secret
        serializer = app.session_interface.get_signing_serializer(signer)
        signed.append("basket=" + serializer.dumps({"basket": [1]}))
    client = app.test_client(use_cookies=False)
    answers = [post(client, Cookie=cookie) for cookie in signed]
    assert [answer.status_code for answer in answers] == [201, 201, 422]
    assert is_replay(answers[1])


# --- transactions ---------------------------------------------------------------------------


def test_the_session_of_flask_sqlalchemy_commits_with_the_record(tmp_path):
    """T1: the order and the record are both there, or neither; each request has its session."""
    url = f"sqlite:///{tmp_path}/shop.db"
    app, db = flask.Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    db.init_app(app)

    class Order(db.Model):
        id = db.Column(db.Integer, primary_key=True)

    with app.app_context():
        db.create_all()
    Coatcheck(app, store=url, transactions=db.session)

    @app.post("/orders")
    @idempotent(mode="transaction", required=True)
    def place():
        assert current_operation.connection is db.session()
        db.session.add(Order())
        db.session.flush()
        if flask.request.get_json().get("fails"):
            flask.abort(500)
        return {"orders": db.session.query(Order).count()}, 201

    client = app.test_client()
    assert post(client, key="k-0", body={"fails": True}).status_code == 500
    assert [post(client).json for _ in range(2)] == [{"orders": 1}] * 2
    assert is_replay(post(client))
    with app.app_context():
        assert post(client, key="k-2").json == {"orders": 2}
        assert db.session.query(Order).count() == 2
        db.engine.dispose()
    assert not db.session.registry.registry  # no session is left
    engine_of(app).close()


def test_a_view_whose_transaction_collided_runs_again(new_app, tmp_path):
    """L9: although Flask makes a 500 of what the view raises."""
    calls = []
    app = new_app(
        COATCHECK_STORE=f"sqlite:///{tmp_path}/shop.db",
        COATCHECK_TRANSACTIONS=lambda: sqlite3.connect(tmp_path / "shop.db"),
    )

    @app.post("/orders")
    @idempotent(mode="transaction", transaction_retries=1)
    def place():
        calls.append(current_operation.attempt)
        if len(calls) == 1:
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT
            raise error
        return {"calls": len(calls)}, 201

    client = app.test_client()
    assert (post(client).json, is_replay(post(client))) == ({"calls": 2}, True)


# --- refusals -------------------------------------------------------------------------------


def refusals_of(app):
    """A client without a key, and one with a key that was used for something else."""
    counting(app)
    counting(app, "/strict", required=True)
    client = app.test_client()
    post(client)
    return post(client, "/strict", key=None), post(client, body={"item": "hat"})


def test_an_error_handler_for_a_status_answers_refusals(new_app):
    """D2: it gets Werkzeug's exception of that status, whose cause is ours."""
    app = new_app()

    @app.errorhandler(422)
    def reused(error):
        cause = error.__cause__
        assert isinstance(cause, coatcheck.errors.KeyReused)
        code = json.loads(error.get_response().get_data())["code"]
        assert code == cause.problem.code
        return f"{flask.request.path} {error.code} {code}: {error.description}", 422

    missing, reused_answer = refusals_of(app)
    assert missing.json["code"] == "key-missing"
    assert reused_answer.status_code == 422
    assert reused_answer.text.startswith("/orders 422 key-reused: ")
    assert reused_answer.headers["Idempotency-Reference"]
    assert reused_answer.headers["Cache-Control"] == "no-store"


def test_an_error_handler_for_our_exceptions_answers_refusals(new_app):
    """D2: the nearest class is chosen, as Flask does."""
    app = new_app()
    app.errorhandler(coatcheck.errors.Refused)(lambda error: (error.problem.code, 418))
    app.errorhandler(coatcheck.errors.KeyReused)(lambda _error: ("reused", 409))
    missing, reused = refusals_of(app)
    assert (missing.status_code, missing.text) == (418, "key-missing")
    assert (reused.status_code, reused.text) == (409, "reused")


def test_an_error_handler_of_a_blueprint_is_for_its_views(new_app):
    """D2."""
    app, shop = new_app(), flask.Blueprint("shop", "shop")
    counting(shop, "/shop", required=True)
    shop.errorhandler(400)(lambda _error: ("shop", 400))
    app.register_blueprint(shop)
    counting(app, required=True)
    client = app.test_client()
    assert post(client, "/shop", key=None).text == "shop"
    assert post(client, key=None).json["code"] == "key-missing"


def test_error_handlers_for_everything_do_not_see_refusals(new_app):
    """D2: they may be meant for bugs; and one that fails itself changes nothing."""
    app = new_app()
    app.errorhandler(Exception)(lambda _error: ("a bug", 500))
    app.errorhandler(404)(lambda _error: ("no such page", 404))
    missing, reused = refusals_of(app)
    assert (missing.json["code"], reused.json["code"]) == ("key-missing", "key-reused")
    failing = new_app()
    failing.errorhandler(400)(lambda _error: 1 / 0)
    assert refusals_of(failing)[0].json["code"] == "key-missing"


def test_a_response_that_cannot_be_replayed_is_refused_through_error_handlers(new_app):
    """D2: as every refusal."""
    app = new_app(COATCHECK_POLICY=Policy(response_bytes_max=1_000))
    app.add_url_rule("/large", "large", lambda: "x" * 2_000, methods=["POST"])
    app.errorhandler(409)(lambda error: (error.__cause__.problem.code, 409))
    client = app.test_client()
    assert post(client, "/large").status_code == 200
    assert post(client, "/large").text == "result-unavailable"


# --- commands -------------------------------------------------------------------------------


def test_flask_coatcheck_runs_the_commands_on_the_store_of_the_application(new_app, tmp_path):
    app = new_app(COATCHECK_STORE=f"sqlite:///{tmp_path}/orders.db")
    counting(app)
    reference = post(app.test_client()).headers["Idempotency-Reference"]
    run = app.test_cli_runner().invoke
    assert json.loads(run(args=["coatcheck", "lookup", reference, "--json"]).stdout)
    assert run(args=["coatcheck", "lookup", "nothing"]).exit_code == 1
    assert run(args=["coatcheck", "stats", "--store", "nothing://"]).exit_code == 2
    assert "demo" not in run(args=["coatcheck", "--help"]).stdout
    in_memory = new_app(COATCHECK_STORE=coatcheck.open_store("memory://"))
    result = in_memory.test_cli_runner().invoke(args=["coatcheck", "list"])
    assert (result.exit_code, "no URL" in result.output) == (2, True)
