"""The laws of HTTP: what every adapter must keep, written once.

`shop` is the application behind the middleware, scripted by the tests, in both flavours; `api` sends
requests to it through the ASGI or the WSGI middleware as a server would, `frameworks` and
`django_api` through the test client of each framework, and `hosts` through real servers. The laws
are the `test_*` modules: each takes an `api`, and runs over every adapter on a store in memory. A
law whose promise depends on what a store keeps is marked `persists`, and runs on SQLite as well. One
that a server could break is marked `served`, and runs behind every server as well. `app` is the same
shop for servers in processes of their own.
"""
