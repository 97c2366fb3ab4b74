"""The package imports, and brings along nothing that it does not declare."""

import pytest

from forge_testing.fresh import modules_loaded_by, packages_of

DECLARED = {"forge_vlm", "forge_core", "torch"}


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_importing_it_loads_only_what_it_declares():
    assert "forge_vlm" in packages_of(modules_loaded_by("forge_vlm", after="torch")) <= DECLARED
