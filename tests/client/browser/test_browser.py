"""The browser module, in Chromium: what the page submits happens once, and the page shows it."""

import re
import textwrap
import time
from email.utils import formatdate
from importlib.resources import files
from pathlib import Path

import pytest

from coatcheck.client.keys import key_of_reference
from tests.client.browser.scripted_shop import ScriptedShop
from tests.support.lossy_relay import LossyRelay
from tests.support.servers.chromium import chromium, crash
from tests.support.times import eventually

ROOT = Path(__file__).resolve().parents[3]
# What `call` begins with: short pauses, so that a test takes no longer than it must.
CLIENT = """
const { createClient } = await import("/coatcheck.js");
const retry = { backoffBaseMs: 1, ...options.retry };
const client = createClient({ database: "test", retry });
"""


@pytest.fixture(scope="module")
def driver():
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def browser(driver):
    browser = driver.launch()
    yield browser
    browser.close()


@pytest.fixture
def shop():
    with ScriptedShop() as shop:
        yield shop


@pytest.fixture
def context(browser, shop):  # closed before the shop, whose port another test may then get
    context = browser.new_context()
    yield context
    context.close()


def opened(context, shop):
    """A new tab with the shop's page, which sends its outbox."""
    page = context.new_page()
    page.goto(shop.url)
    page.wait_for_selector("body[data-ready]")
    return page


def call(page, script, **options):
    """What *script* returns, in which `client` is a client."""
    return page.evaluate(f"async (options) => {{ {CLIENT} {script} }}", options)


def order(page, item="Blue teapot"):
    page.click(f"button[data-item='{item}']")


def shown(page, state, count=1):
    """Wait until the page shows *count* orders in this *state*; their texts."""
    page.wait_for_function(
        "([state, count]) => document.querySelectorAll(`#orders .${state}`).length === count",
        arg=[state, count],
    )
    return [row.inner_text() for row in page.query_selector_all(f"#orders .{state} span")]


POST = """
const { outcome, attempts, wasReplayed, key, gaveUp, code, response } =
  await client.post("/orders", { item: "tea" }, options.call);
return { outcome, attempts, wasReplayed, key, gaveUp, code, status: response?.status ?? 0 };
"""


def test_a_lost_answer_is_sent_for_again_with_the_same_key(context, shop):
    """C1, C2: closed and reset connections; one effect."""
    with LossyRelay(shop.port) as relay:
        page = context.new_page()
        page.goto(f"{relay.url}/coatcheck.js")
        call(page, "return null")  # the module is loaded before the network fails
        relay.script += ["lose", "reset", "lose", "reset"]
        result = call(page, POST, call={"reference": "order-17"})
    key = key_of_reference("order-17")  # as in Python
    assert (result["outcome"], result["wasReplayed"], result["status"]) == ("done", True, 201)
    assert result["key"] == key
    assert set(shop.keys) == {key}
    assert len(shop.keys) == 5
    assert shop.items == ["tea"]


def later(status, *, as_date, code=None):
    """A refusal that asks for one second, on the server's own clock."""
    now_s = 1_700_000_000
    value = formatdate(now_s + 1, usegmt=True) if as_date else "1"
    headers = {"Retry-After": value, "Date": formatdate(now_s, usegmt=True)}
    return status, headers, {"code": code} if code else {}


