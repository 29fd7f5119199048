/**
 * Requests that are safe to retry, from a browser.
 *
 * A client sends a request with one key until the answer is definite. Its outbox stores the key and
 * the request in IndexedDB first, so that a closed tab, a reload or a crash loses nothing, and a
 * lock across tabs lets one tab at a time send an action.
 *
 * The rules for retries are those of the Python client: core/client/send.py, core/client/outbox.py.
 * It needs a secure context: https, or localhost.
 */

/** The defaults of `createClient({retry})`; all times are in milliseconds. */
export const RETRY = Object.freeze({
  attemptsMax: 6,
  deadlineMs: 60_000, // over all attempts; no attempt begins later
  timeoutMs: 20_000, // of one attempt
  backoffBaseMs: 200, // the pause before retry n is a random part of base * 2 ** (n - 1)
  backoffMaxMs: 10_000,
  retryAfterMaxMs: 60_000, // a longer Retry-After counts as this
  renewExpired: false, // whether an expired key is replaced once; the action may then happen twice
  serverWindowMs: 24 * 3_600_000, // how long the server remembers a key
  // Of the outbox: how long an action that cannot be sent, or is unknown, holds its lane back.
  laneWaitMs: 7 * 86_400_000,
});
const METHODS_WITHOUT_KEY = new Set(["GET", "HEAD", "OPTIONS", "PUT", "DELETE"]);

/** A setting or an argument is wrong; nothing was sent or stored. */
export class Misconfigured extends Error {
  name = "Misconfigured";
}

/** Limits the retries of all calls, so that they do not add to the load of a failing server. */
export class RetryBudget {
  constructor(tokensMax = 100, refill = 0.1) {
    this.tokens = this.tokensMax = tokensMax;
    this.refill = refill;
  }

  /** Take the token of one retry; false if there is none. */
  take() {
    if (this.tokens < 1) return false;
    this.tokens -= 1;
    return true;
  }

  /** A call got a final answer. */
  give() {
    this.tokens = Math.min(this.tokensMax, this.tokens + this.refill);
  }
}

/** Make a client of the API at *baseUrl*. */
export function createClient(options = {}) {
  return new Client(options);
}

const OPTIONS = ["baseUrl", "retry", "budget", "sign", "database"];

class Client {
  constructor(options) {
    const { baseUrl = location.origin, retry = {}, database = "coatcheck" } = options;
    const unknown = [
      ...Object.keys(options).filter((name) => !OPTIONS.includes(name)),
      ...Object.keys(retry).filter((name) => !(name in RETRY)),
    ];
    if (unknown.length > 0) throw new Misconfigured(`unknown option: ${unknown.join(", ")}`);
    this.baseUrl = new URL(baseUrl, location.href).href;
    this.retry = checkedRetry({ ...RETRY, ...retry });
    this.budget = options.budget ?? new RetryBudget();
    this.sign = options.sign ?? (() => ({}));
    this.outbox = new Outbox(this, database);
  }

  /** Send a request until the answer is definite; without one, the result says so. */
  async request(method, path, { body, headers = {}, key, reference } = {}) {
    const request = frozen(this.baseUrl, method, path, body, headers);
    return await send(this, request, await keyOf(request.method, key, reference));
  }

  get(path, options = {}) {
    return this.request("GET", path, options);
  }

  post(path, body, options = {}) {
    return this.request("POST", path, { ...options, body });
  }

  patch(path, body, options = {}) {
    return this.request("PATCH", path, { ...options, body });
  }

  put(path, body, options = {}) {
    return this.request("PUT", path, { ...options, body });
  }

  delete(path, options = {}) {
    return this.request("DELETE", path, options);
  }

  /**
   * Actions that the page shows before the server has answered; see `Optimistic`.
   * The *name* finds *apply* and *revert* again after a reload.
   */
  optimistic(functions) {
    return this.outbox.register(new Optimistic(this.outbox, functions));
  }
}

