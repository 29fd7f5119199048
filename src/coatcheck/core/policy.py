"""Policies: every setting of a route, in one frozen dataclass, and presets.

A policy is checked when it is made, so that a mistake stops a deployment and not a request.
A duration is a number of seconds, a `timedelta`, or text such as "90s", "72h", "7d".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from coatcheck.core.callables import refuse_async
from coatcheck.core.json_codec import Pointer, parse_pointer
from coatcheck.core.keep import Keep
from coatcheck.errors import Misconfigured

Duration: TypeAlias = float | timedelta | str

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})

KIB = 1024
MIB = 1024 * KIB


PresetName: TypeAlias = Literal["default", "ietf", "stripe", "payments"]


class PolicyOptions(TypedDict, total=False):
    """The fields of a `Policy` as keywords, for type checkers; `Policy` explains them."""

    required: bool
    methods: Collection[str]
    window: Duration
    margin: Duration
    lease: Duration
    wait: Duration
    in_flight: Literal["wait", "409", "202"]
    mismatch: Literal[400, 409, 422]
    keep: Keep
    recovery: Literal["retry", "reconcile", "manual"]
    reconcile: Callable[..., Any] | None
    reconcile_timeout: Duration
    patience: Duration
    unrecorded: Literal["503", "answer"]
    mode: Literal["record", "transaction", "observe"]
    commit: Literal["success", "kept"]
    on_outage: Literal["refuse", "execute"]
    replay_cookies: bool
    transaction_retries: int
    on_expired: Literal["new", "refuse"]
    expired_status: Literal[409, 410, 412, 429]
    ignore: Collection[str]
    include_headers: Collection[str]
    key_chars_max: int
    body_bytes_max: int
    response_bytes_max: int
    live_keys_max: int | None
    waiters_max: int
    attempts_max: int | None
    key_header: str
    replayed_header: str
    reference_header: str
    status_path: str
    docs_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How requests are guarded. Every field is optional; the defaults are safe."""

    # Whether a request without a key is refused. Default: it runs unguarded.
    required: bool = False
    # Which methods are guarded. Safe methods, such as GET, cannot be.
    methods: Collection[str] = frozenset({"POST", "PATCH"})

    # How long retries are deduplicated. 24 h: what most providers publish.
    window: Duration = "24h"
    # How much longer than its window a record is kept, so that no retry races the sweep.
    margin: Duration = "1h"
    # How long a claim lasts without renewal. 20 s: after a crash, retries wait no longer; a running
    # process renews its claims three times in that span.
    lease: Duration = "20s"
    # How long a duplicate waits for the first request to finish. 2 s: most writes are done by then,
    # and the timeout of a client is seldom shorter.
    wait: Duration = "2s"
    # What a duplicate gets while the first runs: "wait" (then 409), "409" at once, or "202".
    in_flight: Literal["wait", "409", "202"] = "wait"

    # The status for the same key with another request.
    mismatch: Literal[400, 409, 422] = 422
    # Which answers are kept: "final", "all" (5xx too), or a function of the response. The function
    # is not called for a response over *response_bytes_max*: there the status decides. If it
    # raises, the error is logged and the answer is kept; under "reconcile" and "manual", an answer
    # that is not final leaves the operation in doubt.
    keep: Keep = "final"
    # Whether replays set the cookies of the first response. Default: they do not, because a cookie
    # is a credential. True suits a login: its retry needs the session; see docs/howto/asgi.md.
    replay_cookies: bool = False

    # What follows an attempt that died: "retry", "reconcile" (call *reconcile*) or "manual" (in
    # doubt, until an operator decides).
    recovery: Literal["retry", "reconcile", "manual"] = "retry"
    # Finds out what an attempt did: a function of the operation, sync or async.
    reconcile: Callable[..., Any] | None = None
    # How long to wait for its answer; then it counts as `Unknown()`. 10 s: longer than a slow
    # provider takes, and shorter than most clients wait.
    reconcile_timeout: Duration = "10s"
    # How long to retry writing the result while the store is down before the client gets a 503.
    # 2 s: most outages of a database are shorter. Retries continue in the background.
    patience: Duration = "2s"
    # What the client gets then: "503", so that it retries with the same key; or the "answer", which
    # is lost if this process ends before the store is back.
    unrecorded: Literal["503", "answer"] = "503"
    # "record": claim and result are separate commits; "transaction": one commit with the effect;
    # "observe": every request runs as if it were not guarded, and the log tells what "record"
    # would have done.
    mode: Literal["record", "transaction", "observe"] = "record"
    # Transaction mode: which answers commit the handler's writes: "success" (2xx and 3xx), or every
    # answer that is "kept". A 4xx answer whose writes are rolled back is kept all the same.
    commit: Literal["success", "kept"] = "success"
    # Transaction mode: how often the handler runs again after a deadlock or a serialization
    # failure. 0: its other effects may not be repeatable.
    transaction_retries: int = 0

    # If the store cannot be reached when a request is claimed: "refuse" it with 503; or "execute"
    # it without protection, so that its retries run again. Only where that does little harm.
    on_outage: Literal["refuse", "execute"] = "refuse"

    # A retry after the window: it starts a new operation ("new"), or it is refused while *margin*
    # lasts ("refuse").
    on_expired: Literal["new", "refuse"] = "new"
    # The status of that refusal.
    expired_status: Literal[409, 410, 412, 429] = 409

    # JSON members that may change between retries, by JSON pointer: ("/sent_at",).
    ignore: Collection[str] = ()
    # Headers that must not change between retries, by name.
    include_headers: Collection[str] = ()

    # The longest key. 255: what Stripe documents and most client libraries assume.
    key_chars_max: int = 255
    # The largest request body; from 1 MiB on it is kept in a temporary file, not in memory.
    body_bytes_max: int = 64 * MIB
    # The largest response, or result of a function, that is kept. A larger one reaches only the
    # first client.
    response_bytes_max: int = 8 * MIB
    # How many keys one caller may have within one window, counted in each process; None: no limit.
    live_keys_max: int | None = None
    # How many duplicates may wait for one key at the same time, in each process.
    waiters_max: int = 100
    # How many attempts one operation may have, the first included; then it is refused, or in doubt.
    # None: no limit.
    attempts_max: int | None = None

    # The header with the key.
    key_header: str = "Idempotency-Key"
    # The header that marks a replay.
    replayed_header: str = "Idempotent-Replayed"
    # The header with the short reference of the operation.
    reference_header: str = "Idempotency-Reference"
    # The path under which clients poll for operations that answered 202.
    status_path: str = "/idempotency/operations/"
    # The `type` of a problem is this, "#" and its code: a page that explains each problem. You may
    # give the address of a page of your own.
    docs_url: str = "https://coatcheck.readthedocs.io/reference/problems/"

    # Computed once, because every request needs them.
    window_ms: int = field(init=False, repr=False, compare=False)
    retention_ms: int = field(init=False, repr=False, compare=False)
    lease_ms: int = field(init=False, repr=False, compare=False)
    wait_ms: int = field(init=False, repr=False, compare=False)
    reconcile_timeout_ms: int = field(init=False, repr=False, compare=False)
    patience_ms: int = field(init=False, repr=False, compare=False)
    pointers: tuple[Pointer, ...] = field(init=False, repr=False, compare=False)
    header_names: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    key_name: bytes = field(init=False, repr=False, compare=False)
    key_environ: str = field(init=False, repr=False, compare=False)  # the same in WSGI
    replayed_name: bytes = field(init=False, repr=False, compare=False)
    reference_name: bytes = field(init=False, repr=False, compare=False)
    names_given: tuple[bytes, bytes] = field(init=False, repr=False, compare=False)
    # An attempt with an unclear outcome may run again.
    reruns: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "methods", frozenset(_methods(self.methods)))
        set_(self, "ignore", _strings("ignore", self.ignore))
        set_(self, "include_headers", _strings("include_headers", self.include_headers))
        set_(self, "window_ms", _ms("window", self.window))
        set_(self, "retention_ms", self.window_ms + _ms("margin", self.margin))
        set_(self, "lease_ms", _ms("lease", self.lease))
        set_(self, "wait_ms", _ms("wait", self.wait) if self.in_flight == "wait" else 0)
        set_(self, "reconcile_timeout_ms", _ms("reconcile_timeout", self.reconcile_timeout))
        set_(self, "patience_ms", _ms("patience", self.patience))
        set_(self, "pointers", tuple(_pointer(text) for text in self.ignore))
        set_(self, "header_names", tuple(header_name(n) for n in self.include_headers))
        set_(self, "key_name", header_name(self.key_header))
        set_(self, "key_environ", "HTTP_" + self.key_header.upper().replace("-", "_"))
        set_(self, "replayed_name", header_name(self.replayed_header))
        set_(self, "reference_name", header_name(self.reference_header))
        set_(self, "names_given", (self.replayed_name, self.reference_name))
        set_(self, "reruns", self.recovery == "retry")
        for check in (_check_choices, _check_times, _check_recovery, _check_limits, _check_names):
            check(self)

    @property
    def words(self) -> str:
        """What decides about an attempt without an answer, for operators."""
        return f"{self.mode} mode, recovery {self.recovery}, lease {self.lease_ms / 1_000:g} s"

    @classmethod
    def preset(cls, name: PresetName, **changes: Unpack[PolicyOptions]) -> Policy:
        """The policy called *name*, with *changes*: "default", "ietf", "stripe" or "payments"."""
        fields = PRESETS.get(name)
        if fields is None:
            known = ", ".join(PRESETS)
            raise Misconfigured(f"there is no preset {name!r}; choose one of {known}")
        if "reconcile" in changes:
            changes.setdefault("recovery", "reconcile")
        return changed(cls(**fields), changes)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    # draft-ietf-httpapi-idempotency-key-header: 400, 409 and 422 as it says, the key required on
    # routes that say so, and a duplicate gets a 409 at once.
    "ietf": {"in_flight": "409", "wait": 0},
    # What Stripe documents: every answer is kept, a mismatch is a 400, a conflict a 409 at once. A
    # late retry, if the route refuses it, is a 429, which clients of Stripe retry later.
    "stripe": {
        "in_flight": "409",
        "wait": 0,
        "mismatch": 400,
        "keep": "all",
        "window": "24h",
        "expired_status": 429,
    },
    # For money: the key is required; three days, so that an outage on a Friday may last over the
    # weekend; and no operation with an unclear outcome runs again by itself.
    "payments": {"required": True, "window": "72h", "recovery": "manual"},
}


