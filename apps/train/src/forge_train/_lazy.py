"""Public names that are imported at first use.

A typo in a TOML file is answered without waiting for torch's checkpoint and distributed packages, which take longer to
import than the check takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def import_later(owner: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of the module `owner`; `names` are those of each module of forge_train, between blanks."""
    home = {name: module for module, listed in names.items() for name in listed.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"forge_train.{home[name]}"), name)

    return get