function checkedRetry(retry) {
  for (const [name, value] of Object.entries(retry)) {
    const isRight = name === "renewExpired" ? typeof value === "boolean" : value >= 0;
    if (!isRight) throw new Misconfigured(`${name} is ${value}`);
  }
  if (!(retry.attemptsMax >= 1)) throw new Misconfigured("attemptsMax must be 1 or more");
  if (retry.deadlineMs >= retry.serverWindowMs)
    throw new Misconfigured("deadlineMs must be shorter than serverWindowMs");
  return Object.freeze(retry);
}

/** The request as every attempt sends it: the body is turned into bytes once. */
function frozen(baseUrl, method, path, body, headers) {
  const all = new Headers(headers);
  let content = body ?? null;
  if (body instanceof FormData || body instanceof ReadableStream)
    throw new Misconfigured("the body must be JSON, text, a Blob or bytes: it may be repeated");
  if (body instanceof URLSearchParams) {
    content = body.toString();
    if (!all.has("Content-Type")) all.set("Content-Type", "application/x-www-form-urlencoded");
  } else if (ArrayBuffer.isView(body) || body instanceof ArrayBuffer) {
    content = new Blob([body]); // a copy: the application may write into its own
  } else if (content !== null && typeof body !== "string" && !(body instanceof Blob)) {
    content = JSON.stringify(body);
    if (!all.has("Content-Type")) all.set("Content-Type", "application/json");
  }
  const url = new URL(path, baseUrl).href;
  return { method: method.toUpperCase(), url, headers: [...all], body: content };
}

// Derived keys are those of the Python client: the same reference is the same key.
const REFERENCES = "a5a9a2e46a0f5c359f0d7f3c7d1f0c1e";