def changed(policy: Policy, changes: Mapping[str, Any]) -> Policy:
    """*policy* with *changes*; an unknown name raises `Misconfigured` with the known ones."""
    unknown = sorted(set(changes) - POLICY_FIELDS)
    if unknown:
        known = ", ".join(sorted(POLICY_FIELDS))
        names = ", ".join(map(repr, unknown))
        raise Misconfigured(f"a policy has no {names}; its settings are: {known}")
    return replace(policy, **changes)


POLICY_FIELDS = frozenset(name for name, f in Policy.__dataclass_fields__.items() if f.init)

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
# A hundred years: added to today, the result is still a date that databases can store.
DURATION_MS_MAX = 100 * 365 * _UNITS_MS["d"]
# 50 ms: time for the heartbeat to be scheduled and for a store to answer. With a shorter lease,
# other processes would take over operations that still run.
LEASE_MS_MIN = 50
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)\s*")


def duration_ms(value: Duration) -> int:
    """*value* in whole milliseconds; raises ValueError if it is not a duration."""
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1_000)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise ValueError(f'{value!r} is not a duration such as "90s", "72h" or "7d"')
        return round(float(match[1]) * _UNITS_MS[match[2]])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number of seconds, a timedelta or text")
    return round(value * 1_000)


def positive_ms(name: str, duration: Duration) -> int:
    """The argument *name* in milliseconds; raises `Misconfigured`."""
    try:
        found_ms = duration_ms(duration)
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"{name}: {error}") from error
    if found_ms <= 0:
        raise Misconfigured(f"{name} is {duration!r}; it must be longer than zero")
    return found_ms


