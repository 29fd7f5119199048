"""Policies: their defaults, their presets, and the mistakes that they refuse."""

from datetime import timedelta
from http import HTTPStatus
from typing import get_args

import pytest

from coatcheck.core.policy import (
    POLICY_FIELDS,
    PRESETS,
    Policy,
    PolicyOptions,
    PresetName,
    changed,
    duration_ms,
    positive_ms,
)
from coatcheck.errors import Misconfigured

# The docs publish these and deployments rely on them.
DEFAULTS = {
    "required": False,
    "methods": {"POST", "PATCH"},
    "window": "24h",
    "margin": "1h",
    "lease": "20s",
    "wait": "2s",
    "in_flight": "wait",
    "mismatch": 422,
    "keep": "final",
    "replay_cookies": False,
    "recovery": "retry",
    "reconcile": None,
    "reconcile_timeout": "10s",
    "patience": "2s",
    "unrecorded": "503",
    "mode": "record",
    "commit": "success",
    "on_outage": "refuse",
    "transaction_retries": 0,
    "on_expired": "new",
    "expired_status": 409,
    "ignore": (),
    "include_headers": (),
    "key_chars_max": 255,
    "body_bytes_max": 67_108_864,
    "response_bytes_max": 8_388_608,
    "live_keys_max": None,
    "waiters_max": 100,
    "attempts_max": None,
    "key_header": "Idempotency-Key",
    "replayed_header": "Idempotent-Replayed",
    "reference_header": "Idempotency-Reference",
    "status_path": "/idempotency/operations/",
    "docs_url": "https://coatcheck.readthedocs.io/reference/problems/",
}
CHANGES = {
    "default": {},
    "ietf": {"in_flight": "409", "wait": 0},
    "stripe": {
        "in_flight": "409",
        "wait": 0,
        "mismatch": 400,
        "keep": "all",
        "expired_status": 429,
    },
    "payments": {"required": True, "window": "72h", "recovery": "manual"},
}


def test_type_checkers_know_every_field_and_every_preset():
    """R5: and each with the same type."""
    options = {name: hint.__forward_arg__ for name, hint in PolicyOptions.__annotations__.items()}
    assert options == {name: Policy.__annotations__[name] for name in POLICY_FIELDS}
    assert set(get_args(PresetName)) == set(PRESETS)


def settings(policy):
    return {name: getattr(policy, name) for name in POLICY_FIELDS}


def test_every_setting_has_the_published_default():
    """T1, S3, L3, F1, X2, K1."""
    policy = Policy()
    assert settings(policy) == DEFAULTS
    hours = policy.window_ms / 3_600_000, policy.retention_ms / 3_600_000
    assert (hours, policy.lease_ms, policy.wait_ms) == ((24, 25), 20_000, 2_000)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_default_with_a_few_changes(name):
    """T1, L3, L4, L6."""
    assert settings(Policy.preset(name)) == DEFAULTS | CHANGES[name]


@pytest.mark.parametrize("method", ["GET", "head", "OPTIONS", "TRACE", "CONNECT"])
def test_a_safe_method_cannot_be_guarded(method):
    """S3."""
    with pytest.raises(Misconfigured, match=f"{method.upper()} cannot be guarded"):
        Policy(methods={"POST", method})


def test_what_is_kept_may_be_a_function_of_the_answer():
    """L4."""
    assert Policy(keep=bool).keep is bool


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        (90, 90_000),
        (0.5, 500),
        (timedelta(minutes=2), 120_000),
        ("250ms", 250),
        ("90s", 90_000),
        ("1.5h", 5_400_000),
        (" 72 h ", 259_200_000),
        ("7d", 604_800_000),
        ("2m", 120_000),
        ("2min", 120_000),
    ],
)
def test_a_duration_is_a_number_a_timedelta_or_text(value, milliseconds):
    assert duration_ms(value) == milliseconds


