"""The DynamoDB store. Start reading at `store`.

- `store`: the seven methods of a store.
- `url`: parses `dynamodb://table?option=value`.
- `requests`: conditional writes and consistent reads, and what their answers mean.
- `items`: how a record becomes an item, and the expressions for conditions and scans.
- `client`: the botocore client, its settings, and the threads that send a batch.
- `errors`: what a failed request means, and whether it may have written.
- `table`: creates and checks the table; the checks of `coatcheck doctor`.
"""
