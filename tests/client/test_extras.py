"""A client whose library is not installed names the command that installs it."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[{name!r}] = None
import coatcheck.client
try:
    import coatcheck.client.{name}
except coatcheck.MissingExtra as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["httpx2", "httpx", "requests", "aiohttp"])
def test_a_client_without_its_library_names_the_extra(name):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{name} is not installed; run: pip install 'coatcheck[{name}]'\n"
