"""The admin's page of operations: search by reference or key, read-only, without any body."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse

from coatcheck.core.describe import advice_of, age_of, lines_of, state_of
from coatcheck.core.key import redacted, reference_of
from coatcheck.core.record import Record
from coatcheck.engine.attempts import OUTAGES
from coatcheck.engine.resolution import find_operations
from coatcheck.server.django.models import Operation
from coatcheck.server.django.site import get_engine
from coatcheck.stores import Query

# As many as `coatcheck list` shows.
_LIMIT = 50


@admin.register(Operation)
class OperationAdmin(admin.ModelAdmin):
    """Shows the operations of the project's store."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        """No user may: requests make operations."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """The page is read-only; `manage.py coatcheck resolve` settles an operation."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        """As above."""
        del request, obj
        return False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """List the newest operations, or those that a reference or a key names."""
        return self._page(request, str(request.GET.get("q", "")).strip(), extra_context)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> TemplateResponse:
        """Show one operation, as its reference finds it."""
        del form_url
        return self._page(request, object_id, extra_context)

    def _page(
        self, request: HttpRequest, text: str, extra_context: dict[str, Any] | None
    ) -> TemplateResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        records, now_ms, failure = _found(text)
        context = {
            **self.admin_site.each_context(request),
            "title": "Operations",
            "opts": self.model._meta,
            "text": text,
            "failure": failure,
            "is_one": bool(text),
            "rows": [_row_of(record, now_ms) for record in records],
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/coatcheck/operations.html", context)


def _found(text: str) -> tuple[list[Record], int, str]:
    """The records that *text* names, the store's time, and why there are none."""
    engine = get_engine()
    try:
        if text:
            records = find_operations(engine.store, text)
        else:
            records = list(engine.store.find(Query(newest_first=True, limit=_LIMIT)).records)
        return records, engine.store.now_ms(), ""
    except OUTAGES as error:
        return [], 0, str(error)


def _row_of(record: Record, now_ms: int) -> dict[str, Any]:
    advice = advice_of(record, now_ms)
    return {
        "reference": reference_of(record.id),
        "state": state_of(record, now_ms),
        "created": age_of(record.created_ms, now_ms),
        "attempt": record.attempt,
        "key": redacted(record.key),
        "label": record.label,
        "lines": list(lines_of(record, now_ms)),
        "advice": advice.words,
        "commands": advice.commands,
    }
