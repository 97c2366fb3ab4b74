"""Importing forge_core loads torch, the standard library and itself."""

import subprocess
import sys

import pytest

from forge_testing.fresh import modules_loaded_by, packages_of

pytestmark = pytest.mark.lane("test")


@pytest.mark.slow
def test_nothing_beyond_torch_is_loaded() -> None:
    loaded = modules_loaded_by("forge_core", after="torch")
    assert packages_of(loaded) == {"forge_core", "torch"}
    assert sum(name.startswith("torch") for name in loaded) < 20  # not the compiler, not DTensor


def test_public_names_exist_and_are_few() -> None:
    import forge_core

    assert len(forge_core.__all__) <= 40
    assert len(set(forge_core.__all__)) == len(forge_core.__all__)
    assert all(getattr(forge_core, name).__doc__ for name in forge_core.__all__)


def test_dir_shows_names_that_are_imported_at_first_use() -> None:
    code = """
import sys
import forge_core
lazy = {"forge_core.interp", "forge_core.lora", "forge_core.scaling"}
assert set(forge_core.__all__) <= set(dir(forge_core))
assert not lazy & set(sys.modules), lazy & set(sys.modules)
from forge_core import AdamW, Muon, lora
assert lora.__name__ == "forge_core.lora"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
