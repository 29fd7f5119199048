"""The simulation: long random schedules of the whole protocol, each made from one number.

`tests/explore` visits every state of small worlds; this walks at random through large ones. It runs
production's engine: its attempts, heartbeat, steps and recovery.

    world          virtual time and a scheduler
    process        a machine with a clock of its own, and an engine on it
    engine         production's engine, with its I/O in virtual time
    runner         performs the effects of production's flows
    served         a request in a process, from `begin` to `complete` or `fail`
    store          a store whose messages are lost, late or doubled, and which fails and comes back
    transactions   connections for transaction mode, on the `database`
    handlers       what applications do: with steps (`stepping`), deferring (`deferred_work`), or
                   as a saga (`booking`)
    downstream     what handlers change outside of the system, counted
    operators      decide what is in doubt
    faults         what goes wrong, and how often
    schedule       draws all of it from a seed
    rules          the promises, with `progress_rules`
    runs, trace    many schedules; one of them with everything that happened
"""
