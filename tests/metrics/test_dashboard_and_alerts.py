"""The dashboard and the alert rules ask for metrics that there are, and for values they can have."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml
from prometheus_client import generate_latest, start_http_server

from coatcheck.core.problem import KINDS
from coatcheck.telemetry import (
    Claimed,
    Completed,
    CountedInDoubt,
    Decision,
    DecisionOutcome,
    InDoubt,
    Lost,
    Recovered,
    Renewed,
    Swept,
    Waited,
)
from tests.metrics.readings import NAMES, PrometheusReadings
from tests.support.servers import until
from tests.support.servers.prometheus import Prometheus, expression_of

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
ALERTS = ASSETS / "prometheus-alerts.yml"
DASHBOARD = json.loads((ASSETS / "grafana-dashboard.json").read_text())
WHAT = ("7D3F-92AB-1C4E", "POST /orders", "caller", 1)


def rules():
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


def questions():
    """Every PromQL expression, by where it is."""
    asked = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            asked[f"{panel['title']} {target['refId']}"] = target["expr"]
    return asked


def busy():
    """Metrics of which each has at least one value."""
    readings = PrometheusReadings()
    readings.exporter.observe(Decision("refused", *WHAT, "store-unavailable", 12))
    readings.exporter.observe(Decision("replayed", *WHAT, "", 12))
    events = [kind(*WHAT) for kind in (Claimed, Renewed, Lost, InDoubt, Completed)]
    others = (Waited(*WHAT, 1), Recovered(*WHAT, "released"), Swept(1), CountedInDoubt(1))
    for event in (*events, *others):
        readings.exporter.listen(event)
    return readings


def test_every_panel_has_the_options_that_grafanas_schema_requires():
    """O3: those of the time series panel in `@grafana/schema` 13."""
    for panel in DASHBOARD["panels"]:
        if panel["type"] == "timeseries":
            options = panel["options"]
            assert options["legend"].keys() >= {"calcs", "displayMode", "placement", "showLegend"}
            assert options["tooltip"].keys() >= {"mode", "sort"}
        else:
            assert panel["options"]["reduceOptions"]["calcs"], panel["title"]


@pytest.fixture(scope="module")
def produced():
    """The labels of each metric that the exporter produces, as Prometheus reads them."""
    page = generate_latest(busy().registry).decode()
    found = re.findall(r"^(\w+)(?:\{(.*)\})? ", page, re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', labels)) for name, labels in found}


@pytest.mark.parametrize("where", questions())
def test_every_expression_asks_for_metrics_and_labels_that_there_are(where, produced):
    """O3."""
    expression = questions()[where]
    metrics = re.findall(r"\b(coatcheck_\w+)(?:\{(.*?)\})?", expression)
    assert metrics
    for name, matchers in metrics:
        assert name in produced
        asked = dict(re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', matchers))
        assert set(asked) <= {"job", *produced[name]}
        assert asked.get("code", "") in {"", *KINDS}
        assert asked.get("outcome", "executed") in get_args(DecisionOutcome)
    by = {
        label.strip() for one in re.findall(r"by \((.*?)\)", expression) for label in one.split(",")
    }
    assert by <= {"job", "instance"}.union(*(produced[name] for name, _ in metrics))
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_on_the_dashboard():
    """O3: and the alerts cover what must not go unnoticed."""
    asked = " ".join(questions().values())
    assert [name for name in NAMES.values() if name not in asked] == []
    alerts = " ".join(rule["expr"] for rule in rules())
    for what in ("in_doubt", "store_errors", "key-reused", "lost_leases", "last_sweep"):
        assert what in alerts


def test_every_alert_says_what_to_do():
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description"}


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_accepts_the_rules_where_it_is_installed():
    promtool = shutil.which("promtool")
    if promtool is not None:
        subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True)


def test_prometheus_answers_every_expression_where_it_is_installed():
    """O3: each panel gets data, and each rule can be evaluated."""
    if shutil.which("prometheus") is None:
        return
    registry = busy().registry
    page, serving = start_http_server(0, "127.0.0.1", registry)
    prometheus = Prometheus([page.server_port], ALERTS, interval="50ms")
    try:
        prometheus.wait_for_samples("coatcheck_in_flight", 4)
        found = {
            where: prometheus.ask("query", query=expression_of(asked, rate="1m"))["result"]
            for where, asked in questions().items()
        }
        (group,) = until(
            lambda: [
                group
                for group in prometheus.ask("rules")["groups"]
                if all(rule["health"] == "ok" for rule in group["rules"])
            ]
        )
    finally:
        prometheus.remove()
        page.shutdown()
        page.server_close()
        serving.join()
    alerts = {rule["alert"] for rule in rules()}
    assert [where for where, result in found.items() if not result and where not in alerts] == []
    assert {rule["name"] for rule in group["rules"]} == alerts
