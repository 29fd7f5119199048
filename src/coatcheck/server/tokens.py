"""Verified JSON Web Tokens as callers; see `callers.jwt`. Needs PyJWT.

Everything that depends on the settings is checked when the caller is made. So whatever fails later
is due to the token, and the request is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import jwt

from coatcheck.errors import Misconfigured
from coatcheck.server.callers import Refused
from coatcheck.server.request import Request

Key: TypeAlias = "str | bytes | Mapping[str, Any] | jwt.PyJWK | jwt.PyJWKSet | jwt.PyJWKClient"

# What a token that is not valid may raise. PyJWT wraps nearly everything in its own error.
_INVALID = (
    *(jwt.PyJWTError, ValueError, TypeError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class TokenCaller:
    """Whose token it is: a `caller=` function; see `callers.jwt`."""

    def __init__(
        self,
        key: Key,
        *,
        algorithms: Sequence[str],
        claim: str,
        header: str,
        checks: dict[str, Any],
    ) -> None:
        self._algorithms = _checked_algorithms(algorithms)
        self._key = _checked_key(key, self._algorithms)
        if not claim or not isinstance(claim, str):
            raise Misconfigured(
                f"claim is {claim!r}; it must be the name of a claim, such as 'sub'"
            )
        _check(checks["audience"], checks["issuer"], checks["leeway"])
        self._claim = claim
        self._header = header.lower().encode("latin-1")
        self._checks = {**checks, "options": {"require": [claim]}}
        # A client fetches keys over the network. On an event loop it runs in a thread.
        self.blocks = isinstance(key, jwt.PyJWKClient)

    def __call__(self, request: Request) -> str:
        """The caller of *request*; raises `Refused` if its token is missing or not valid."""
        value = request.header(self._header)
        scheme, space, token = value.partition(b" ")
        if scheme.lower() != b"bearer":
            if self._header == b"authorization" or space:
                value = b""  # other credentials
            token = value
        if not token.strip():
            # RFC 6750 §3.1: no error code for a request without a token.
            raise Refused(401, "this request needs a bearer token", headers=_challenge())
        try:
            claims = jwt.decode(
                token.strip(), self._key_of(token.strip()), self._algorithms, **self._checks
            )
            found = claims[self._claim]
        except jwt.PyJWKClientConnectionError as error:
            detail = "the keys that verify tokens cannot be fetched; retry with the same key"
            raise Refused(503, detail, headers=[("Retry-After", "1")]) from error
        except _INVALID as error:
            raise _not_valid() from error
        if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
            raise _not_valid()
        return json.dumps(["jwt", claims.get("iss"), self._claim, found])

    def _key_of(self, token: bytes) -> Any:  # noqa: ANN401 - whatever PyJWT takes
        """The key that *token* names, or the only one."""
        key = self._key
        if isinstance(key, jwt.PyJWKClient):
            return key.get_signing_key_from_jwt(token)
        if not isinstance(key, jwt.PyJWKSet):
            return key
        name = jwt.get_unverified_header(token).get("kid")
        if name is None and len(key.keys) == 1:
            return key.keys[0]
        return key[str(name)]


def _challenge(error: str = "") -> list[tuple[str, str]]:
    return [("WWW-Authenticate", f'Bearer error="{error}"' if error else "Bearer")]


def _not_valid() -> Refused:
    # The client learns no more: each detail would help to forge the next token.
    return Refused(401, "the bearer token is not valid", headers=_challenge("invalid_token"))


def _checked_algorithms(algorithms: object) -> list[str]:
    if isinstance(algorithms, str) or not isinstance(algorithms, Sequence) or not algorithms:
        raise Misconfigured(f"algorithms is {algorithms!r}; it must be a list such as ['RS256']")
    for name in algorithms:
        if not isinstance(name, str) or name == "none":
            raise Misconfigured(f"algorithms: {name!r} is not an algorithm that signs")
        try:
            jwt.get_algorithm_by_name(name)
        except NotImplementedError as error:  # unknown, or it needs the library cryptography
            raise Misconfigured(f"algorithms: {name!r}: {error}") from error
    if len({name.startswith("HS") for name in algorithms}) > 1:
        raise Misconfigured(
            f"algorithms is {list(algorithms)!r}: HMAC and public keys may not be mixed, because "
            "anyone could sign with the public key as an HMAC secret"
        )
    return list(algorithms)


def _checked_key(key: Any, algorithms: list[str]) -> Any:  # noqa: ANN401 - whatever a user gives
    """*key* as PyJWT takes it, parsed once."""
    if isinstance(key, jwt.PyJWKClient):
        return key
    # Not the value or an error's text, which may have the key in it.
    misfit = f"the key, a {type(key).__name__}, does not fit algorithms={algorithms}"
    try:
        if isinstance(key, Mapping):
            key = jwt.PyJWKSet.from_dict(dict(key)) if "keys" in key else jwt.PyJWK(dict(key))
        if not isinstance(key, jwt.PyJWK | jwt.PyJWKSet):
            for name in algorithms:
                key = jwt.get_algorithm_by_name(name).prepare_key(key)
            _check_public(key)
            return key
    except _INVALID as error:
        raise Misconfigured(misfit) from error
    keys = key.keys if isinstance(key, jwt.PyJWKSet) else [key]
    if not any(one.algorithm_name in algorithms for one in keys):
        raise Misconfigured(misfit)
    for one in keys:
        _check_public(one.key)
    return key


def _check_public(key: object) -> None:
    if hasattr(key, "private_bytes"):
        raise Misconfigured("the key is a private key; tokens are verified with the public one")


def _check(audience: object, issuer: object, leeway: object) -> None:
    for name, found in (("audience", audience), ("issuer", issuer)):
        names = [found] if found is None or isinstance(found, str) else found
        if not isinstance(names, Sequence) or not names:
            raise Misconfigured(f"{name} is {found!r}; it must be a text, or a list of texts")
        if found is not None and not all(isinstance(one, str) and one for one in names):
            raise Misconfigured(f"{name} is {found!r}; it must be a text, or a list of texts")
    if isinstance(leeway, bool) or not isinstance(leeway, int | float | timedelta):
        raise Misconfigured(f"leeway is {leeway!r}; it must be a number of seconds")
