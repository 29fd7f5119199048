"""The explorer: every interleaving of a few clients with one key, on the production flow.

`places` follows one client through `lifecycle`; `kinds` are the kinds of clients; `world` is a
store, a clock, the clients and everything that can happen next; `rules` are the promises, checked
at every step; `search` visits every state and counts. `test_explore` explores, and `test_mutants`
breaks the flow on purpose, to prove that the explorer notices it. `transactions` is the world of
transaction mode. `middle` is the world of steps, deferred work and operators, with `parties` and
`middle_rules`.
"""
