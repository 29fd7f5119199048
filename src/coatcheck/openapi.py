"""OpenAPI documents of any framework: which header a guarded operation takes, and its refusals.

annotate(document, {("/orders", "POST"): Policy(required=True)})

FastAPI and Litestar call it by themselves.
"""

from coatcheck.server.openapi import annotate

__all__ = ["annotate"]