@pytest.mark.parametrize("as_date", [False, True])
def test_an_answer_that_asks_to_come_back_is_obeyed(context, shop, as_date):
    """C1: `Retry-After` in seconds and as a date, after 409 in progress, 429 and 503."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    shop.script += [
        later(409, as_date=as_date, code="in-progress"),
        later(429, as_date=as_date),
        later(503, as_date=as_date),
    ]
    started_s = time.monotonic()
    result = call(page, POST)
    assert time.monotonic() - started_s >= 3
    assert (result["outcome"], result["attempts"]) == ("done", 4)
    assert shop.keys == [result["key"]] * 4
    assert shop.items == ["tea"]


SAME, NEVER = {"retry": "same-key"}, {"retry": "never"}
RULES = [
    # status, problem, outcome, attempts of at most 2, why it gave up. Chromium repeats 408 by itself.
    (400, {}, "refused", 1, ""),
    (400, SAME, "refused", 2, "attempts"),
    (409, {}, "refused", 1, ""),
    (409, {"code": "in-progress"}, "unknown", 2, "attempts"),
    (409, {"code": "outcome-unknown", **NEVER}, "unknown", 1, ""),
    (409, {"type": "https://x.example#result-unavailable"}, "done", 1, ""),
    (422, {"code": "key-reused", "retry": "new-key"}, "refused", 1, ""),
    (425, {}, "refused", 2, "attempts"),
    (500, {}, "unknown", 2, "attempts"),
    (503, NEVER, "unknown", 1, ""),
]


def test_the_rules_are_those_of_the_python_client(context, shop):
    """C1, C5: each status and advice."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    seen = []
    for status, problem, *_ in RULES:
        shop.script[:] = [(status, {}, problem)] * 2
        result = call(page, POST, retry={"attemptsMax": 2})
        seen.append((status, problem, result["outcome"], result["attempts"], result["gaveUp"]))
    assert seen == RULES
    shop.script[:] = [(409, {}, {"code": "key-expired"})] * 2
    assert call(page, POST)["outcome"] == "unknown"
    renewed = call(page, POST, retry={"renewExpired": True})
    assert (renewed["outcome"], renewed["attempts"]) == ("done", 2)
    assert len(set(shop.keys[-2:])) == 2
    shop.script[:] = ["hang", (401, {}, {})]  # 401 says nothing about the lost attempt
    late = call(page, POST, retry={"timeoutMs": 300})
    assert (late["outcome"], late["attempts"]) == ("unknown", 2)
    shop.script[:] = ["half"] * 3
    tired = call(page, POST, retry={"deadlineMs": 50, "backoffBaseMs": 10_000})
    assert (tired["outcome"], tired["gaveUp"], tired["status"]) == ("unknown", "deadline", 0)


def test_a_reload_in_mid_flight_shows_and_finishes_the_order(context, shop):
    """C3, C4: the pending order is applied again, sent with its key, and confirmed."""
    page = opened(context, shop)
    shop.script += ["hang", "hang"]
    order(page)
    eventually(lambda: len(shop.in_flight) == 1)
    page.reload()
    assert shown(page, "pending")[0] == "Blue teapot"
    assert shown(page, "confirmed")[0].startswith("№ 1")
    shown(page, "pending", 0)
    assert len(shop.keys) >= 2
    assert len(set(shop.keys)) == 1
    assert shop.items == ["Blue teapot"]


def test_the_switch_of_the_page_loses_two_answers_and_the_order_is_placed_once(context, shop):
    """C1: as a visitor of the example sees it."""
    page = opened(context, shop)
    with page.expect_response("**/network"):
        page.click(".switch")
    order(page)
    shown(page, "confirmed")
    assert len(shop.keys) == 3
    assert len(set(shop.keys)) == 1
    assert shop.items == ["Blue teapot"]


def test_a_browser_that_crashes_in_mid_flight_continues_when_it_is_back(driver, shop, tmp_path):
    """C3: the profile on disk has the key and the request."""
    context = driver.launch_profile(tmp_path)
    page = opened(context, shop)
    shop.script += ["hang"]
    order(page)
    eventually(lambda: len(shop.in_flight) == 1)
    crash(context)
    context = driver.launch_profile(tmp_path)
    page = opened(context, shop)
    shown(page, "confirmed")
    context.close()
    assert len(shop.keys) == 2
    assert len(set(shop.keys)) == 1
    assert shop.items == ["Blue teapot"]


def test_of_two_tabs_one_sends_and_the_other_takes_over_when_it_is_closed(context, shop):
    """C3: both tabs show the order; the second waits for the lock, and gets it."""
    one, other = opened(context, shop), opened(context, shop)
    shop.script += ["hang"]
    order(one)
    shown(other, "pending")
    eventually(lambda: len(shop.in_flight) == 1)
    waiting = "navigator.locks.query().then(({pending}) => pending.length)"
    eventually(lambda: other.evaluate(waiting) == 1)
    assert len(shop.keys) == 1
    one.close()
    shown(other, "confirmed")
    assert len(shop.keys) == 2
    assert len(set(shop.keys)) == 1
    assert shop.items == ["Blue teapot"]


def test_a_definite_no_reverts_the_entry_and_is_a_dead_letter(context, shop):
    """C4: pending, then refused; the reason is kept, and a reload does not apply it again."""
    page = opened(context, shop)
    order(page, "Golden teapot")
    assert shown(page, "refused") == ["Golden teapot", "Sold out"]
    page.reload()
    shown(page, "refused")
    shown(page, "pending", 0)
    dead = page.evaluate(
        """async () => {
          const { createClient } = await import("/coatcheck.js");
          const dead = await createClient().outbox.deadLetters();
          return dead.map(({ state, reason, answer }) => [state, reason, answer.status]);
        }"""
    )
    assert dead == [["refused", "sold-out", 409]]
    assert shop.items == []


