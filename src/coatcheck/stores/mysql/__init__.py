"""
The MySQL store: records in a table of a MySQL or MariaDB database.

In reading order: `store` (the entry), `url`, `connection`, `swap`, `statements`, `errors`,
`schema`, `doctor`, and `transaction` for records in the application's own transaction.
"""
