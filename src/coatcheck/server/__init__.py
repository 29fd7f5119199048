"""HTTP middlewares.

`asgi` and `wsgi` read requests, `guard` makes claims of them, `keys` has keys for clients that send
none, `responses` what is sent back, `polling` what a client gets after a 202, `openapi` what a
document states of all this. `fastapi`, `starlette`, `flask` and `litestar` are for frameworks.
"""
