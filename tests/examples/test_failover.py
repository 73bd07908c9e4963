"""The example that README shows runs after `make serve`, without developers' packages."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = "import sys; sys.modules['httpx'] = None; import examples.failover.__main__ as example; print(example.LOST)"


def test_the_failover_example_needs_no_package_of_developers() -> None:
    shown = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "RemoteProtocolError" in shown.stdout
