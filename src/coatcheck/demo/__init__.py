"""The demo: the same orders on a bad network, without keys and with coatcheck.

In reading order: `command` is what `coatcheck demo` runs; `story` sends the orders twice; `client`
draws the orders, sends them and retries; `servers` are the shop and the payment provider, which
`processes` starts, kills and stops; `report` counts and prints.
"""