def _ms(name: str, value: Duration) -> int:
    try:
        milliseconds = duration_ms(value)
    except (ValueError, OverflowError) as error:
        raise Misconfigured(f"{name}: {error}") from error
    if milliseconds < 0:
        raise Misconfigured(f"{name} is {value!r}; a duration cannot be negative")
    if milliseconds > DURATION_MS_MAX:
        raise Misconfigured(f"{name} is {value!r}; a duration is at most a hundred years")
    return milliseconds


def _strings(name: str, values: Collection[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise Misconfigured(f"{name} is one text; write {name}=({values!r},)")
    if not isinstance(values, Collection):
        raise Misconfigured(f"{name} is {values!r}; it must be a collection of texts")
    for value in values:
        if not isinstance(value, str):
            raise Misconfigured(f"{name} holds {value!r}, which is not text")
    return tuple(values)


def _methods(values: Collection[str]) -> tuple[str, ...]:
    methods = tuple(method.upper() for method in _strings("methods", values))
    for method in methods:
        if _TOKEN.fullmatch(method) is None:
            raise Misconfigured(f"{method!r} is not a method; a method is one word, such as 'POST'")
    safe = sorted(SAFE_METHODS.intersection(methods))
    if safe:
        raise Misconfigured(f"{', '.join(safe)} cannot be guarded: safe methods change nothing")
    return methods


def _pointer(text: str) -> Pointer:
    try:
        return parse_pointer(text)
    except ValueError as error:
        raise Misconfigured(f"ignore: {error}") from error


# RFC 9110 §5.6.2: the names of headers and methods.
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def header_name(name: object) -> bytes:
    """*name* in lower case; raises `Misconfigured` if no header can have this name."""
    if not isinstance(name, str) or _TOKEN.fullmatch(name) is None:
        raise Misconfigured(f"{name!r} cannot be the name of a header")
    return name.lower().encode()


_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "in_flight": ("wait", "409", "202"),
    "mismatch": (400, 409, 422),
    "recovery": ("retry", "reconcile", "manual"),
    "unrecorded": ("503", "answer"),
    "mode": ("record", "transaction", "observe"),
    "commit": ("success", "kept"),
    "on_outage": ("refuse", "execute"),
    "on_expired": ("new", "refuse"),
    "expired_status": (409, 410, 412, 429),
}


def _check_choices(policy: Policy) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(policy, name)
        if value not in choices or not isinstance(value, type(choices[0])):  # 422.0 == 422
            offered = ", ".join(map(repr, choices))
            raise Misconfigured(f"{name} is {value!r}; choose one of {offered}")
    refuse_async("keep", policy.keep)
    if not callable(policy.keep) and policy.keep not in ("final", "all"):
        raise Misconfigured(
            f"keep is {policy.keep!r}; choose 'final', 'all' or a function of the response"
        )


def _check_times(policy: Policy) -> None:
    if policy.lease_ms <= 0:
        raise Misconfigured("lease must be longer than zero: it is how long a claim lasts")
    if policy.lease_ms < LEASE_MS_MIN:
        raise Misconfigured(
            f"lease is {policy.lease!r}, but must be {LEASE_MS_MIN} ms or longer: a shorter one "
            "expires before it can be renewed"
        )
    if policy.reconcile_timeout_ms <= 0:
        raise Misconfigured("reconcile_timeout must be longer than zero")
    if policy.window_ms < policy.lease_ms:
        raise Misconfigured(
            f"window ({policy.window!r}) is shorter than lease ({policy.lease!r}): a key would be "
            "free again while its first attempt may still run"
        )
    if policy.on_expired == "refuse" and policy.retention_ms == policy.window_ms:
        raise Misconfigured(
            "on_expired='refuse' refuses late retries while margin lasts, but margin is zero: set "
            "margin, or write on_expired='new'"
        )


def _check_recovery(policy: Policy) -> None:
    if policy.recovery == "reconcile" and not callable(policy.reconcile):
        raise Misconfigured("recovery='reconcile' needs reconcile=, the function to call")
    if policy.recovery != "reconcile" and policy.reconcile is not None:
        raise Misconfigured(
            f"reconcile= is given, but recovery is {policy.recovery!r}; write recovery='reconcile'"
        )
    if policy.on_outage == "execute" and (not policy.reruns or policy.mode == "transaction"):
        other = f"mode={policy.mode!r}" if policy.reruns else f"recovery={policy.recovery!r}"
        raise Misconfigured(
            f"on_outage='execute' runs requests that may have run before, which {other} is there "
            "to prevent: write on_outage='refuse'"
        )


def _check_limits(policy: Policy) -> None:
    least = dict.fromkeys(("body_bytes_max", "response_bytes_max", "waiters_max"), 0)
    least |= {"key_chars_max": 1, "transaction_retries": 0}
    for name in ("live_keys_max", "attempts_max"):
        if getattr(policy, name) is not None:
            least[name] = 1
    for name, smallest in least.items():
        value = getattr(policy, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise Misconfigured(
                f"{name} is {value!r}; it must be a whole number from {smallest} up"
            )


# Headers that HTTP defines. Ours would replace them.
_OF_HTTP = frozenset(
    b"""accept accept-charset accept-encoding accept-language accept-ranges age allow alt-svc
    authorization cache-control connection content-disposition content-encoding content-language
    content-length content-location content-range content-type cookie date etag expect expires
    forwarded from host if-match if-modified-since if-none-match if-range if-unmodified-since
    keep-alive last-modified link location origin prefer preference-applied proxy-authenticate
    proxy-authorization proxy-connection range referer retry-after server set-cookie te trailer
    transfer-encoding upgrade user-agent vary via warning www-authenticate""".split()
)
_PATH = re.compile(r"/(?:[!-\"$->@-~]+/)+")  # printable, without "?" and "#"


def _check_names(policy: Policy) -> None:
    path: object = policy.status_path
    url: object = policy.docs_url
    if not isinstance(path, str) or _PATH.fullmatch(path) is None:
        raise Misconfigured(
            f"status_path is {path!r}; it must be a path that begins and ends with '/', such as "
            "'/operations/'"
        )
    if not isinstance(url, str) or any(c <= " " for c in url):
        raise Misconfigured(f"docs_url is {url!r}; it must be a URL")
    for name in ("key_header", "replayed_header", "reference_header"):
        if getattr(policy, name).lower().encode() in _OF_HTTP:
            raise Misconfigured(
                f"{name} is {getattr(policy, name)!r}, which HTTP defines: choose another name"
            )
    names = (policy.key_name, policy.replayed_name, policy.reference_name)
    if len(set(names)) < len(names):
        raise Misconfigured(
            "key_header, replayed_header and reference_header must be three different names, not "
            f"{policy.key_header}, {policy.replayed_header} and {policy.reference_header}"
        )
    for name in ("required", "replay_cookies"):
        if not isinstance(getattr(policy, name), bool):
            raise Misconfigured(f"{name} is {getattr(policy, name)!r}; it must be True or False")
