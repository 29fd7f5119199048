"""Routes with policies of their own, in a framework that coatcheck does not know: here Flask.

`FlaskRoutes` is all that a framework needs: it tells the middleware which policy a request has.

Run it: python examples/flask_routes.py
"""

import functools
import tempfile
from collections.abc import Callable, MutableMapping
from typing import Any

from flask import Flask, request
from werkzeug.exceptions import HTTPException

from coatcheck import Policy
from coatcheck.server.routes import found, found_unguarded, idempotent, mark_of, policy_of_mark
from coatcheck.server.wsgi import IdempotencyMiddleware

SAFE = {"GET", "HEAD", "OPTIONS"}


class FlaskRoutes:
    """Finds the policy of the view function that a request will reach."""

    def __init__(
        self, policy: Policy, register: Callable[[str, Policy], None], *, app: Flask
    ) -> None:
        self._policy, self._app = policy, app
        for rule in app.url_map.iter_rules():  # so that the background can recover these routes
            mark = mark_of(app.view_functions[rule.endpoint])
            if mark is not None:
                for method in (rule.methods or set()) - SAFE:
                    register(f"{method} {rule.rule}", policy_of_mark(policy, method, mark))

    def lookup(
        self, environ: MutableMapping[str, Any], method: str
    ) -> tuple[Policy | None, str | None]:
        """Return the policy of a request and the template of its route."""
        try:
            rule, _ = self._app.url_map.bind_to_environ(dict(environ)).match(return_rule=True)
        except HTTPException:  # no such route: Flask sends the 404
            rule = None
        mark = None if rule is None else mark_of(self._app.view_functions[rule.endpoint])
        found(mark)
        if rule is None or mark is None:  # the route has no mark: the middleware's policy
            return (self._policy if method in self._policy.methods else None), None
        policy = policy_of_mark(self._policy, method, mark)
        return (policy if method in policy.methods else None), rule.rule

    def let_pass(self, _environ: MutableMapping[str, Any]) -> None:
        """Note that this request is not guarded, because its method is safe."""
        found_unguarded()


app = Flask(__name__)
charges: list[int] = []


@app.post("/charges/<int:order>")
@idempotent(required=True, window="72h", recovery="manual")
def charge(order: int) -> tuple[dict[str, int], int]:
    charges.append(request.get_json()["cents"])
    return {"order": order, "charge": len(charges)}, 201


@app.post("/searches")
@idempotent(methods=())  # never guarded
def search() -> dict[str, list[int]]:
    return {"found": []}


def guard(store: str) -> IdempotencyMiddleware:
    """Wrap the application, after all its routes are declared."""
    routes = functools.partial(FlaskRoutes, app=app)
    middleware = IdempotencyMiddleware(app.wsgi_app, store=store, routes=routes)
    app.wsgi_app = middleware  # type: ignore[method-assign]  # as Flask documents it
    return middleware


def main() -> None:
    """Send a charge without a key, and then twice with one."""
    with tempfile.TemporaryDirectory() as directory:
        middleware = guard(f"sqlite:///{directory}/charges.db")
        client = app.test_client()
        for headers in ({}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
            response = client.post("/charges/42", json={"cents": 500}, headers=headers)
            answer = response.json or {}
            print(response.status_code, answer.get("code", answer), len(charges), "charged")
        middleware.engine.close()


if __name__ == "__main__":
    main()
