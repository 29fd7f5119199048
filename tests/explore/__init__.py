"""The explorer: every interleaving of a few clients with one key, on the production flow.

`places` follows one client through `core.lifecycle.lifecycle`; `kinds` are the clients there are; `world`
is a store, a clock, the clients and everything that can happen next; `rules` are the promises,
checked at every step; `search` visits every state and counts. `test_explore` explores, and
`test_mutants` proves that the explorer sees what it should see, by breaking the flow on purpose.
`ledger` is the world of transactions. `middle` is the world of what happens in the middle of an
operation, with `errands` for who takes part in it and `middle_rules` for what is promised.
"""
