"""A guarded Flask application for a real server; its effects are lines in a file."""

import os
from pathlib import Path

from flask import Flask

from coatcheck.server.flask import Coatcheck, current_operation, idempotent

DIRECTORY = Path(os.environ.get("SHOP_DIRECTORY", ""))


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["COATCHECK_STORE"] = f"sqlite:///{DIRECTORY}/orders.db"
    Coatcheck(app)

    @app.get("/pid")
    def pid() -> str:
        return str(os.getpid())

    @app.post("/orders")
    @idempotent(required=True)
    def place() -> tuple[str, int]:
        with (DIRECTORY / "effects").open("a") as effects:
            effects.write(f"{current_operation.reference}\n")
        return "placed", 201

    return app


if "SHOP_DIRECTORY" in os.environ:
    wsgi_app = create_app()
