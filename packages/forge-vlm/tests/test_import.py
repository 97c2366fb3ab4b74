"""The package imports, and brings along nothing that it does not declare."""

import subprocess
import sys

import pytest

DECLARED = {"forge_vlm", "forge_core", "torch"}
PROBE = (
    "import sys, torch; before = set(sys.modules); import forge_vlm; "
    "print(*(set(sys.modules) - before))"
)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_importing_it_loads_only_what_it_declares():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "forge_vlm" in loaded
    assert loaded - sys.stdlib_module_names <= DECLARED
