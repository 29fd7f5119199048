"""HTTP middlewares.

`asgi` and `wsgi` read requests, `guard` makes claims of them, `responses` has what is sent back,
`polling` what a client gets after a 202, `openapi` what a document states of all this.
"""
