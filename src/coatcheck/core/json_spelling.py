"""Spelling JSON: `json.JSONEncoder.encode`, but its machine is made once and not for each call.

That machine is the C encoder behind `json`. Where an interpreter has none, or makes it in another
way, the public method does as well and takes some microseconds longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def speller(
    *,
    sort_keys: bool = False,
    ensure_ascii: bool = True,
    allow_nan: bool = True,
    default: Callable[[Any], Any] | None = None,
) -> Callable[[object], str]:
    """
    A function that spells JSON without spaces, as `json.dumps` with these options.

    Circles are not looked for: they end in a RecursionError.
    """
    encoder = json.JSONEncoder(
        check_circular=False,
        separators=(",", ":"),
        sort_keys=sort_keys,
        ensure_ascii=ensure_ascii,
        allow_nan=allow_nan,
        default=default,
    )
    try:
        quote: Any = json.encoder.encode_basestring_ascii if ensure_ascii else _quote
        make: Any = json.encoder.c_make_encoder  # type: ignore[attr-defined]  # None on PyPy
        options = (None, ":", ",", sort_keys, False, allow_nan)  # no indent, and no key is skipped
        chunks_of = make(None, encoder.default, quote, *options)
        if all("".join(chunks_of(value, 0)) == encoder.encode(value) for value in _SAMPLES):
            return lambda value: "".join(chunks_of(value, 0))
    except (TypeError, ValueError, AttributeError):
        pass
    return encoder.encode


_quote: Any = json.encoder.encode_basestring
_SAMPLES = ({"b": [1, "é\n", 1.5, None, True], "a": ({}, "")}, "text", 7)
