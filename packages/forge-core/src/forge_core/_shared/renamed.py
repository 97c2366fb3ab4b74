# Copied from scripts/shared/renamed.py; edit that file, then run scripts/copy_shared.py.
"""Old module paths and old names of a package: each read gives the one of today, with a DeprecationWarning.

sys.meta_path.insert(0, OldModules({"forge_x.old": "forge_x.new"}))
__getattr__ = read_renamed({"forge_x.a": {"Old": "New", "moved": "forge_x.b:moved"}}, __name__)
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any


class OldModules:
    """Import finder and loader: an old module path is the module of today."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.modules else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = self.modules[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        # the import system returns what is here afterwards
        sys.modules[module.__name__] = importlib.import_module(new)


def read_renamed(
    names: Mapping[str, Mapping[str, str]], owner: str, level: int = 2
) -> Callable[[str], Any]:
    """Return the `__getattr__` of module `owner`, which reads the old names of `names[owner]`.

    A new name is an attribute of the owner, or of another module as `module:attribute`. The warning is for the line
    that is `level` calls above.
    """

    def read(name: str) -> Any:
        new = names[owner].get(name)
        if new is None:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        module, _, attribute = f"{owner}:{new}".rpartition(":")
        module = module.rpartition(":")[2]
        text = f"{owner}.{name} is {module}.{attribute} now"
        warnings.warn(text, DeprecationWarning, stacklevel=level)
        return attrgetter(attribute)(importlib.import_module(module))

    return read
