"""What well-known APIs expect of their clients."""

from __future__ import annotations

from collections.abc import Mapping

from coatcheck.core.client.retry_policy import RETRY_STATUSES, Preset
from coatcheck.errors import Misconfigured

_PRESETS = (
    # The key as most APIs take it: bare, in the header of the IETF draft.
    Preset(name="default"),
    # draft-ietf-httpapi-idempotency-key-header: the key is a structured-field string.
    Preset(name="ietf", is_quoted=True),
    # Every 409 is a request in progress or a lock, and the header decides where it is sent.
    Preset(
        name="stripe",
        methods={"POST"},
        retry_statuses=RETRY_STATUSES | {409},
        retry_header="Stripe-Should-Retry",
        window="24h",
    ),
    # A request in progress may fail in several ways, one of them 409. PayPal marks no replays.
    Preset(
        name="paypal",
        key_header="PayPal-Request-Id",
        key_chars_max=38,
        retry_statuses=RETRY_STATUSES | {409},
        replayed_header=None,
    ),
    # Adyen sends `transient-error: true` with what may be sent again; other errors are final.
    Preset(
        name="adyen",
        key_chars_max=64,
        retry_statuses=frozenset(),
        retry_header="transient-error",
        replayed_header=None,
        window="7d",
    ),
    # Square takes the key in the JSON body.
    Preset(
        name="square",
        key_header=None,
        key_member="idempotency_key",
        key_chars_max=45,
        replayed_header=None,
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}


def preset_of(preset: Preset | str) -> Preset:
    """*preset* itself, or the one with that name."""
    if isinstance(preset, Preset):
        return preset
    found = PRESETS.get(preset)
    if found is None:
        known = ", ".join(PRESETS)
        raise Misconfigured(f"there is no preset {preset!r}; choose one of {known}")
    return found
