"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Old name -> new name.
NAMES = {
    "ReceivedRows": "Permutation",
    "Routed": "RoutingResult",
    "Rule": "RoutingRule",
    "TwoSplits": "NodeSplits",
    "choose_products": "choose_backend",
    "row_limit": "expert_capacity",
}
# New modules: the old ones whose names they have now.
_MOVED = """
    router: capacity routers routers.registry routers.router routers.rules routers.select
    experts: gemm gemm.activations gemm.feed_forward sorted_experts
    grouped_mm: gemm.backends gemm.choose gemm.custom_ops gemm.float8 gemm.groups
    dispatch.all_to_all: dispatch.chunked dispatch.hierarchical
    dispatch.local: dispatch.received_rows
    load_balancing: balance balance.attach balance.bias balance.counters
    load_balancing: balance.losses balance.scopes balance.sequence_group
    hooks: training_step
    parallel: full_state grad_norm
"""
_LINES = [line.split(":") for line in _MOVED.strip().splitlines()]
#: Old module -> new module.
MODULES = {old: new.strip() for new, names in _LINES for old in names.split()}


def find(owner: str, module: str, name: str) -> Any:
    """The value of `name`, which `owner` had in 0.1, from the module that has it now; with a warning."""
    new = NAMES.get(name, name)
    found = importlib.import_module(module)
    if name.startswith("__") or (owner, name) == (module, new) or not hasattr(found, new):
        raise AttributeError(f"module {owner!r} has no attribute {name!r}")
    text = f"{owner}.{name} is {module}.{new} now"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(found, new)


class _OldModules(MetaPathFinder, Loader):
    """Import an old module as one that finds its names in the new one."""

    def find_spec(self, fullname: str, *where: Any) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __package__ or name not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=name in ("balance", "gemm", "routers"))

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = f"{__package__}.{MODULES[old.partition('.')[2]]}"
        module.__dict__["__getattr__"] = lambda name: find(old, new, name)


# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, _OldModules())
