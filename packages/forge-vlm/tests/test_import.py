"""The package imports, and brings along nothing that it does not declare."""

import importlib
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


def test_data_without_numpy_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("forge_vlm.data")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ModuleNotFoundError, match=r"forge-vlm\[data\]") as raised:
        importlib.import_module("forge_vlm.data")
    assert raised.value.name == "numpy"
