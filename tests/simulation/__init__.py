"""The simulation: long random schedules of the whole protocol, each made from one number.

The complement of `tests/explore`: that visits every state of small worlds, this one walks at
random through large ones. It runs production's engine: `engine` has its attempts, heartbeat, steps
and recovery, and `runner` performs the effects of their flows in virtual time. `world` is that time
and a scheduler; `store` a store whose messages are lost, late or doubled, and which goes away and
comes back; `process` a machine with a clock of its own and an engine on it; `driver` a door, from
begin to complete or fail; `transactions` the connections of transaction mode, on the `database`.
`handlers` is what applications do, and `downstream` the ledger outside that counts their effects:
`stepping` are handlers with steps, `long_work` those that defer to a queue; `people` decide what is
in doubt. `weather` is what goes wrong, `schedule` draws all of it from a seed, and `rules` are the
promises, those of the `middle` among them. `__main__` runs as many as you like, and shows one with
everything that happened (`trace`).
"""
