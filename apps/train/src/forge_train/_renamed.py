"""Public names by their places in 0.1, for one version: they go in 0.3.0."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

#: Names of forge_train, and modules, that are forge_lab's now; each keeps its name there.
OF_LAB = ("evaluate_run", "extract_run", "read_study", "replay_step")


def moved(owner: str, name: str) -> Any:
    """A name of `owner` from the same place in forge_lab. ImportError where forge-lab is not installed."""
    if name.startswith("__"):  # asked by the import system
        raise AttributeError(name)
    place = owner.replace("forge_train", "forge_lab")
    try:
        importlib.import_module("forge_lab")
    except ModuleNotFoundError as error:
        text = f"{owner}.{name} is {place}.{name} now; pip install forge-lab"
        raise ImportError(text, name="forge_lab") from error
    warnings.warn(f"{owner}.{name} is {place}.{name} now", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(place), name)