async function keyOf(method, key, reference) {
  if (key !== undefined && reference !== undefined)
    throw new Misconfigured("give a key or a reference, and not both");
  if (reference === "") throw new Misconfigured("reference is empty; it names the action");
  if (reference !== undefined) return await uuid5(reference);
  if (key === undefined) return METHODS_WITHOUT_KEY.has(method) ? null : crypto.randomUUID();
  if (!/^[\x21-\x7e]{1,255}$/.test(key) || /["\\]/.test(key))
    throw new Misconfigured("a key has 1 to 255 visible ASCII characters, without quotes");
  return key;
}

async function uuid5(name) {
  const space = REFERENCES.match(/../g).map((pair) => Number.parseInt(pair, 16));
  const bytes = new Uint8Array([...space, ...new TextEncoder().encode(name)]);
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-1", bytes)).slice(0, 16);
  hash[6] = (hash[6] & 0x0f) | 0x50;
  hash[8] = (hash[8] & 0x3f) | 0x80;
  const hex = [...hash].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

// ------------------------------------------------------------------------------------- sending

/** Send *request*, and again until there is a definite answer or a limit. */
async function send(client, request, givenKey) {
  const { retry, budget } = client;
  const until = performance.now() + retry.deadlineMs;
  let key = givenKey;
  let mayHaveRun = false;
  for (let attempts = 1; ; attempts += 1) {
    let answer;
    try {
      answer = await attempt(client, request, key, until - performance.now());
    } catch (error) {
      if (!mayHaveRun) throw error; // `sign` failed, and nothing was sent
      return { ...NO_ANSWER, attempts, key, error, gaveUp: "sign", outcome: "unknown" };
    }
    mayHaveRun ||= [0, 408, 409].includes(answer.status) || answer.status >= 500;
    const renews = retry.renewExpired && key === givenKey && answer.code === "key-expired";
    const result = {
      attempts,
      key,
      gaveUp: "",
      wasReplayed: answer.isReplay,
      code: answer.code,
      advice: answer.advice,
      response: answer.response,
      error: answer.error,
    };
    if (!renews && !isRetried(answer)) {
      budget.give();
      return { ...result, outcome: outcomeOf(answer, mayHaveRun) };
    }
    const pauseMs =
      Math.min(answer.retryAfterMs ?? 0, retry.retryAfterMaxMs) +
      Math.min(retry.backoffMaxMs, retry.backoffBaseMs * 2 ** (attempts - 1)) * Math.random();
    if (key === null && !METHODS_WITHOUT_KEY.has(request.method)) result.gaveUp = "no-key";
    else if (attempts >= retry.attemptsMax) result.gaveUp = "attempts";
    else if (performance.now() + pauseMs >= until) result.gaveUp = "deadline";
    else if (!isInProgress(answer) && !budget.take()) result.gaveUp = "budget";
    else {
      await new Promise((resolve) => setTimeout(resolve, pauseMs));
      if (performance.now() >= until) result.gaveUp = "deadline";
    }
    if (result.gaveUp) return { ...result, outcome: mayHaveRun ? "unknown" : "refused" };
    if (renews) key = crypto.randomUUID();
  }
}

const NO_ANSWER = { wasReplayed: false, code: null, advice: null, response: null };

/** One attempt; `status` is 0 if no whole answer came, and the server may then have got it. */
async function attempt(client, { method, url, headers, body }, key, leftMs) {
  const all = new Headers(headers);
  const signed = await client.sign(method, url, body);
  for (const [name, value] of Object.entries(signed)) all.set(name, value);
  if (key !== null) all.set("Idempotency-Key", key);
  const ending = new AbortController();
  const timer = setTimeout(() => ending.abort(), Math.min(client.retry.timeoutMs, leftMs));
  let whole;
  let content;
  try {
    whole = await fetch(url, { method, headers: all, body, signal: ending.signal });
    content = await whole.arrayBuffer(); // half an answer is none
  } catch (error) {
    return { status: 0, code: null, advice: null, isReplay: false, response: null, error };
  } finally {
    clearTimeout(timer);
  }
  const hasNoBody = [101, 204, 205, 304].includes(whole.status);
  const response = new Response(hasNoBody ? null : content, whole);
  return { ...(await answerOf(response.clone())), response, error: null };
}

async function answerOf(response) {
  const problem = response.status >= 400 ? await problemOf(response) : {};
  const advice = ["same-key", "new-key", "never"].includes(problem.retry) ? problem.retry : null;
  return {
    status: response.status,
    code: codeOf(problem),
    advice,
    isReplay: response.headers.get("Idempotent-Replayed")?.trim().toLowerCase() === "true",
    retryAfterMs: retryAfterMs(response.headers),
  };
}

async function problemOf(response) {
  if (!response.headers.get("Content-Type")?.includes("json")) return {};
  try {
    return Object(await response.json());
  } catch {
    return {};
  }
}

/** `code`, `error.code`, or the end of `type`. */
function codeOf({ code, error, type }) {
  const named = [code, error?.code].find((value) => typeof value === "string");
  if (named !== undefined) return named;
  if (typeof type !== "string" || type === "about:blank") return null;
  return type.split("#").at(-1).split("/").at(-1) || null;
}

/** `Retry-After`, in seconds or as a date, in milliseconds from now. */
function retryAfterMs(headers) {
  const value = headers.get("Retry-After")?.trim();
  if (!value) return null;
  if (/^\d+$/.test(value)) return Number(value.slice(0, 12)) * 1_000;
  const until = dateMs(value);
  if (Number.isNaN(until)) return null;
  // The server's own clock, where it sends it: the two may differ by hours.
  const sent = dateMs(headers.get("Date") ?? "");
  return Math.max(0, until - (Number.isNaN(sent) ? Date.now() : sent));
}

/** An HTTP date, which begins with the day of the week; browsers read more than that as a date. */
function dateMs(value) {
  return /^[A-Z][a-z]{2}/.test(value) ? Date.parse(value) : Number.NaN;
}

function isRetried(answer) {
  if (answer.status === 0) return true;
  // A replay is the stored answer: each retry would get it again.
  if (answer.isReplay || answer.status < 400) return false;
  if (answer.advice !== null) return answer.advice === "same-key";
  return isInProgress(answer) || [408, 425, 429].includes(answer.status) || answer.status >= 500;
}

/** The first attempt still runs: a healthy server asks to come back later. */
function isInProgress({ status, code, retryAfterMs }) {
  if (status !== 409) return false;
  if (code !== null) return ["in-progress", "idempotency_key_in_use"].includes(code);
  return retryAfterMs !== null;
}

// Given before the server looks for the key: after a lost attempt they say nothing about it.
const BEFORE_THE_KEY = [401, 403, 407, 413, 415, 425, 429];
// Problems that say what is known of the operation.
const OUTCOMES = {
  "result-unavailable": "done",
  "outcome-unknown": "unknown",
  "too-many-attempts": "unknown",
  "key-expired": "unknown",
};

function outcomeOf({ status, code, isReplay }, mayHaveRun) {
  if (status < 400) return "done";
  if (Object.hasOwn(OUTCOMES, code ?? "")) return OUTCOMES[code];
  const saysNothing = mayHaveRun && BEFORE_THE_KEY.includes(status) && !isReplay;
  return status >= 500 || saysNothing ? "unknown" : "refused";
}

// -------------------------------------------------------------------------------------- outbox

// 1 s, 2 s, 4 s … 5 min between two calls: each call has made several attempts already.
const PAUSE_MS = 1_000;
const PAUSE_MS_MAX = 300_000;
const TOO_LATE = "it was first sent before the window of the server, and not answered";
// A time that is further ahead was stored before the clock was set back.
const CLOCK_MS = 60_000;
const CLOCK_SET_BACK = "the clock was set back since it was sent, so its age is not known";

/**
 * Actions that survive a closed tab.
 *
 * `submit` resolves when the key and the request are stored. After `start`, this tab sends what is
 * pending, in order within a lane and at the same time across lanes. A lock for each lane, shared
 * by all tabs of the site, lets one tab at a time send.
 */
class Outbox extends EventTarget {
  #client;
  #name;
  #actions;
  #tabs;
  #isStarted = false;
  #waiting = new Map(); // lane: the timer or the lock that this tab waits for
  #optimistic = new Map(); // name: functions
  #applied = new Map(); // key: the action, in the order in which the page shows them
  #syncing = Promise.resolve();

  constructor(client, name) {
    super();
    this.#client = client;
    this.#name = `coatcheck:${name}`;
    this.#actions = new Actions(name);
    this.#tabs = new BroadcastChannel(this.#name);
    this.#tabs.onmessage = ({ data }) => this.#changed(data);
  }

  /** Store an action; when this resolves, a closed tab does not lose it. */
  async submit(method, path, body, { headers = {}, lane, key, reference, optimistic } = {}) {
    const request = frozen(this.#client.baseUrl, method, path, body, headers);
    const made = (await keyOf(request.method, key, reference)) ?? crypto.randomUUID();
    const action = {
      ...request,
      key: made,
      lane: lane ?? made,
      state: "pending",
      reason: "",
      submittedMs: Date.now(),
      firstSentMs: null,
      dueMs: 0,
      calls: 0,
      answer: null,
      optimistic: optimistic ?? null,
    };
    const stored = await this.#actions.add(action);
    if (!(await isSameRequest(stored, action)))
      throw new Misconfigured("the outbox has another action with this key or reference");
    await this.#tell(stored);
    return { key: made, result: () => this.result(made) };
  }

  /** Send what is pending, and what this or another tab submits from now on. */
  async start() {
    if (!this.#isStarted) addEventListener("online", () => this.#sendAll({ isForced: true }));
    this.#isStarted = true;
    await this.#sync();
    await this.#sendAll();
  }

  /** All actions, the oldest first. */
  list() {
    return this.#actions.all();
  }

  /** The action with this key; undefined if there is none. */
  get(key) {
    return this.#actions.get(key);
  }

  /** Resolves with the action when it is no longer pending, in whichever tab it is sent. */
  async result(key) {
    return await new Promise((resolve, reject) => {
      const look = async () => {
        const action = await this.#actions.get(key);
        if (action?.state === "pending") return;
        this.removeEventListener("change", look);
        if (action !== undefined) resolve(action);
        else reject(new Misconfigured("the outbox has no action with this key"));
      };
      this.addEventListener("change", look);
      look();
    });
  }

  /** The actions that were refused or are unknown, with the reason; the oldest first. */
  async deadLetters() {
    return (await this.list()).filter(isDead);
  }

  /** Send a refused or unknown action again, with its key; false if there is none. */
  async retry(key) {
    const again = { state: "pending", reason: "", dueMs: 0, answer: null };
    return await this.#change(key, (action) => (isDead(action) ? { ...action, ...again } : action));
  }

  /** Delete a refused or unknown action, so that its lane continues; false if there is none. */
  async discard(key) {
    return await this.#change(key, (action) => (isDead(action) ? null : action));
  }

  /** Delete the actions that were done longer ago than *ageMs*. */
  async forget(ageMs = 7 * 86_400_000) {
    const before = Date.now() - ageMs;
    for (const { key, state, endedMs } of await this.list())
      if (state === "done" && endedMs <= before) await this.#actions.change(key, () => null);
  }

  register(optimistic) {
    if (this.#optimistic.has(optimistic.name))
      throw new Misconfigured(`there are two optimistic actions named ${optimistic.name}`);
    this.#optimistic.set(optimistic.name, optimistic);
    return optimistic;
  }

  async #change(key, change) {
    const [before, after] = await this.#actions.change(key, change);
    if (before === after) return false;
    await this.#tell(before);
    return true;
  }

  /** Something changed: show it, here and in the other tabs, and send what is next. */
  async #tell({ key, lane }) {
    this.#tabs.postMessage({ key, lane });
    await this.#changed({ key, lane });
  }

  async #changed({ key, lane }) {
    await this.#sync();
    this.dispatchEvent(new CustomEvent("change", { detail: { key } }));
    if (this.#isStarted) this.#sendLane(lane);
  }

  async #sendAll({ isForced = false } = {}) {
    const pending = (await this.list()).filter(({ state }) => state === "pending");
    for (const lane of new Set(pending.map((action) => action.lane)))
      this.#sendLane(lane, { isForced });
  }

  /** Send the actions of a lane in their order, when no other tab does. */
  #sendLane(lane, { isForced = false } = {}) {
    const waiting = this.#waiting.get(lane);
    if (waiting?.isLocking) return;
    clearTimeout(waiting?.timer);
    const locking = { isLocking: true };
    this.#waiting.set(lane, locking);
    navigator.locks.request(`${this.#name}:${lane}`, async () => {
      // From here on, a change while this tab sends is a reason to wait for the lock once more.
      this.#waiting.delete(lane);
      let next;
      while ((next = await this.#actions.take(lane, this.#client.retry, isForced)) !== null) {
        isForced = false; // the first at once; if it fails again, it waits like any other
        if (next.pauseMs !== undefined) {
          this.#sendLater(lane, next.pauseMs);
          return;
        }
        if (next.state === "pending") await this.#sendOne(next);
        else await this.#tell(next); // it was too late to send it
      }
    });
  }

  #sendLater(lane, pauseMs) {
    if (this.#waiting.has(lane)) return;
    // At most five minutes: browsers run a timer of many days at once.
    const timer = setTimeout(() => this.#sendLane(lane), Math.min(pauseMs, PAUSE_MS_MAX));
    this.#waiting.set(lane, { isLocking: false, timer });
  }

  async #sendOne(action) {
    let result;
    try {
      result = await send(this.#client, action, action.key);
    } catch (error) {
      // `sign` failed: it is called again later.
      result = { outcome: "refused", gaveUp: String(error), response: null };
    }
    const verdict = await verdictOf(action, result, this.#client.retry);
    await this.#actions.change(action.key, (stored) =>
      stored.state === "pending" ? { ...stored, ...verdict } : stored,
    );
    await this.#tell(action);
  }

  // ------------------------------------------------------------------------- what the page shows

  /** Make the page show what is stored: one look after the other. */
  #sync() {
    this.#syncing = this.#syncing.then(() => this.#show()).catch(reportError);
    return this.#syncing;
  }

  async #show() {
    if (this.#optimistic.size === 0) return;
    const all = new Map((await this.list()).map((action) => [action.key, action]));
    for (const key of [...this.#applied.keys()]) {
      const stored = all.get(key);
      if (stored === undefined || stored.state === "refused") this.#revert(key, stored);
      else if (stored.state === "done") {
        this.#applied.delete(key);
        this.#functions(stored).confirm(stored);
      }
    }
    for (const action of all.values()) {
      const isOpen = action.state === "pending" || action.state === "unknown";
      if (isOpen && !this.#applied.has(action.key) && this.#functions(action)) {
        this.#applied.set(action.key, action);
        this.#functions(action).apply(action);
      }
    }
  }

  /** Take back an action, and first what was applied after it in its lane; then that again. */
  #revert(key, stored) {
    const refused = this.#applied.get(key);
    const applied = [...this.#applied.values()];
    const later = applied
      .slice(applied.indexOf(refused) + 1)
      .filter(({ lane }) => lane === refused.lane);
    for (const action of later.toReversed()) this.#functions(action).revert(action);
    this.#applied.delete(key);
    this.#functions(refused).revert(stored ?? refused);
    for (const action of later) this.#functions(action).apply(action);
  }

  #functions(action) {
    return this.#optimistic.get(action.optimistic?.name);
  }
}

async function isSameRequest(one, other) {
  const bytes = async ({ body }) => (body instanceof Blob ? await body.text() : body);
  const isSameTarget = one.method === other.method && one.url === other.url;
  return isSameTarget && (await bytes(one)) === (await bytes(other));
}

const isDead = ({ state }) => state === "refused" || state === "unknown";

/** What *result* means for the stored action. */
async function verdictOf(action, result, { laneWaitMs }) {
  const { outcome, gaveUp, wasReplayed, code, response } = result;
  if (gaveUp) {
    const wasSent = action.wasSentBefore || outcome === "unknown";
    // The distance, so that a clock that was set back does not hold the lane back for ever.
    if (!wasSent && Math.abs(Date.now() - action.submittedMs) >= laneWaitMs)
      return { state: "refused", reason: `it could not be sent: ${gaveUp}`, endedMs: Date.now() };
    const longestMs = Math.min(PAUSE_MS_MAX, PAUSE_MS * 2 ** Math.min(action.calls - 1, 20));
    const dueMs = Date.now() + (longestMs * (1 + Math.random())) / 2;
    return { reason: gaveUp, dueMs, firstSentMs: wasSent ? action.firstSentMs : null };
  }
  const { status } = response;
  const answer = { status, headers: [...response.headers], body: await response.text() };
  const ended = { answer, endedMs: Date.now() };
  // An earlier call may have been executed, and this answer does not say.
  const saysNothing = action.wasSentBefore && BEFORE_THE_KEY.includes(status) && !wasReplayed;
  if (outcome === "refused" && saysNothing) {
    const reason = `status ${status} after a call without an answer`;
    return { ...ended, state: "unknown", reason };
  }
  const reason = outcome === "done" ? "" : (code ?? `status ${status}`);
  return { ...ended, state: outcome, reason };
}

/**
 * Actions that the page shows at once: `apply` now, `confirm` when the server has done it, `revert`
 * when the server has refused it. Each is called with the stored action, whose `input` is yours.
 *
 * They change what the page shows and nothing that survives a reload: after a reload, `start`
 * applies again what is pending. If an action is refused, later ones of its lane are reverted
 * first, and applied again afterwards.
 */
class Optimistic {
  #outbox;
  #functions;

  constructor(outbox, { name, apply, revert, confirm = () => {} }) {
    const areFunctions = [apply, revert, confirm].every((given) => typeof given === "function");
    if (typeof name !== "string" || !name || !areFunctions)
      throw new Misconfigured("an optimistic action needs a name, apply and revert");
    this.#outbox = outbox;
    this.name = name;
    this.#functions = { apply, revert, confirm };
  }

  /** Store an action and apply it; *input*, by default the body, is given to the functions. */
  submit(method, path, body, { input = body, ...options } = {}) {
    return this.#outbox.submit(method, path, body, {
      ...options,
      optimistic: { name: this.name, input },
    });
  }

  apply(action) {
    this.#functions.apply(action.optimistic.input, action);
  }

  revert(action) {
    this.#functions.revert(action.optimistic.input, action);
  }

  confirm(action) {
    this.#functions.confirm(action.optimistic.input, action);
  }
}

// ----------------------------------------------------------------------------------- IndexedDB

/** The stored actions. Every change is one transaction, on disk before it resolves. */
class Actions {
  #opening;

  constructor(name) {
    this.#opening = new Promise((resolve, reject) => {
      const opening = indexedDB.open(`coatcheck-${name}`, 1);
      opening.onupgradeneeded = () => {
        const ids = { keyPath: "id", autoIncrement: true };
        const store = opening.result.createObjectStore("actions", ids);
        store.createIndex("key", "key", { unique: true });
        store.createIndex("lane", "lane");
      };
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = () => reject(opening.error);
    });
    this.#opening.catch(() => {}); // reported by the first call that needs it
  }

  /** Store *action*; one with the same key, which is the same action, stays as it is. */
  add(action) {
    return this.#write((store, done) => {
      store.index("key").get(action.key).onsuccess = ({ target }) => {
        if (target.result === undefined) store.add(action);
        done(target.result ?? action);
      };
    });
  }

  get(key) {
    return this.#read((store) => store.index("key").get(key));
  }

  all() {
    return this.#read((store) => store.getAll());
  }

  /** Replace an action by what *change* returns, null: delete it; resolves with both. */
  change(key, change) {
    return this.#write((store, done) => {
      store.index("key").get(key).onsuccess = ({ target: { result: before } }) => {
        const after = before === undefined ? before : change(before);
        if (after === null) store.delete(before.id);
        else if (after !== before) store.put(after);
        done([before, after]);
      };
    });
  }

  /**
   * The next action of *lane*, marked as sent; null if there is none, `{pauseMs}` if it is not due.
   * An unknown action holds its lane back for a limited time, or until it is retried or discarded.
   */
  take(lane, { deadlineMs, serverWindowMs, laneWaitMs }, isForced) {
    return this.#write((store, done) => {
      store.index("lane").getAll(lane).onsuccess = ({ target }) => {
        const now = Date.now();
        const isPending = ({ state }) => state === "pending";
        const holds = ({ state, endedMs }) =>
          state === "unknown" && Math.abs(now - endedMs) < laneWaitMs;
        const head = target.result.find((action) => isPending(action) || holds(action));
        const sentMs = head?.firstSentMs ?? now;
        const pauseMs = (head?.dueMs ?? 0) - now;
        const isDue = pauseMs <= 0 || pauseMs > PAUSE_MS_MAX + CLOCK_MS;
        const isLate = now + deadlineMs > sentMs + serverWindowMs;
        if (!target.result.some(isPending)) done(null);
        else if (!isPending(head)) done({ pauseMs: laneWaitMs - Math.abs(now - head.endedMs) });
        else if (!isDue && !isForced) done({ pauseMs });
        else if (isLate || sentMs > now + CLOCK_MS) {
          // The server may have forgotten the key, and would execute the action again.
          const reason = isLate ? TOO_LATE : CLOCK_SET_BACK;
          const late = { ...head, state: "unknown", reason, endedMs: now };
          store.put(late);
          done(late);
        } else {
          const sent = { ...head, firstSentMs: sentMs, calls: head.calls + 1 };
          store.put(sent);
          done({ ...sent, wasSentBefore: head.firstSentMs !== null });
        }
      };
    });
  }

  async #read(ask) {
    const database = await this.#opening;
    return await new Promise((resolve, reject) => {
      const asked = ask(database.transaction("actions").objectStore("actions"));
      asked.onsuccess = () => resolve(asked.result);
      asked.onerror = () => reject(asked.error);
    });
  }

  async #write(work) {
    const database = await this.#opening;
    return await new Promise((resolve, reject) => {
      // "strict": complete means on disk, not in a buffer of the operating system.
      const writing = database.transaction("actions", "readwrite", { durability: "strict" });
      let result;
      writing.oncomplete = () => resolve(result);
      writing.onabort = () => reject(writing.error);
      work(writing.objectStore("actions"), (value) => {
        result = value;
      });
    });
  }
}