@pytest.mark.parametrize("value", ["", "soon", "72", "-1h", "1 week", None, True, [1]])
def test_an_invalid_duration_is_refused_with_an_example(value):
    with pytest.raises(Misconfigured, match=r"window: .*(72h|seconds)"):
        Policy(window=value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"window": "10s", "lease": "60s"}, "window .* is shorter than lease"),
        ({"lease": 0}, "lease must be longer than zero"),
        ({"margin": -1}, "cannot be negative"),
        ({"reconcile_timeout": 0}, "reconcile_timeout must be longer than zero"),
        ({"reconcile_timeout": -1}, "reconcile_timeout is -1; a duration cannot be negative"),
        ({"reconcile_timeout": None}, "reconcile_timeout: None is not"),
        ({"window": float("inf")}, "window"),
        ({"in_flight": "queue"}, "in_flight is 'queue'; choose one of 'wait', '409', '202'"),
        ({"mismatch": 418}, "choose one of 400, 409, 422"),
        ({"keep": "some"}, "a function of the response"),
        ({"recovery": "pray"}, "choose one of 'retry', 'reconcile', 'manual'"),
        ({"recovery": "reconcile"}, "needs reconcile="),
        ({"reconcile": print}, "write recovery='reconcile'"),
        ({"mode": "magic"}, "mode"),
        ({"commit": "always"}, "commit"),
        ({"on_expired": "shrug"}, "on_expired"),
        ({"expired_status": 500}, "expired_status"),
        ({"methods": {"GET"}}, "GET cannot be guarded"),
        ({"methods": ("POST", 1)}, "methods holds 1, which is not text"),
        ({"methods": None}, "methods is None; it must be a collection of texts"),
        ({"ignore": (b"/sent_at",)}, "ignore holds b'/sent_at', which is not text"),
        ({"include_headers": 5}, "include_headers is 5; it must be a collection of texts"),
        ({"key_header": None}, "None cannot be the name of a header"),
        ({"methods": "POST"}, r"write methods=\('POST',\)"),
        ({"ignore": "/sent_at"}, "ignore is one text"),
        ({"ignore": ("sent_at",)}, "ignore: .*begin"),
        ({"include_headers": ("X Y",)}, "cannot be the name of a header"),
        ({"key_header": "Schlüssel"}, "cannot be the name of a header"),
        ({"replayed_header": "a b"}, "cannot be the name of a header"),
        ({"reference_header": "a:"}, "cannot be the name of a header"),
        ({"key_header": ""}, "cannot be the name of a header"),
        ({"key_chars_max": 0}, "key_chars_max is 0"),
        ({"body_bytes_max": -1}, "body_bytes_max"),
        ({"response_bytes_max": 1.5}, "response_bytes_max"),
        ({"waiters_max": True}, "waiters_max"),
        ({"transaction_retries": -1}, "transaction_retries"),
        ({"live_keys_max": 0}, "live_keys_max"),
        ({"attempts_max": 0}, "attempts_max"),
        ({"attempts_max": True}, "attempts_max"),
        ({"status_path": "/operations"}, "status_path .* begins and ends with '/'"),
        ({"status_path": "operations/"}, "status_path .* begins and ends with '/'"),
        ({"status_path": "operations"}, "status_path .* begins and ends with '/'"),
        ({"status_path": 5}, "status_path is 5"),
        ({"status_path": "/a b/"}, "status_path is '/a b/'"),
        ({"status_path": "/how-far?/"}, "status_path is"),
        ({"status_path": "/"}, "status_path is '/'"),
        ({"docs_url": None}, "docs_url is None; it must be a URL"),
        ({"docs_url": "see below"}, "docs_url is 'see below'; it must be a URL"),
        ({"mismatch": 422.0}, "mismatch is 422.0; choose one of 400, 409, 422"),
        ({"lease": "49ms"}, "lease is '49ms', but must be 50 ms"),
        ({"methods": {"POST "}}, "'POST ' is not a method"),
        ({"methods": [""]}, "'' is not a method"),
        ({"key_header": "Authorization"}, "key_header is 'Authorization', which HTTP defines"),
        ({"key_header": "cookie"}, "key_header is 'cookie', which HTTP defines"),
        ({"key_header": "Content-Type"}, "key_header is"),
        ({"replayed_header": "Content-Length"}, "replayed_header is"),
        ({"replayed_header": "Transfer-Encoding"}, "replayed_header is"),
        ({"reference_header": "Set-Cookie"}, "reference_header is"),
        ({"reference_header": "location"}, "reference_header is"),
        ({"required": "yes"}, "required is 'yes'"),
        ({"replay_cookies": 1}, "replay_cookies is 1; it must be True or False"),
    ],
)
def test_a_mistake_is_refused_with_what_to_write(fields, sentence):
    with pytest.raises(Misconfigured, match=sentence):
        Policy(**fields)


