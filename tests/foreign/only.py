"""Run a program in which all packages of Forge but some cannot be imported: only.py forge_ckpt,forge_core PROGRAM ..."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Only(MetaPathFinder):
    """Import finder: an error for every package of Forge that is not in `packages`."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package.startswith("forge_") and package not in self.packages:
            rule = f"{package} is not one of {', '.join(self.packages)}"
            raise ModuleNotFoundError(rule, name=package)
        return None


if __name__ == "__main__":
    _, packages, *sys.argv = sys.argv
    sys.meta_path.insert(0, Only(packages.split(",")))
    runpy.run_path(sys.argv[0], run_name="__main__")
