"""Keys of a client: made once for each action, and written as the API wants them."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from contextlib import suppress

from coatcheck.core.client.retry_policy import Preset
from coatcheck.core.key import Malformed, format_key, parse_key
from coatcheck.errors import Misconfigured

# Derived keys must be the same in every release: a change would execute retries again.
_REFERENCES = uuid.UUID("a5a9a2e4-6a0f-5c35-9f0d-7f3c7d1f0c1e")


def new_uuid4() -> str:
    """A random key."""
    return str(uuid.uuid4())


def new_uuid7() -> str:
    """A key that begins with the time, for servers that store keys in their order (RFC 9562)."""
    time_ms = time.time_ns() // 1_000_000
    bits = time_ms << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62
    return str(uuid.UUID(int=bits | secrets.randbits(62)))


def key_of_reference(reference: str) -> str:
    """The key of the action with this *reference*: always the same, and not readable."""
    if not reference:
        raise Misconfigured("reference is empty; it names the action, such as 'order-17'")
    return str(uuid.uuid5(_REFERENCES, reference))


def checked_key(key: str, preset: Preset) -> str:
    """*key*; raises `Misconfigured` if the API of *preset* does not take it."""
    if len(key) > preset.key_chars_max:
        raise Misconfigured(
            f"the key has {len(key)} characters; the preset {preset.name!r} allows "
            f"{preset.key_chars_max}"
        )
    if preset.is_quoted:
        try:
            format_key(key)
        except ValueError as error:
            raise Misconfigured(f"the key {error}") from error
        return key
    parsed = parse_key([key.encode("utf-8", "surrogatepass")])
    if isinstance(parsed, Malformed):
        raise Misconfigured(f"the key cannot be sent: {parsed.reason}")
    if parsed != key:  # it has quotes or spaces around it
        raise Misconfigured("the key cannot be sent: leave out the quotes and spaces around it")
    return key


def header_value(key: str, preset: Preset) -> str:
    """*key*, which is checked, as the header that is sent."""
    return format_key(key) if preset.is_quoted else key


def key_in_header(value: str) -> str:
    """The key in a header that the application has set itself."""
    parsed = parse_key([value.encode("latin-1", "replace")])
    return value if isinstance(parsed, Malformed) else parsed


def is_blank(key: str) -> bool:
    """Whether a server may take *key*, which the application has set itself, for none."""
    return not key.strip(' \t"')


def key_in_body(body: bytes, member: str, key: str) -> tuple[bytes, str]:
    """
    *body* with *key* as its *member*, and the key; a key that it already has is kept.

    The rest stays as it is: a number that is parsed and written again may be another number.
    """
    text, members = "", None
    with suppress(ValueError, RecursionError):
        text = body.decode("utf-8-sig")
        members = json.loads(text)
    if not isinstance(members, dict):
        raise Misconfigured(
            f"the key is sent as {member!r} in the JSON body, but the body is not a JSON object"
        )
    if member in members:
        given = members[member]
        if not isinstance(given, str) or is_blank(given):
            raise Misconfigured(
                f"{member!r} in the JSON body is {given!r}; write a key, or leave it out"
            )
        return body, given
    rest = text[text.index("{") + 1 :]
    return f"{_beginning(member, key)}{',' if members else ''}{rest}".encode(), key


def key_out_of_body(body: bytes, member: str, key: str) -> bytes:
    """*body* before `key_in_body` has put *key* into it."""
    beginning = _beginning(member, key).encode()
    if not body.startswith(beginning):  # the application itself has written it
        return body
    return b"{" + body.removeprefix(beginning).removeprefix(b",")


def _beginning(member: str, key: str) -> str:
    return f"{{{json.dumps(member)}:{json.dumps(key)}"
