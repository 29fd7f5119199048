"""Prometheus, which scrapes pages of metrics on the loopback, and answers questions in PromQL."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.servers import Server, find_program, until

CONFIG = """\
global: {{scrape_interval: {interval}, evaluation_interval: {interval}}}
rule_files: [{rules}]
scrape_configs:
  - job_name: shop
    static_configs: [{{targets: [{targets}]}}]
"""
# What Grafana puts in place of its variables; the rate needs several samples.
VARIABLES = {"$job": ".*", "$__rate_interval": "{rate}", "$__range": "1h"}


class Prometheus(Server):
    """One server; *targets* are the ports of the pages."""

    def __init__(self, targets: Sequence[int], rules: Path, *, interval: str) -> None:
        self._program = find_program("prometheus", package="prometheus")
        super().__init__("prometheus")
        hosts = ", ".join(f'"127.0.0.1:{port}"' for port in targets)
        config = CONFIG.format(interval=interval, rules=rules, targets=hosts)
        (self.directory / "prometheus.yml").write_text(config)
        self.start()

    def start(self) -> None:
        """Start it, again where it has ended."""
        command = [
            self._program,
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self.launch(command, self._is_ready)

    def _is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready").close()
        except OSError:
            return False
        return True

    def wait_for_samples(self, metric: str, number: int) -> None:
        """Wait until *metric* was scraped this often."""
        until(lambda: self.value(f"count_over_time({metric}[1h])") >= number)

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an answer; an expression that is not valid raises."""
        query = urllib.parse.urlencode(parameters)
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(address) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
        assert found["status"] == "success"
        return found["data"]

    def value(self, expression: str) -> float:
        """The value of an expression that has one; 0 if there is no data yet."""
        result = self.ask("query", query=expression)["result"]
        return float(result[0]["value"][1]) if result else 0.0


def expression_of(asked: str, rate: str) -> str:
    """*asked*, an expression of a dashboard, with values for Grafana's variables."""
    for name, value in VARIABLES.items():
        asked = asked.replace(name, value.format(rate=rate))
    return asked
