"""Programs that use some packages of Forge in loops of other libraries: `only` keeps the other packages out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Only(MetaPathFinder):
    """Import finder: an error for every package of Forge that is not in `packages`."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package.startswith("forge_") and package not in self.packages:
            rule = f"{package} is not one of {', '.join(self.packages)}"
            raise ModuleNotFoundError(rule, name=package)
        return None


def only(*packages: str) -> None:
    """Reject imports of all packages of Forge but these, in this process, before the first of them is imported.

    only("forge_ckpt")
    """
    others = {name.partition(".")[0] for name in sys.modules} - {*packages}
    found = sorted(name for name in others if name.startswith("forge_"))
    assert not found, f"imported already: {found}"
    sys.meta_path.insert(0, Only(packages))
