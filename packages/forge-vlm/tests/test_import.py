"""The package imports, and brings along nothing that it does not declare."""

import importlib
import sys

import pytest

from forge_testing.fresh import modules_loaded_by, packages_of

DECLARED = {"forge_vlm", "forge_core", "torch"}


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_importing_it_loads_only_what_it_declares():
    assert "forge_vlm" in packages_of(modules_loaded_by("forge_vlm", after="torch")) <= DECLARED


def test_data_without_numpy_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("forge_vlm.data")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ModuleNotFoundError, match=r"forge-vlm\[data\]") as raised:
        importlib.import_module("forge_vlm.data")
    assert raised.value.name == "numpy"
