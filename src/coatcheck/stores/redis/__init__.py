"""
The Redis store: each record under a key of its own.

In reading order: `store` (the entry), `url`, `swap` (flows), `records`, `client` (threads),
`async_backend` (event loops), `cluster`, `errors`, `safety` and `doctor`.
"""
