"""Makes docs/assets/dashboard-panels.png: the panels of the dashboard, from a real Prometheus.

    python docs/dashboard_picture.py [SECONDS]

It runs examples/shop under load, with its provider killed for a while, and a Prometheus that
scrapes it. Then it asks Prometheus every expression of grafana-dashboard.json and draws the answers
where the dashboard has them. The picture is not one of Grafana. It needs `prometheus` and
`chromium` of the system.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx2  # noqa: E402 - after the path
import uvicorn  # noqa: E402 - as above
from prometheus_client import make_asgi_app  # noqa: E402 - as above

from coatcheck import AsyncEngine  # noqa: E402 - as above
from coatcheck.metrics import prometheus as metrics  # noqa: E402 - as above
from tests.support.servers import free_port, until  # noqa: E402 - as above
from tests.support.servers.chromium import chromium  # noqa: E402 - as above
from tests.support.servers.prometheus import Prometheus, expression_of  # noqa: E402 - as above

ASSETS = ROOT / "docs" / "assets"
DASHBOARD = json.loads((ASSETS / "grafana-dashboard.json").read_text())
RATE = "20s"
ROUTES = ("cards", "cards", "cards", "transfers", "baskets", "terminals")
CLIENTS = 12
OUTAGE = 0.1  # the share of the time in which the provider is dead
COLUMN_PX, ROW_PX, GAP_PX, HEAD_PX = 50, 30, 8, 34
HEAD = (
    "The panels of grafana-dashboard.json, drawn from the answers of Prometheus. Not Grafana. "
    "examples/shop under load for {seconds} s, without its payment provider for {outage:.0f} s."
)
COLOURS = ("#3274d9", "#56a64b", "#e0752d", "#a352cc", "#e02f44", "#37872d", "#8f8f8f", "#b8860b")


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 180
    with tempfile.TemporaryDirectory() as directory:
        provider_port, shop_port = free_port(), free_port()
        shop = _start("serve", directory, provider_port, shop_port)
        prometheus = Prometheus([shop_port], ASSETS / "prometheus-alerts.yml", interval="1s")
        try:
            until(lambda: _answers(shop_port))
            asyncio.run(_load(directory, provider_port, shop_port, seconds))
            panels = list(_panels(prometheus, seconds))
        finally:
            shop.kill()
            shop.wait()
            prometheus.remove()
    with chromium() as browsers:
        browser = browsers.launch()
        width = 24 * COLUMN_PX + 2 * GAP_PX
        page = browser.new_page(viewport={"width": width, "height": 600})
        head = HEAD.format(seconds=seconds, outage=seconds * OUTAGE)
        page.set_content(f"<style>{STYLE}</style><h1>{head}</h1>{''.join(panels)}")
        height = page.evaluate(
            "Math.max(...[...document.querySelectorAll('div')]"
            ".map(d => d.offsetTop + d.offsetHeight))"
        )
        page.set_viewport_size({"width": width, "height": height + GAP_PX})
        page.screenshot(path=ASSETS / "dashboard-panels.png")
        browser.close()


# --- the run ------------------------------------------------------------------------------------


def _start(what: str, directory: str, provider_port: int, port: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PROVIDER": f"http://127.0.0.1:{provider_port}"}
    command = [sys.executable, __file__, what, directory, str(port)]
    return subprocess.Popen(  # noqa: S603 - this file
        command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL
    )


def _serve(directory: str, port: int) -> None:
    from examples.shop.app import open_sales, shop_app  # noqa: PLC0415 - reads the environment

    database = f"sqlite:///{directory}/shop.db"
    open_sales(database)
    engine = AsyncEngine(database, sweep_every_s=15)
    metrics.instrument(engine)
    app = shop_app(engine=engine)
    app.mount("/metrics", make_asgi_app())
    uvicorn.run(app, port=port, log_level="critical")


def _provide(directory: str, port: int) -> None:
    from examples.shop.provider import provider_app  # noqa: PLC0415 - as above

    uvicorn.run(provider_app(f"{directory}/provider.db"), port=port, log_level="critical")


def _answers(port: int, path: str = "/metrics/") -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}{path}").status_code == 200
    except httpx2.TransportError:
        return False


async def _load(directory: str, provider_port: int, shop_port: int, seconds: int) -> None:
    """Customers order, and many send a request again; the provider is dead for a tenth of it."""
    provider = _start("provide", directory, provider_port, provider_port)
    try:
        await asyncio.to_thread(until, lambda: _answers(provider_port, "/docs"))
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{shop_port}", timeout=30) as http:
            ends_s = time.monotonic() + seconds
            customers = [asyncio.create_task(_customer(http, n, ends_s)) for n in range(CLIENTS)]
            await asyncio.sleep(seconds * 0.6)
            provider.kill()
            provider.wait()
            await asyncio.sleep(seconds * OUTAGE)
            provider = _start("provide", directory, provider_port, provider_port)
            await asyncio.gather(*customers)
    finally:
        provider.kill()
        provider.wait()


async def _customer(http: httpx2.AsyncClient, number: int, ends_s: float) -> None:
    chance = random.Random(number)  # noqa: S311 - no secret
    orders = 0
    while time.monotonic() < ends_s:
        orders += 1
        route, key = chance.choice(ROUTES), f"customer-{number}-order-{orders}"
        order = {"number": number * 100_000 + orders, "cents": 1_999}
        send = [_send(http, route, key, order)]
        luck = chance.random()
        if luck < 0.15:  # a retry while the first request still runs
            send.append(_send(http, route, key, order))
        await asyncio.gather(*send)
        if luck > 0.8:  # a retry after a lost answer
            await _send(http, route, key, order)
        if luck > 0.98:  # a mistake of a client: the key of another order
            await _send(http, route, key, {**order, "cents": 1})
        await asyncio.sleep(chance.random() * 0.1)


async def _send(http: httpx2.AsyncClient, route: str, key: str, order: dict[str, int]) -> None:
    with suppress(httpx2.TransportError):  # the server hangs up after a handler that raised
        await http.post(f"/{route}", json=order, headers={"Idempotency-Key": key})


# --- the picture --------------------------------------------------------------------------------


def _panels(prometheus: Prometheus, seconds: int) -> Iterator[str]:
    ends = time.time()
    for panel in DASHBOARD["panels"]:
        series = []
        for target in panel["targets"]:
            expression = expression_of(target["expr"], RATE)
            span = {"start": ends - seconds, "end": ends, "step": max(1, seconds // 180)}
            found = prometheus.ask("query_range", query=expression, **span)["result"]
            print(f"{panel['title']} {target['refId']}: {len(found)} series")
            series += [
                (_named(target["legendFormat"], one["metric"]), one["values"]) for one in found
            ]
        unit = panel["fieldConfig"]["defaults"].get("unit", "short")
        content = (_stat if panel["type"] == "stat" else _graph)(panel["gridPos"], series, unit)
        yield _framed(panel["gridPos"], panel["title"], content)


def _named(legend: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def _framed(at: dict[str, int], title: str, content: str) -> str:
    place = (
        f"left:{at['x'] * COLUMN_PX + GAP_PX}px;top:{at['y'] * ROW_PX + HEAD_PX}px;"
        f"width:{at['w'] * COLUMN_PX - GAP_PX}px;height:{at['h'] * ROW_PX - GAP_PX}px"
    )
    return f'<div style="{place}"><b>{html.escape(title)}</b>{content}</div>'


def _stat(_at: dict[str, int], series: list[tuple[str, Any]], unit: str) -> str:
    value = float(series[0][1][-1][1]) if series else float("nan")
    return f"<p>{_shown(value, unit)}</p>"


def _graph(at: dict[str, int], series: list[tuple[str, Any]], unit: str) -> str:
    width, height = at["w"] * COLUMN_PX - GAP_PX - 20, at["h"] * ROW_PX - GAP_PX - 70
    points = [
        (name, [(float(x), float(y)) for x, y in values if y not in ("NaN", "+Inf")])
        for name, values in series
    ]
    points = [(name, values) for name, values in points if values]
    if not points:
        return "<i>no data in this run</i>"
    times = [x for _, values in points for x, _ in values]
    top = max((y for _, values in points for _, y in values), default=0) * 1.1 or 1
    left, span = min(times), max(max(times) - min(times), 1)
    lines = "".join(
        f'<polyline stroke="{COLOURS[n % len(COLOURS)]}" points="'
        + " ".join(f"{(x - left) / span * width:.1f},{height - y / top * height:.1f}" for x, y in v)
        + '"/>'
        for n, (_, v) in enumerate(points)
    )
    legend = "".join(
        f'<span style="color:{COLOURS[n % len(COLOURS)]}">━</span> {html.escape(name)} &nbsp;'
        for n, (name, _) in enumerate(points)
    )
    return (
        f'<svg width="{width}" height="{height}"><line x1="0" x2="{width}" y1="{height}" '
        f'y2="{height}"/><line x1="0" x2="{width}" y1="0" y2="0"/>{lines}'
        f'<text x="2" y="12">{_shown(top, unit)}</text></svg><small>{legend}</small>'
    )


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "s":
        return f"{value * 1_000:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:.3g}" + (" / s" if unit in ("reqps", "ops") else "")


STYLE = """
body { background: #f4f5f5; font: 13px sans-serif; margin: 0 }
div { position: absolute; box-sizing: border-box; background: white; border: 1px solid #ddd;
      padding: 8px 10px; overflow: hidden }
h1 { font-size: 14px; font-weight: normal; margin: 9px }
b { display: block; margin-bottom: 6px }
p { font-size: 36px; margin: 8px 0; text-align: center }
svg { display: block } polyline { fill: none; stroke-width: 1.5 } line { stroke: #e5e5e5 }
text { font-size: 11px; fill: #777 } small { color: #444; line-height: 1.7 } i { color: #999 }
"""

if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        _serve(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["provide"]:
        _provide(sys.argv[2], int(sys.argv[3]))
    else:
        main()
