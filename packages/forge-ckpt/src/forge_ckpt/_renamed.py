"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_ckpt._shared.renamed import OldModules, read_renamed

#: Module of 0.1 -> module of today, below the package and in full.
_MODULES = {
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
}
MODULES = {f"forge_ckpt.{old}": f"forge_ckpt.{new}" for old, new in _MODULES.items()}
#: Module -> {name of 0.1: name of today, there or in another module}.
NAMES = {
    "forge_ckpt.codec": {"DEFAULT": "DEFAULT_DIGEST", "NAMES": "DIGESTS"},
    "forge_ckpt.directories": {"NAME": "LOCK"},
}
OLD_MODULES = OldModules(MODULES)


def renamed(owner: str, level: int = 2) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that reads its old names, with a DeprecationWarning."""
    return read_renamed(NAMES, owner, level)