def test_a_status_may_be_given_by_its_name():
    """F1."""
    assert Policy(mismatch=HTTPStatus.BAD_REQUEST).mismatch == 400


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("in_flight", ["wait", "409", "202"]),
        ("mismatch", [400, 409, 422]),
        ("keep", ["final", "all"]),
        ("recovery", ["retry", "manual"]),
        ("mode", ["record", "transaction"]),
        ("commit", ["success", "kept"]),
        ("on_expired", ["new", "refuse"]),
        ("expired_status", [409, 410, 412, 429]),
    ],
)
def test_every_choice_is_accepted(name, choices):
    """F1, L3, L4, L6, T2."""
    assert [getattr(Policy(**{name: choice}), name) for choice in choices] == choices


def test_only_the_default_recovery_runs_an_unclear_attempt_again():
    """L6."""
    assert Policy().reruns
    assert not Policy(recovery="manual").reruns
    assert not Policy(recovery="reconcile", reconcile=print).reruns


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(Misconfigured, match=r"no 'windw'; its settings are: .*window"):
        changed(Policy(), {"windw": "1h"})


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(Misconfigured, match="default, ietf, stripe, payments"):
        Policy.preset("paypal2")


def test_the_payments_preset_never_runs_an_unclear_attempt_again():
    """L6, K3: required, 72 hours, by reconcile or by hand."""
    policy = Policy.preset("payments")
    assert policy.required
    assert policy.window_ms == 72 * 3_600_000
    assert policy.recovery == "manual"
    assert not policy.reruns
    assert Policy.preset("payments", reconcile=print).recovery == "reconcile"


def test_the_stripe_preset_keeps_server_errors_and_refuses_at_once():
    """L4, L3, F1."""
    policy = Policy.preset("stripe", window="48h")
    assert (policy.keep, policy.mismatch, policy.wait_ms) == ("all", 400, 0)
    assert policy.window_ms == 48 * 3_600_000


def test_methods_are_compared_in_upper_case():
    assert Policy(methods=["put", "Delete"]).methods == {"PUT", "DELETE"}


def test_names_of_headers_are_compared_in_lower_case():
    """K1, F3."""
    policy = Policy(key_header="X-Key", include_headers=["X-Tenant"])
    assert (policy.key_name, policy.header_names) == (b"x-key", (b"x-tenant",))
    assert (policy.replayed_name, policy.reference_name) == (
        b"idempotent-replayed",
        b"idempotency-reference",
    )


def test_a_policy_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        Policy().window_ms = 1


@pytest.mark.parametrize(
    ("fields", "edge"),
    [
        ({"window": "60s", "lease": "60s"}, "window_ms"),
        ({"margin": 0}, "retention_ms"),
        ({"wait": 0}, "wait_ms"),
        ({"lease": 0.05, "window": 0.05}, "lease_ms"),
        ({"key_chars_max": 1, "body_bytes_max": 0, "response_bytes_max": 0}, "key_chars_max"),
        ({"waiters_max": 0, "live_keys_max": 1}, "live_keys_max"),
        ({"attempts_max": 1}, "attempts_max"),
    ],
)
def test_the_smallest_sensible_values_are_accepted(fields, edge):
    assert getattr(Policy(**fields), edge) >= 0


def test_a_policy_that_does_not_wait_has_no_waiting_time():
    assert Policy(in_flight="409", wait="2s").wait_ms == 0


def test_a_changed_policy_has_new_times():
    policy = changed(Policy(), {"window": "1h", "ignore": ["/sent_at"]})
    assert policy.window_ms == 3_600_000
    assert policy.pointers == (("sent_at",),)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 1e16},
        {"window": timedelta.max},
        {"on_expired": "refuse", "margin": 0},
        {"key_header": "Idempotency-Reference"},
        {"replayed_header": "Idempotency-Reference"},
    ],
    ids=repr,
)
def test_a_policy_that_could_never_work_is_refused(fields):
    """T1, T2: a time that no store can hold, a refusal for no time, one name for two headers."""
    with pytest.raises(Misconfigured):
        Policy(**fields)


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"recovery": "manual"}, "recovery='manual'"),
        ({"recovery": "reconcile", "reconcile": print}, "recovery='reconcile'"),
        ({"mode": "transaction"}, "mode='transaction'"),
    ],
)
def test_what_must_not_run_twice_does_not_run_unguarded(fields, other):
    """D2."""
    with pytest.raises(Misconfigured, match=f"{other} is there to prevent"):
        Policy(on_outage="execute", **fields)
    with pytest.raises(Misconfigured):
        Policy.preset("payments", on_outage="execute")


def test_a_duration_that_must_be_longer_than_zero_names_its_argument():
    assert positive_ms("lease", "2s") == 2_000
    for wrong in ("soon", 0, "-1s", float("inf")):
        with pytest.raises(Misconfigured, match="lease"):
            positive_ms("lease", wrong)
