"""What these pages show is what runs: every block of code is part of an example (V2)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "recovery.md",
    *(f"howto/{name}.md" for name in ("steps", "crash", "in-doubt", "polling", "own-store")),
    *(
        "howto/fastapi.md",
        "howto/flask.md",
        "howto/litestar.md",
        "howto/django.md",
        "howto/routes.md",
        "howto/security.md",
        "howto/rollout.md",
    ),
    *("howto/client.md", "howto/observability.md"),
    *(
        f"howto/{name}.md"
        for name in (
            "consumers",
            "outgoing-events",
            "order-pipeline",
            "rabbitmq",
            "nats",
            "redis-streams",
            "kafka",
            "sqs",
            "faststream",
            "celery",
            "dramatiq",
            "rq",
            "procrastinate",
        )
    ),
    "howto/sagas.md",
)
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

# What each prints, and so what a reader may expect of it.
PRINTED = {
    "payments": """\
/cards 500 201
/transfers 500 201
/orders 500 201
/terminals 500 409 outcome-unknown
/terminals receipt 17
charges: 1 1 1 1 shipped: 1
""",
    "in_doubt": """\
<Operation … 'charges' attempt 1> [{'about to charge': '41'}]
<Operation … 'charges' attempt 1> [{'about to charge': '42'}]
<Operation … 'charges' attempt 1> [{'about to charge': '43'}]
41 charge 7
42 charged for 42
43 charged for 43, by hand
""",
    "steps": """\
first attempt: the provider did not answer
second attempt: {'order': '42', 'charged': '30 from the card'}
charged 1 time, shipped 1 time
""",
    "trip": """\
flowchart TD
    start(["trip"])
    s0["flight"]
    start --> s0
    s0 -. undo .-> u0["cancel_flight"]
    s1["hotel"]
    start --> s1
    s1 -. undo .-> u1["cancel_hotel"]
    s2["charge"]
    s0 --> s2
    s1 --> s2
    s2 -. undo .-> u2["refund"]
    s3{{"pivot"}}
    s2 --> s3
    s4["tickets"]
    s3 --> s4
    s4 --> done([done])

tickets of Rome
tickets of Rome again, and 70 are left
the saga 'trip' was undone, because its step 'charge' failed: ValueError: the card has too little \
money; for another try, use another key
room of Tokyo is cancelled
tickets of Oslo after a time-out; 30 are left
undone ['flight: undone', 'hotel: undone', 'charge: failed']
""",
    "own_store": """\
placed
order 42
order 42
""",
    "flask_routes": """\
400 key-missing 0 charged
201 {'charge': 1, 'order': 42} 1 charged
201 {'charge': 1, 'order': 42} 1 charged
""",
    "revoked": """\
old 201 1 placed
new 201 1 placed
stolen 401 1 placed
new 401 1 placed
""",
    "json_web_tokens": """\
first 201 None 1
refreshed 201 None 1
expired 401 Bearer error="invalid_token" 1
another user's 201 None 2
""",
    "sessions": """\
Starlette 201 {'for': 'ada'}
Starlette 201 {'for': 'ada'}
forged 422
Flask 201 {'for': 'ada'}
Flask 201 {'for': 'ada'}
""",
    "rollout": """\
201 POST /orders executed
201 POST /orders would_replay
201 POST /orders would_refuse key-reused
400 POST /charges refused key-missing
201 POST /charges executed
201 POST /charges replayed
201 2 charges
""",
    "client": """\
{'charge': 1} done after 2 attempts
{'charge': 2} replayed
charged 2 times for 2 actions
""",
    "client_libraries": """\
{'charge': 1} {'charge': 2} {'charge': 3}
charged 3 times for 3 actions
""",
    "outbox": """\
b'{"charge": 1}'
charged 1 time
""",
    "outbox_probe": """\
Done(response=Response(status=200, headers=[], body=b'{"amount": 30}'))
""",
    "optimistic": """\
at once: tea milk sugar
settled: tea sugar
""",
    "prometheus_metrics": """\
coatcheck_decisions_total{code="",label="POST /orders/{shop}",outcome="executed"} 2.0
coatcheck_decisions_total{code="",label="POST /orders/{shop}",outcome="replayed"} 1.0
coatcheck_decisions_total{code="key-reused",label="POST /orders/{shop}",outcome="refused"} 1.0
coatcheck_in_flight 0.0
""",
    "opentelemetry_spans": """\
coatcheck charges: executed, attempt 1
coatcheck charges: replayed, attempt 1
""",
    "json_logs": """\
{"level": "INFO", "message": "coatcheck: operation … (orders) was executed as attempt 1 in 0 ms", \
"outcome": "executed", "reference": "…", "label": "orders", "scope": "", "attempt": 1, \
"code": "", "duration_ms": 0}
{"event": "coatcheck: operation … (orders) was replayed in 0 ms", "level": "info", \
"outcome": "replayed", "reference": "…", "label": "orders", "scope": "", "attempt": 1, \
"code": "", "duration_ms": 0, "trace": ""}
""",
    "outgoing_events": """\
orders.placed {"order":17}
""",
    "consumer": """\
1 invoice; another message with this event id, and another payload, came before
""",
    "crash": """\
the process ended with -9
the retry returned: done
charged 2 times
""",
}


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_promises(name, tmp_path):
    """L5, L6, L7, S2, S4: money moves once, wherever that was promised."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    printed = re.sub(r"\b\w{4}-\w{4}-\w{4}\b", "…", printed)  # references
    assert printed == PRINTED[name]


def lines_of(text):
    """What is said in *text*, however far it stands to the right."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def is_within(block, lines):
    starts = range(len(lines) - len(block) + 1)
    return any(lines[start : start + len(block)] == block for start in starts)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_code_is_part_of_an_example(page):
    text = (ROOT / "docs" / page).read_text()
    blocks = [lines_of(block) for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    sources = [lines_of(path.read_text()) for path in EXAMPLES]
    assert blocks
    strangers = [block for block in blocks if not any(is_within(block, s) for s in sources)]
    assert strangers == []
