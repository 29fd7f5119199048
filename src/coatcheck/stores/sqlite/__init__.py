"""The SQLite store. Start reading at `store`.

- `store`: the seven methods of a store.
- `url`: parses `sqlite:///path?option=value`.
- `statements`: the SQL, and how a record becomes a row.
- `connection`: one connection per purpose, a lock around each, closed before a fork.
- `schema`: creates and migrates the tables.
- `errors`: what SQLite's error codes mean.
- `doctor`: the checks of `coatcheck doctor`.
- `transaction`: the statements for records in the application's own transaction.
"""
