"""The core: pure. No I/O, no clock, no randomness, nothing but the standard library.

In the order of the path: `flow` is the seam between deciding and doing; `key`, `scope` and
`fingerprint` (with `canonical`, and `call` for functions) read a request; `record` is what is
kept of it; `replay` and `problem` are what is answered; `policy` is every knob; `serve` is the
flow of a guarded request, where reading starts.
"""
