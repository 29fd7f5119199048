"""The core: pure. No I/O, no clock, no randomness, nothing but the standard library.

In the order of the path: `flow` separates deciding from doing; `key`, `identity` and `fingerprint`
read a request; `record` is what is stored of it; `response`, `keep` and `problem` are what is
answered; `policy` has every setting; `lifecycle` is the flow of a guarded request, where reading
starts.
"""
