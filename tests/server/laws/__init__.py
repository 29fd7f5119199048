"""The laws of HTTP: what every adapter must keep, written once.

`shop` is the application behind the middleware, scripted by the tests, in both flavours; `api` sends
requests to it through the ASGI or the WSGI middleware as a server would; `doubles` are stores that
fail on purpose. The laws are the `test_*` modules: each takes an `api`, and runs over every
adapter and on every store. `app` is the same idea as a small application for real servers.
"""