def test_a_refusal_is_shown_with_its_reason(context, shop):
    """C4: not every refused order is for a teapot that is sold out."""
    page = opened(context, shop)
    shop.script += [(422, {}, {"code": "key-reused"})]
    order(page)
    assert shown(page, "refused") == ["Blue teapot", "Not ordered"]
    page.reload()
    assert shown(page, "refused") == ["Blue teapot", "Not ordered"]


LANE = """
const shown = [];
const steps = [];
const put = client.optimistic({
  name: "put",
  apply({ item }) { steps.push(`+${item}`); shown.push(item); },
  revert({ item }) { steps.push(`-${item}`); shown.splice(shown.lastIndexOf(item), 1); },
  confirm({ item }) { steps.push(`=${item}`); },
});
const tickets = [];
for (const item of ["a", "Golden teapot", "c"])
  tickets.push(await put.submit("POST", "/orders", { item }, { lane: "basket" }));
await client.outbox.start();
const states = [];
for (const ticket of tickets) states.push((await ticket.result()).state);
return { shown, steps, states };
"""


def test_a_lane_is_in_order_and_what_follows_a_refused_action_is_applied_again(context, shop):
    """C3, C4: the later action is reverted first, and applied again without the refused one."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    done = call(page, LANE)
    assert done["states"] == ["done", "refused", "done"]
    assert done["shown"] == ["a", "c"]
    gold = "Golden teapot"
    steps = ["+a", f"+{gold}", "+c", "=a", "-c", f"-{gold}", "+c", "=c"]
    assert done["steps"] == steps
    assert shop.items == ["a", "c"]


PEOPLE = """
const { outbox } = client;
await outbox.start();
const ask = (item, lane) => outbox.submit("POST", "/orders", { item }, { lane });
const first = await ask("a", "one");
const unknown = await first.result();
const second = await ask("b", "one");
const states = [unknown.state, unknown.reason, (await outbox.get(second.key)).state];
states.push(await outbox.discard(second.key), await outbox.retry(first.key));
states.push((await first.result()).state, (await second.result()).state);
await outbox.forget(-1);
states.push((await outbox.list()).length);
return states;
"""


def test_an_unknown_action_holds_its_lane_until_a_person_decides(context, shop):
    """C3: it is a dead letter with its reason; a retry has the same key."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    shop.script += [(409, {}, {"code": "outcome-unknown", "retry": "never"})]
    states = call(page, PEOPLE)
    decided = ["unknown", "outcome-unknown", "pending", False, True, "done", "done", 0]
    assert states == decided
    assert shop.keys[0] == shop.keys[1] != shop.keys[2]
    assert shop.items == ["a", "b"]


LANE_WAIT = """
const sign = (_method, _url, body) => {
  if (body.includes("unsigned")) throw new Error("signed out");
  return {};
};
const waiting = { ...retry, laneWaitMs: 400 };
const { outbox } = createClient({ database: "lane-wait", retry: waiting, sign });
await outbox.start();
const ended = [];
for (const item of ["unsigned", "unknown", "tea"]) {
  const ticket = await outbox.submit("POST", "/orders", { item }, { lane: "basket" });
  ended.push(ticket.result().then(({ state, reason, answer }) => [state, reason, answer?.status]));
}
return await Promise.all(ended);
"""


def test_an_action_without_a_definite_answer_holds_its_lane_for_a_limited_time(context, shop):
    """C3: one that is never sent is refused, one that is unknown stays so; the next is sent."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    shop.script += [(409, {}, {"code": "outcome-unknown", "retry": "never"})]
    began_s = time.monotonic()
    unsigned, unknown, tea = call(page, LANE_WAIT)
    assert time.monotonic() - began_s >= 0.8
    assert unsigned == ["refused", "it could not be sent: Error: signed out", None]
    assert unknown == ["unknown", "outcome-unknown", 409]
    assert tea == ["done", "", 201]
    assert shop.items == ["tea"]


LATE = """
let signed = 0;
const strict = createClient({
  database: "late",
  retry: { attemptsMax: 1, deadlineMs: 400, serverWindowMs: 401 },
  sign() { signed += 1; if (signed === 1) throw new Error("signed out"); return {}; },
});
await strict.outbox.start();
const ticket = await strict.outbox.submit("POST", "/orders", { item: "a" });
const { state, reason, calls } = await ticket.result();
return { state, reason, calls, signed };
"""


def test_an_action_is_not_sent_again_when_the_server_may_have_forgotten_its_key(context, shop):
    """C3, T4: a call that could not be signed was not sent, and does not count."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    shop.script += ["half"]
    late = call(page, LATE)
    assert late.pop("reason").startswith("it was first sent before the window of the server")
    assert late == {"state": "unknown", "calls": 2, "signed": 2}
    assert len(shop.keys) == 1


