"""The laws: what every store must keep, written once for sync and async.

`effects` says what a law may ask of a store and registers laws; `kinds` lists the stores, each
with what it declares; `drivers` perform effects on a blocking store, on an async one, and through
the batcher; `records` makes records to write. Then the laws, one module for each part of the
contract: `swaps`, `batches`, `reads`, `sweeps`, `contention`, `lifetimes`.
`test_laws` runs all laws on all stores, `test_histories` compares random histories with a model,
`test_processes` does what takes more than one process.
"""
