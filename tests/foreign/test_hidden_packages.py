"""The loops of this folder see no other package of Forge."""

import pytest

pytestmark = [pytest.mark.lane("test"), pytest.mark.uses("forge_moe")]


def test_other_packages_cannot_be_imported() -> None:
    import forge_moe

    assert forge_moe.MoE is not None
    for name in ("forge_core", "forge_parallel", "forge_testing"):
        with pytest.raises(ModuleNotFoundError, match=name):
            __import__(name)
