"""Cookies: which of them may hold a session, and what of those a retry must have in common.

A cookie is recognized by its name. A session in a signed cookie gets a new signature from time to
time. Where the signature is known to be valid, the content is compared without it. Everywhere else
the whole value is compared, so that a forged cookie never counts as the session that it imitates.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from coatcheck.errors import Misconfigured, MissingExtra

if TYPE_CHECKING:
    from itsdangerous import TimestampSigner

# One secret, or several where they are rotated.
Secret: TypeAlias = str | bytes | Sequence[str | bytes]

# The names of cookies that may hold a session, in lower case; `*` is any text. They are wide: if a
# cookie is compared in vain, a retry is refused; if one is missed, sessions are not distinguished.
SESSION_COOKIES = (
    *("*sess*", "sid", "*.sid", "*_sid", "*-sid", "sentrysid", "ssid", "hsid", "*apisid", "*psid"),
    *("*auth*", "*token*", "*jwt*", "*bearer*", "*api_key*", "*apikey*", "*credential*"),
    *("*login*", "*logged*", "*remember*", "*identity*", "*sso*", "*saml*", "*oidc*", "*ticket*"),
    *("user", "username", "user_id", "userid", "uid", "*_user", "*wikiuserid", "phpbb3_*_u"),
    *(".aspnet.*", ".aspnetcore.cookies*", ".aspxanonymous", "cfid", "cakephp", "rtfa"),
    *("__ac", "__client", "wordpress_sec_*", "iplanetdirectorypro", "hanko"),
)
# Cookies whose names are similar, but which hold no session: protection against forged requests,
# consent, analytics, advertisements, bot detection and load balancers. They change at any time.
OTHER_COOKIES = (
    *("*csrf*", "*xsrf*", "*requestverification*", "*antiforgery*", "authenticity_token"),
    *("*consent*", "optanon*", "*nonce*", "ai_session", "ai_user", "_hj*session*", "_uetsid*"),
    *("__stripe_sid", "intercom-session-*", "crisp-client*", "_parsely_session", "_pk_ses.*"),
    *("_sp_ses.*", "sbjs_session", "rl_session", "ab.storage.sessionid*", "s_sess", "_gd_session"),
    *("incap_ses_*", "_pin_unauth", "analytics_session*", "fs_session", "_tt_sessionid", "apt.sid"),
)
# RFC 6265bis §4.1.3: promises about how a cookie was set, not a part of its meaning.
_PREFIX = re.compile(r"\A__(host-http|host|secure|http)-")

# 256: more names than the clients of an application send.
NAMES_MAX = 256


class SessionCookies:
    """
    The cookies of an application that hold sessions.

    Args:
        names: names or patterns beside those of `SESSION_COOKIES`; they also win over
            `OTHER_COOKIES`.
        secret: of the cookies that Starlette or Flask sign.
    """

    def __init__(self, names: Iterable[str] = (), secret: Secret | None = None) -> None:
        own = _pattern_of(_checked(names))
        listed, others = _pattern_of(SESSION_COOKIES), _pattern_of(OTHER_COOKIES)

        @functools.lru_cache(maxsize=NAMES_MAX)
        def is_session(name: bytes) -> bool:
            text = name.decode("latin-1").lower()
            short = _PREFIX.sub("", text)
            if own.match(text) or own.match(short):
                return True
            return listed.match(short) is not None and others.match(short) is None

        self.is_session = is_session
        self._signers = () if secret is None else _signers_of(secret)

    def session_of(self, cookie: bytes, content: object = None) -> bytes:
        """
        The session in the header *cookie*, as bytes to compare; empty if there is none.

        *content*: what a session middleware in front has read from its cookie.
        """
        found: list[tuple[bytes, bytes]] = []
        for pair in cookie.split(b";"):
            name, _, value = pair.strip(b" \t").partition(b"=")
            if value and self.is_session(name):
                found.append((name, value))
        # By name only: of several with one name the application reads the first or the last.
        found.sort(key=_name_of)
        return b"".join(self._compared(name, value, content) for name, value in found)

    def _compared(self, name: bytes, value: bytes, content: object) -> bytes:
        # No cookie contains a semicolon. So a cookie that was sent without a signature is not equal
        # to a verified one.
        if self._signers or content is not None:
            encoded = value.rpartition(b".")[0].rpartition(b".")[0]  # without time and signature
            if encoded and (self._is_signed(value) or _is_encoded(content, encoded)):
                return b"%b;verified;%b\n" % (name, encoded)
        return b"%b;sent;%b\n" % (name, value)

    def _is_signed(self, value: bytes) -> bool:
        return any(signer.validate(value) for signer in self._signers)


def _name_of(pair: tuple[bytes, bytes]) -> bytes:
    return pair[0]


def _is_encoded(content: object, encoded: bytes) -> bool:
    """
    *encoded* is *content* as Starlette's `SessionMiddleware` encodes it.

    The middleware takes a session from its cookie only if the signature is valid. So the cookie
    with the same content is its own, whatever its name.
    """
    if not isinstance(content, Mapping) or not content:
        return False
    try:
        return bool(json.loads(base64.b64decode(encoded)) == content)
    except (ValueError, RecursionError):
        return False


def _signers_of(secret: Secret) -> tuple[TimestampSigner, ...]:
    """What verifies the cookies of Starlette and of Flask."""
    given: Sequence[object] = [secret] if isinstance(secret, str | bytes) else secret
    secrets = [one.encode() if isinstance(one, str) else one for one in given]
    keys = [one for one in secrets if isinstance(one, bytes) and one]
    if not keys or len(keys) < len(secrets):
        # Not its value, which is logged.
        raise Misconfigured(
            "session_secret must be a text or bytes, or a list of them, and none may be empty"
        )
    try:
        from itsdangerous import TimestampSigner  # noqa: PLC0415 - needed for this only
    except ImportError as error:
        raise MissingExtra("itsdangerous", "itsdangerous") from error
    # The arguments are those of Starlette's `SessionMiddleware` and Flask's
    # `SecureCookieSessionInterface`.
    return (
        TimestampSigner(keys),
        TimestampSigner(keys, salt="cookie-session", key_derivation="hmac"),
    )


def _pattern_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches a text in lower case that is one of *names*; `fnmatch` explains the wildcards."""
    return re.compile("|".join(map(fnmatch.translate, names)) or r"(?!)")


def _checked(names: object) -> list[str]:
    if isinstance(names, str | bytes) or not isinstance(names, Iterable):
        raise Misconfigured(f"session_cookies is {names!r}; it must be a list of names or patterns")
    checked = []
    for name in names:
        if not isinstance(name, str) or not name or any(c in name for c in "=; \t"):
            raise Misconfigured(f"session_cookies: {name!r} cannot be the name of a cookie")
        checked.append(name.lower())
    return checked
