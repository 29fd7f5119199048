"""Tools that test a guarded application.

`crash` kills or stops its process at a named point, so that you can see how it recovers.
"""

from coatcheck.verify import crash

__all__ = ["crash"]
