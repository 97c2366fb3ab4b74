"""Importing forge_moe loads torch, the standard library and itself."""

import importlib

import pytest

import forge_moe
from forge_moe import _renamed
from forge_testing.fresh import modules_loaded_by, packages_of

pytestmark = pytest.mark.lane("test")


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_nothing_beyond_torch_is_loaded() -> None:
    loaded = modules_loaded_by("forge_moe", after="torch")
    assert {"forge_moe"} <= packages_of(loaded) <= {"forge_moe", "torch"}
    assert sum(name.startswith("torch") for name in loaded) < 20  # not the compiler, not DTensor


def test_public_names_exist_are_few_and_documented() -> None:
    assert len(forge_moe.__all__) <= 30
    assert len(set(forge_moe.__all__)) == len(forge_moe.__all__)
    for name in forge_moe.__all__:
        assert getattr(forge_moe, name).__doc__, name


def test_old_modules_and_names_are_found_with_a_warning() -> None:
    for old, new in _renamed.MODULES.items():
        module, found = (importlib.import_module(f"forge_moe.{name}") for name in (old, new))
        name = next(n for n, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__)  # fmt: skip
        with pytest.warns(DeprecationWarning, match=f"forge_moe.{new}.{name}"):
            assert getattr(module, name) is getattr(found, name)
    with pytest.warns(DeprecationWarning, match="RoutingResult"):
        assert forge_moe.Routed is forge_moe.RoutingResult
    assert not hasattr(forge_moe, "nothing")
    assert not hasattr(importlib.import_module("forge_moe.routers"), "nothing")
