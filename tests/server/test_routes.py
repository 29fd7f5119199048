"""`RoutePolicies`: a framework that we do not know gets policies of its own for its routes.

Flask is the proof: its implementation is the thirty lines of `FlaskRoutes`.
"""

import functools

import flask
import pytest
from werkzeug.exceptions import HTTPException

from coatcheck import Engine, Policy
from coatcheck.core.record import IN_DOUBT, RUNNING
from coatcheck.server.routes import (
    found,
    found_unguarded,
    idempotent,
    mark_of,
    policy_of_mark,
)
from coatcheck.server.wsgi import IdempotencyMiddleware
from tests.support.engines import WatchedStore
from tests.support.times import Clock

JSON = {"Content-Type": "application/json"}


class FlaskRoutes:
    """Finds the mark of the view that a request will reach."""

    def __init__(self, policy, register, *, app):
        self._policy, self._app = policy, app
        for rule in app.url_map.iter_rules():
            mark = mark_of(app.view_functions[rule.endpoint])
            for method in (rule.methods or set()) - {"GET", "HEAD", "OPTIONS"}:
                if mark is not None:
                    register(f"{method} {rule.rule}", policy_of_mark(policy, method, mark))

    def lookup(self, environ, method):
        try:
            rule, _ = self._app.url_map.bind_to_environ(environ).match(return_rule=True)
        except HTTPException:  # no such route: Flask answers that
            rule = None
        mark = rule and mark_of(self._app.view_functions[rule.endpoint])
        found(mark)
        if mark is None:
            return (self._policy if method in self._policy.methods else None), None
        policy = policy_of_mark(self._policy, method, mark)
        return (policy if method in policy.methods else None), rule.rule

    def let_pass(self, _environ):
        found_unguarded()


@pytest.fixture
def effects():
    return []


@pytest.fixture
def app(effects):
    app = flask.Flask(__name__)

    @app.post("/orders")
    def order():
        effects.append("order")
        return {"effects": len(effects)}

    @app.post("/charges/<int:number>")
    @idempotent(required=True, key_header="X-Charge", recovery="manual")
    def charge(number):
        effects.append(number)
        return {"effects": len(effects)}

    @app.route("/searches", methods=["GET", "POST"])
    @idempotent(methods=())
    def search():
        effects.append("search")
        return {"effects": len(effects)}

    return app


@pytest.fixture
def client(app):
    with Engine("memory://") as engine:
        routes = functools.partial(FlaskRoutes, app=app)
        app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, engine=engine, routes=routes)
        yield app.test_client()


def post(client, path, header=None, body=b"{}"):
    return client.post(path, data=body, headers=JSON | (header or {}))


def test_a_route_without_a_mark_has_the_policy_of_the_middleware(client, effects):
    """S3."""
    header = {"Idempotency-Key": "k"}
    assert [post(client, "/orders", header).json["effects"] for _ in range(2)] == [1, 1]
    assert post(client, "/orders").json["effects"] == 2
    assert effects == ["order", "order"]


def test_a_marked_route_has_a_policy_of_its_own_over_wsgi(client, effects):
    """S3, K3: the key is required there, and has another header."""
    missing = post(client, "/charges/7", {"Idempotency-Key": "k"})
    assert (missing.status_code, missing.json["code"]) == (400, "key-missing")
    first, second = (post(client, "/charges/7", {"X-Charge": "k"}) for _ in range(2))
    assert first.json == second.json == {"effects": 1}
    assert second.headers["Idempotent-Replayed"] == "true"
    assert effects == [7]


def test_the_paths_of_one_route_have_keys_of_their_own(client, effects):
    """S1: with a mark as without one."""
    assert post(client, "/charges/7", {"X-Charge": "k"}).status_code == 200
    assert post(client, "/charges/8", {"X-Charge": "k"}).status_code == 200
    assert effects == [7, 8]


def test_a_route_can_be_taken_out_and_safe_methods_pass(client, effects):
    """S3."""
    header = {"Idempotency-Key": "k"}
    assert [post(client, "/searches", header).json["effects"] for _ in range(2)] == [1, 2]
    assert client.get("/searches").json["effects"] == 3
    assert post(client, "/nowhere", header).status_code == 404


def test_declared_routes_are_recovered_in_the_background(app):
    """L6: by the policy of the route, without a service name."""
    store, clock = WatchedStore(), Clock()
    with Engine(store, Policy(lease="60s"), clock=clock, recover_every_s=None) as engine:
        routes = functools.partial(FlaskRoutes, app=app)
        middleware = IdempotencyMiddleware(app.wsgi_app, engine=engine, routes=routes)
        policy, template = middleware._routes.lookup(
            {"REQUEST_METHOD": "POST", "PATH_INFO": "/charges/7", "SERVER_NAME": "s"}
            | {"SERVER_PORT": "80", "wsgi.url_scheme": "http"},
            "POST",
        )
        request = engine.attempts.new_request(
            b"i" * 16, b"f" * 16, key="k", caller="someone", label=f"POST {template}"
        )
        operation = engine.begin(request, policy)
        engine.attempts.heartbeat.stop_renewing(operation)  # its process has died
        assert store.record.state == RUNNING
        clock.advance(61)
        engine.recovery.round()
        assert store.record.state == IN_DOUBT
