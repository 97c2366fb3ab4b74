"""Names of 0.1 by their old modules, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

#: Names of forge_train that are forge_lab's now.
OF_LAB = ("evaluate_run", "extract_run", "read_study", "replay_step")
#: Old modules whose names are not in the same place of forge_lab.
MODULES = {"forge_train.trainer.callbacks": "forge_train"}


def moved(owner: str, name: str, stacklevel: int = 2) -> Any:
    """Return a name of `owner` from its new module. ImportError where that is in forge-lab, which is not installed."""
    if name.startswith("__"):  # asked by the import system
        raise AttributeError(name)
    place = MODULES.get(owner) or owner.replace("forge_train", "forge_lab")
    try:
        importlib.import_module(place.partition(".")[0])
    except ModuleNotFoundError as error:
        text = f"{owner}.{name} is {place}.{name} now; pip install forge-lab"
        raise ImportError(text, name="forge_lab") from error
    # before the warning: an import may change the filters, and Python would show it again
    found = getattr(importlib.import_module(place), name)
    warnings.warn(f"{owner}.{name} is {place}.{name} now", DeprecationWarning, stacklevel)
    return found


def names_of(owner: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of an old module."""
    return partial(moved, owner)  # a partial has no frame: 2 is the importing module
