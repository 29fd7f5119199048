"""OpenAPI: the document of drf-spectacular states the header and the refusals of guarded views.

SPECTACULAR_SETTINGS = {
"POSTPROCESSING_HOOKS": [
"drf_spectacular.hooks.postprocess_schema_enums",
"coatcheck.server.django.openapi.state_guarded_views",
],
}
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from coatcheck.core.policy import SAFE_METHODS, Policy, changed
from coatcheck.errors import Misconfigured
from coatcheck.server.django.routes import mark_of_view
from coatcheck.server.django.settings import read_settings
from coatcheck.server.openapi import annotate
from coatcheck.server.routes import policy_of_mark


def state_guarded_views(
    result: dict[str, Any],
    generator: Any,  # noqa: ANN401 - of drf-spectacular
    **_: object,
) -> dict[str, Any]:
    """Add the header with the key and the refusals to every guarded operation of *result*."""
    configuration = read_settings()
    policy: Policy = configuration.engine["policy"]
    changes = {"required": False} if "key" in configuration.middleware else {}
    guarded: dict[tuple[str, str], Policy] = {}
    for path, _regex, method, view in generator.endpoints:
        own = None if method in SAFE_METHODS else _policy_of(policy, method, view)
        if own is not None:
            guarded[_path_in(result, path), method] = changed(own, changes)
    return annotate(result, guarded)


def _policy_of(policy: Policy, method: str, view: object) -> Policy | None:
    """The policy that guards *method* of a *view*; None: it is not guarded."""
    mark = mark_of_view(view, method)
    with suppress(Misconfigured):  # reported by `manage.py check`
        own = policy if mark is None else policy_of_mark(policy, method, mark)
        return own if method in own.methods and own.mode != "observe" else None
    return None


def _path_in(result: dict[str, Any], path: str) -> str:
    """The path in the document; drf-spectacular may have named its parameters after fields."""
    paths = result.get("paths", {})
    if path in paths:
        return path
    shape = _shape_of(path)
    alike = [known for known in paths if shape.endswith(_shape_of(known))]
    return max(alike, key=lambda known: len(_shape_of(known)), default=path)


def _shape_of(path: str) -> str:
    """*path* without the names of its parameters."""
    return "/".join("{}" if part.startswith("{") else part for part in path.split("/"))
