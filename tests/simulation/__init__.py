"""The simulation: long random schedules of the whole protocol, each made from one number.

The complement of `tests/explore`: that visits every state of small worlds, this one walks at
random through large ones. `world` is virtual time and a scheduler; `store` a store whose messages
are lost, late or doubled, and which goes away and comes back; `process` a process with a clock of
its own that does what the engines do with the production flows, `driver` and `transactions` the
parts of it that perform effects, on the `database` of transaction mode; `handlers` what
applications do, and `downstream` the ledger outside that counts their effects. What has a middle:
`stepping` are handlers with steps and `long_work` those that hand over to a queue, with production's
own `hands`; `people` decide what is in doubt. `weather` is what goes wrong, `schedule` draws all of
it from a seed, and `rules` are the promises, those of the `middle` among them. `__main__` runs as
many as you like, and shows one with everything that happened (`trace`).
"""
