"""The package imports, and brings along nothing that it does not declare."""

import pytest

from forge_testing.fresh import modules_loaded_by, packages_of


@pytest.mark.lane("test")
def test_importing_it_loads_no_torch():
    assert (
        "forge_lab" in packages_of(modules_loaded_by("forge_lab")) <= {"forge_lab", "forge_train"}
    )
