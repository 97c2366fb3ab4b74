"""Module paths and names of 0.1 are read, with a warning."""

import importlib
import sys

import pytest

from forge_core._renamed import MODULES, NAMES

pytestmark = pytest.mark.lane("test")


@pytest.mark.parametrize("old", MODULES)
def test_an_old_module_is_the_new_one(old: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=MODULES[old]):
        assert importlib.import_module(old) is importlib.import_module(MODULES[old])


@pytest.mark.parametrize("owner", NAMES)
def test_old_names_are_read_and_unknown_ones_are_not(owner: str) -> None:
    module = importlib.import_module(owner)
    for name in NAMES[owner]:
        with pytest.warns(DeprecationWarning, match=name):
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
