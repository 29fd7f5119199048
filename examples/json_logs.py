"""The log as JSON, with the standard library and with structlog."""

import json
import logging
import sys

import structlog

from coatcheck import Engine


class JsonFormatter(logging.Formatter):
    """One JSON object for each line."""

    PARTS = ("outcome", "reference", "label", "scope", "attempt", "code", "duration_ms")

    def format(self, record: logging.LogRecord) -> str:
        parts = {name: getattr(record, name) for name in self.PARTS if hasattr(record, name)}
        return json.dumps({"level": record.levelname, "message": record.getMessage(), **parts})


structlog_formatter = structlog.stdlib.ProcessorFormatter(
    foreign_pre_chain=[structlog.stdlib.add_log_level, structlog.stdlib.ExtraAdder()],
    processors=[
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.JSONRenderer(),
    ],
)


def log_with(formatter: logging.Formatter) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    logger = logging.getLogger("coatcheck")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ == "__main__":
    with Engine("memory://", clock=lambda: 1_000_000) as engine:
        for formatter in (JsonFormatter(), structlog_formatter):
            log_with(formatter)
            engine.run("order-17", int, scope="orders")
