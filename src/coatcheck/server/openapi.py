"""OpenAPI: the document of an application states which header a guarded operation takes.

`annotate`, which users import from `coatcheck.openapi`, adds the header with the key and the
refusals to the document of any framework. FastAPI and Litestar call it by themselves: see
`extend_openapi` in `starlette_routes.py`, and `litestar.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, get_args

from coatcheck.core.policy import Policy
from coatcheck.core.problem import KINDS, Code, Retry

PROBLEM_TYPE = "application/problem+json"

# The same for every refusal. `code` is not an enumeration: a client made from this document must
# accept the codes of later releases.
PROBLEM_SCHEMA: Mapping[str, Any] = {
    "title": "Problem",
    "description": "Why a request with an idempotency key was refused (RFC 9457).",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retry"],
    "properties": {
        "type": {"type": "string", "description": "A URL; it ends with # and the code."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "What happened, for programs."},
        "retry": {
            "type": "string",
            "enum": list(get_args(Retry)),
            "description": "Whether to send the request again, and with which key.",
        },
        "reference": {"type": "string", "description": "Names the operation, for support."},
    },
}

_DESCRIPTION = (
    "Makes the request safe to retry. Send a new UUID for each action, and the same UUID with each "
    "retry of it: the operation runs once, and every retry gets its response."
)
_WITHOUT_KEY = " Without a key the request is not protected."


def annotate(
    document: Mapping[str, Any], routes: Mapping[tuple[str, str], Policy]
) -> dict[str, Any]:
    """
    A copy of *document* with the header and the refusals of every guarded operation.

    Args:
        document: an OpenAPI document, version 3.0 or later.
        routes: the policies of those that are guarded, by path template and method:
            `("/orders/{id}", "POST")`. One that the document does not have is left out.
    """
    annotated: dict[str, Any] = copy.deepcopy(dict(document))
    paths = annotated.get("paths", {})
    found = [
        (paths[path][method.lower()], policy)
        for (path, method), policy in routes.items()
        if method.lower() in paths.get(path, {})
    ]
    if found:
        schemas = annotated.setdefault("components", {}).setdefault("schemas", {})
        name = _name_in(schemas)
        schemas[name] = copy.deepcopy(dict(PROBLEM_SCHEMA))
        for operation, policy in found:
            _add_header(operation, policy, annotated)
            for status, codes in _codes_by_status(policy).items():
                reference = {"$ref": f"#/components/schemas/{name}"}
                _add_refusal(operation.setdefault("responses", {}), status, codes, reference)
    return annotated


def _name_in(schemas: Mapping[str, Any]) -> str:
    """`Problem`, unless the application has a schema of that name."""
    return "Problem" if schemas.get("Problem", PROBLEM_SCHEMA) == PROBLEM_SCHEMA else "KeyProblem"


def resolved(document: Mapping[str, Any], parameter: Mapping[str, Any]) -> Mapping[str, Any]:
    """*parameter*, or the one of *document* that it refers to."""
    reference = parameter.get("$ref", "")
    if not reference.startswith("#/"):
        return parameter
    found: Any = document
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {})
    return found if isinstance(found, Mapping) else {}


def is_header(parameter: Mapping[str, Any], name: str) -> bool:
    """*parameter* is the header *name*."""
    return parameter.get("in") == "header" and str(parameter.get("name")).lower() == name.lower()


def _add_header(operation: dict[str, Any], policy: Policy, document: Mapping[str, Any]) -> None:
    parameters = operation.setdefault("parameters", [])
    for place, given in enumerate(parameters):
        parameter = resolved(document, given)
        if is_header(parameter, policy.key_header):  # the application reads it, too
            required = policy.required or parameter.get("required", False)
            parameters[place] = {**parameter, "required": required}
            return
    parameters.append(
        {
            "name": policy.key_header,
            "in": "header",
            "required": policy.required,
            "description": _DESCRIPTION + ("" if policy.required else _WITHOUT_KEY),
            "schema": {"type": "string", "minLength": 1, "maxLength": policy.key_chars_max},
        }
    )


def _codes_by_status(policy: Policy) -> dict[int, list[Code]]:
    """The refusals that this policy allows."""
    is_possible: dict[Code, bool] = {
        "key-missing": policy.required,
        "key-expired": policy.on_expired == "refuse",
        "too-many-keys": policy.live_keys_max is not None,
        "too-many-attempts": policy.attempts_max is not None,
        "caller-refused": False,  # the application documents its own authentication
    }
    chosen: dict[Code, int] = {
        "key-reused": policy.mismatch,
        "key-expired": policy.expired_status,
    }
    statuses: dict[int, list[Code]] = {}
    for code, kind in KINDS.items():
        if is_possible.get(code, True):
            statuses.setdefault(chosen.get(code, kind.status), []).append(code)
    return statuses


def _add_refusal(
    responses: dict[str, Any], status: int, codes: list[Code], reference: dict[str, str]
) -> None:
    """Add one status; what the application says about the same status stays."""
    response = responses.setdefault(str(status), {})
    if "$ref" in response:  # shared with other operations
        return
    texts = [f"`{code}`: {KINDS[code].title}" for code in codes]
    own = [response["description"]] if response.get("description") else []
    response["description"] = ". ".join([*own, *texts])
    if any(KINDS[code].retry_after_s is not None for code in codes):
        response.setdefault("headers", {}).setdefault(
            "Retry-After", {"description": "In seconds.", "schema": {"type": "integer"}}
        )
    media = response.setdefault("content", {}).setdefault(PROBLEM_TYPE, {})
    media["schema"] = {"oneOf": [media["schema"], reference]} if "schema" in media else reference