SIGNED_OUT = """
let signed = 0;
const sign = () => {
  signed += 1;
  if (signed % 2 === 0) throw new Error("signed out");
  return {};
};
const signing = createClient({ database: "signed-out", retry, sign });
const { outcome, gaveUp, attempts, error } = await signing.post("/orders", { item: "a" });
const put = new Promise((resolve) => {
  signing.outbox.addEventListener("change", async ({ detail }) => {
    const action = await signing.outbox.get(detail.key);
    if (action.reason) resolve(action);
  });
});
await signing.outbox.start();
await signing.outbox.submit("POST", "/orders", { item: "b" });
const { state, reason, firstSentMs } = await put;
return [outcome, gaveUp, attempts, String(error), state, reason, firstSentMs === null];
"""


def test_a_lost_answer_is_not_forgotten_when_the_next_attempt_cannot_be_signed(context, shop):
    """C3, C-18: it may have happened, and its age counts."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    shop.script += ["half", "half"]
    got = call(page, SIGNED_OUT)
    assert got[:4] == ["unknown", "sign", 2, "Error: signed out"]
    assert got[4:] == ["pending", "sign", False]


SET_BACK = """
const real = Date.now;
Date.now = () => real() + 40 * 86_400_000;
const once = { ...retry, attemptsMax: 1 };
const ahead = createClient({ database: "clock", retry: once });
await ahead.outbox.start();
const { key } = await ahead.outbox.submit("POST", "/orders", { item: "a" });
while (!(await ahead.outbox.get(key)).reason) await new Promise((next) => setTimeout(next, 5));
Date.now = real;
const again = createClient({ database: "clock", retry: once });
await again.outbox.start();
const { state, reason } = await again.outbox.result(key);
return [state, reason];
"""


def test_a_clock_that_is_set_back_does_not_hide_the_age_of_an_action(context, shop):
    """C3, C-17: the next call would be due in forty days, longer than a timer can wait."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    shop.script += ["half"]
    state, reason = call(page, SET_BACK)
    assert state == "unknown"
    assert reason.startswith("the clock was set back")
    assert len(shop.keys) == 1


def test_what_cannot_be_repeated_is_refused_before_anything_is_sent(context, shop):
    """Wrong arguments are errors, and change nothing."""
    page = context.new_page()
    page.goto(f"{shop.url}/coatcheck.js")
    for script in (
        "await client.post('/orders', new FormData())",
        "await client.post('/orders', {}, {key: 'a b'})",
        "await client.post('/orders', {}, {key: 'a', reference: 'b'})",
        "await client.outbox.submit('POST', '/orders', {}, {reference: ''})",
        "createClient({retry: {attempts: 3}})",
        "createClient({timeout: 3})",
        "createClient({retry: {deadlineMs: 86400001}})",
        "client.optimistic({apply() {}, revert() {}})",
        """await client.outbox.submit('POST', '/orders', {item: 'a'}, {reference: 'order-1'});
        await client.outbox.submit('POST', '/orders', {item: 'a'}, {reference: 'order-1'});
        await client.outbox.submit('POST', '/orders', {item: 'b'}, {reference: 'order-1'})""",
    ):
        name = call(page, f"try {{ {script} }} catch (error) {{ return error.name }}")
        assert name == "Misconfigured", script
    assert shop.keys == []


def test_every_block_of_the_page_is_a_part_of_the_example():
    page = (ROOT / "docs/howto/browser.md").read_text()
    sources = {"js": "shop.js", "python": "app.py"}
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    assert {language for language, _ in blocks} == {"js", "python"}
    for language, block in blocks:
        source = (ROOT / "examples/browser_shop" / sources[language]).read_text()
        assert block in textwrap.dedent(source) or textwrap.indent(block, "    ") in source


def test_the_module_is_in_the_package_with_types_for_every_export_and_setting():
    folder = files("coatcheck.client").joinpath("browser")
    source, types = (folder.joinpath(f"coatcheck.{end}").read_text() for end in ("js", "d.ts"))
    exports = re.findall(r"^export (?:const|class|function) (\w+)", source, re.MULTILINE)
    assert exports
    for name in exports:
        assert re.search(
            rf"^export (?:declare )?(?:const|class|function) {name}\b", types, re.MULTILINE
        )
    settings, typed = (
        re.findall(r"^  (\w+): ", text.split("{", 1)[1].split("\n}", 1)[0], re.MULTILINE)
        for text in (source[source.index("export const RETRY") :], types)
    )
    assert settings == typed
