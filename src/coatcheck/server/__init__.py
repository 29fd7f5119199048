"""Servers: how requests come in.

`asgi` and `wsgi` are the adapters. `request` and `body` are what comes, `callers` says whose it is,
`counter` makes a ticket of it, `answers` what goes back, `status` where a client asks after a 202.
`routes` finds a route's own policy; `fastapi` and `starlette` speak their frameworks' idiom.
"""
