"""The dashboard and the alert rules ask for metrics that there are, and for values they can have."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
import yaml
from prometheus_client import generate_latest

from coatcheck.core.problem import KINDS
from coatcheck.telemetry import (
    Claimed,
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


@pytest.fixture(scope="module")
def produced():
    """The labels of each metric that the exporter produces, as Prometheus reads them."""
    readings = PrometheusReadings()
    readings.exporter.observe(Decision("refused", *WHAT, "store-unavailable", 12))
    events = [kind(*WHAT) for kind in (Claimed, Renewed, Lost, InDoubt)]
    for event in (*events, Waited(*WHAT, 1), Recovered(*WHAT, "released"), Swept(1)):
        readings.exporter.listen(event)
    page = generate_latest(readings.registry).decode()
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
