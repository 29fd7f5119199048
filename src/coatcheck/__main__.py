"""The command `coatcheck`, and `python -m coatcheck`.

The command line needs the extra `cli`; of a bare install only the demo runs.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run one command and return its exit code."""
    try:
        from coatcheck.cli import main as run  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        if sys.argv[1:2] == ["demo"]:
            from coatcheck.demo.__main__ import main as demo  # noqa: PLC0415 - only then

            return demo(sys.argv[2:])
        sys.stderr.write(
            "coatcheck: only the command demo runs without click and rich; "
            "for the others: pip install 'coatcheck[cli]'\n"
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
