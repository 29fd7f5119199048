"""The demo: duplicate charges, and how they disappear.

In the order in which it is told: `command` is what `coatcheck demo` runs; `story` tells it; `fates`
draws what befalls each order; `processes` starts, kills and stops the two servers, `shop` and
`provider`, which are `serving` on loopback ports of their own; `client` sends the orders over
`wire` until each is answered; `tally` counts; `display` shows.
"""
