"""Callers: the user whom Django, or a view of the Django REST framework (DRF), has authenticated.

DRF authenticates within the view. A replay comes before the view, so the authenticators of the view
run first: credentials that they refuse get their refusal, and no stored response.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.utils.functional import SimpleLazyObject

from coatcheck.server.callers import Refused, client_certificate, credential
from coatcheck.server.django.exchange import REQUEST, NativeRequest, give_body
from coatcheck.server.django.routes import resolved
from coatcheck.server.request import Request


def user_of_request(request: Request) -> str | None:
    """
    The authenticated user; None: the credentials or the session of the request are the caller.

    The credentials of the request are a part of the caller, too, unless DRF has verified them: then
    a refreshed token is the same caller. So is the host if a middleware chooses the URLs by it.
    """
    native: NativeRequest = request.native[REQUEST]
    view = drf_view_of(native)
    if view is None:
        parts = [_text_of(getattr(native, "user", None)), credential(request)]
    else:
        give_body(native, request.body)  # an authenticator may read it
        text = _text_of(_authenticated(native, *view))
        parts = [text, None if text else credential(request)]
    return _joined(request, native, parts)


async def user_of_request_async(request: Request) -> str | None:
    """The same on an event loop; the user may have to be read from the database."""
    native: NativeRequest = request.native[REQUEST]
    user = getattr(native, "user", None)
    if drf_view_of(native) is not None or isinstance(user, SimpleLazyObject):
        return await sync_to_async(user_of_request, thread_sensitive=True)(request)
    return _joined(request, native, [_text_of(user), credential(request)])


def _joined(request: Request, native: NativeRequest, parts: list[str | None]) -> str | None:
    has_user = parts[0] is not None
    parts.append(client_certificate(request))
    if hasattr(native, "urlconf") or hasattr(native, "tenant"):  # another site for each host
        parts.append(f"host {request.header(b'host').decode('latin-1').lower()}")
        if not has_user:
            parts.append(native.COOKIES.get(settings.SESSION_COOKIE_NAME))
    elif not has_user:
        return None
    return "\n".join(part for part in parts if part)


def _text_of(user: Any) -> str | None:  # noqa: ANN401 - of whichever model or library
    if user is None or not getattr(user, "is_authenticated", False):
        return None
    for name in ("pk", "id", "username"):
        value = getattr(user, name, None)
        if value is not None:
            return f"user {name} {value}"
    return None


# --- the Django REST framework ---------------------------------------------------------------


def drf_view_of(native: NativeRequest) -> tuple[Any, Any] | None:
    """The view of DRF that *native* will reach, and what the resolver found; None: it is none."""
    found = resolved(native)
    view_class: Any = getattr(getattr(found, "func", None), "cls", None)
    if found is None or not hasattr(view_class, "perform_authentication"):
        return None
    return view_class(**getattr(found.func, "initkwargs", {})), found


def _authenticated(native: NativeRequest, view: Any, found: Any) -> Any:  # noqa: ANN401 - of DRF
    """The user that the authenticators of *view* find; raises `Refused` if they refuse."""
    view.args, view.kwargs = found.args, found.kwargs
    view.action_map = getattr(found.func, "actions", None)
    view.request = request = view.initialize_request(native, *found.args, **found.kwargs)
    view.headers = {}
    view.format_kwarg = None
    try:
        view.perform_authentication(request)
    except Exception as error:
        if not hasattr(error, "status_code"):  # no `APIException`, but a mistake
            raise
        response = view.handle_exception(error)
        response = view.finalize_response(request, response, *found.args, **found.kwargs)
        response.render()
        raise Refused(
            response.status_code, headers=list(response.items()), body=response.content
        ) from error
    return request.user
