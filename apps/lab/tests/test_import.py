"""The package imports, and brings along nothing that it does not declare."""

import subprocess
import sys

import pytest

PROBE = (
    "import sys; before = set(sys.modules); import forge_lab; print(*(set(sys.modules) - before))"
)


@pytest.mark.lane("test")
def test_importing_it_loads_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "forge_lab" in loaded
    assert loaded - sys.stdlib_module_names <= {"forge_lab", "forge_train"}
