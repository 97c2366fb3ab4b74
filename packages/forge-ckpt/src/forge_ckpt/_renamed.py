"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Module of 0.1 -> module of today.
MODULES = {
    f"forge_ckpt.{old}": f"forge_ckpt.{new}"
    for old, new in {
        "commands": "cli",
        "dcp.listing": "dcp.convert",
        "dcp.payload": "dcp.convert",
        "digests": "codec",
        "foreign": "directories",
        "hf.folder": "_shared.safetensors_folder",
        "hf.headers": "_shared.safetensors_headers",
        "hf.rows": "_shared.name_rows",
        "hf.stream": "_shared.name_maps",
        "hf.store": "hf.load",
        "lock": "directories",
        "objects": "codec",
        "read.arena": "read.memory",
        "read.shared_memory": "read.memory",
        "read.targets": "read.planner",
        "tree": "codec",
        "verbs.show": "verbs.look",
        "wrapped": "codec",
        "write.deduplicate": "write.planner",
        "write.layout": "write.planner",
        "write.plan_json": "write.planner",
        "write.retain": "retention",
        "write.stream": "write.writer",
    }.items()
}
#: Module -> {name of 0.1: name of today, there or in another module}.
NAMES = {
    "forge_ckpt.codec": {"DEFAULT": "DEFAULT_DIGEST", "NAMES": "DIGESTS"},
    "forge_ckpt.directories": {"NAME": "LOCK"},
}


class OldModules:
    """Import finder and loader: a module path of 0.1 is the module of today, with a DeprecationWarning."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, OldModules) if name in MODULES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        new = MODULES[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        # the import system returns what is here afterwards
        sys.modules[module.__name__] = importlib.import_module(new)


def renamed(owner: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that reads its old names, with a DeprecationWarning."""

    def read(name: str) -> Any:
        new = NAMES[owner].get(name)
        if new is None:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        module, _, attribute = f"{owner}:{new}".rpartition(":")
        module = module.rpartition(":")[2]
        text = f"{owner}.{name} is {module}.{attribute} now"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), attribute)

    return read
