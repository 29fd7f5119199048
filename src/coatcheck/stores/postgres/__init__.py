"""The PostgreSQL store.

Start at `store`. A swap goes through `swap` (the algorithm) and `statements` (the SQL and the
rows), and is executed by `connection` (psycopg, for threads) or `async_backend` (asyncpg, for
event loops). `errors` says what their errors mean. `url`, `schema` and `doctor` open, migrate and
check a store; `transaction` is for transactions of the application.
"""
