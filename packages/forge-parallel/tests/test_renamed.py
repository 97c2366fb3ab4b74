"""Names of 0.1 work until 0.3.0, with a warning."""

from __future__ import annotations

import importlib

import pytest

from forge_parallel import ParallelConfig, _renamed
from forge_parallel.pipeline import Pipeline

pytestmark = pytest.mark.lane("test")


def test_old_modules_and_names_are_aliases_of_the_new() -> None:
    for old, new in _renamed.MODULES.items():
        with pytest.warns(DeprecationWarning, match=f"forge_parallel.{new} now"):
            module = importlib.import_module(f"forge_parallel.{old}")
        target = importlib.import_module(f"forge_parallel.{new}")
        for name in target.__all__ if hasattr(target, "__all__") else ():
            assert getattr(module, name) is getattr(target, name), (old, name)
    for old, new in _renamed.NAMES.items():
        owner, _, name = new.rpartition(".")
        with pytest.warns(DeprecationWarning, match=new):
            found = _renamed.renamed("forge_parallel", old)
        assert found is getattr(importlib.import_module(f"forge_parallel.{owner}"), name)


def test_old_keywords_are_taken_and_unknown_names_are_not() -> None:
    missing = pytest.raises(TypeError, match="num_micro_batches")
    with pytest.warns(DeprecationWarning, match="full_tokens="), missing:
        Pipeline(None, ParallelConfig(), None, whole_tokens=True)  # type: ignore[call-arg,arg-type]
    with pytest.raises(AttributeError, match=r"forge_parallel.*'no_name'"):
        _renamed.renamed("forge_parallel", "no_name")
