"""How fast, beside a peer and the bare floor.

One file for each question (`memory`, `sqlite`, `postgres`, `redis`, `latency`, `http`, `flatness`,
`waiting`, `size` and others); each makes contenders, lets `measuring` run them in turn, and gives rows to `report`. A new
store is another file with contenders and one line in `questions`. Invariant: every figure that is
printed was measured in the run that prints it, and every verdict is computed from it.
"""
