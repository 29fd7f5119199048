"""Verify: what puts a guarded application to the test.

`crash` kills or freezes it at a named point, so that you can see what your own recovery does.
"""

from coatcheck.verify import crash

__all__ = ["crash"]
