"""`python -m coatcheck`: the same as the command `coatcheck`."""

import sys

from coatcheck.cli import main

sys.exit(main())
