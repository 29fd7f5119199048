"""The core: every decision, and no I/O, no clock, no randomness; only the standard library.

In the order of a request: `flow` separates decisions from I/O; `key`, `identity` and `fingerprint`
read the request; `record` is what a store keeps; `response`, `keep` and `problem` make the answer;
`policy` has every setting. Start reading at `lifecycle`, the flow of a guarded request.
"""
