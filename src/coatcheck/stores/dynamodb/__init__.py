"""
The DynamoDB store: one item per record.

In reading order: `store` (the entry), `url`, `requests` (conditional writes and consistent reads),
`records` (how a record becomes an item), `client` (botocore, and the threads that send a batch),
`errors` and `schema`, which also has the checks of the doctor.
"""
