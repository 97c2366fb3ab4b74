"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: Module below forge_parallel -> the module that has its names now.
MODULES = {
    "axes.vocab_fused": "axes.vocab",
    "further_ahead": "compute",  # language: an old name
    "legal": "rules",
    "micro_batches": "compute",
    "order": "structure",
    "sdpa": "meshes",
    "stages": "config",
}
#: Name -> the module below forge_parallel that has it, and its name there.
NAMES = {
    "ComputesIn": "protocols.ModuleSharding",
    "CountsFlops": "protocols.ModuleCost",
    "DeclaresBlocks": "protocols.ModuleSharding",
    "DeclaresPipelineParts": "protocols.ModuleSharding",
    "DeclaresRoles": "protocols.ModuleSharding",
    "DeclaresUnits": "protocols.ModuleSharding",
    "Facts": "rules.ModelFacts",
    "PlacesByToken": "protocols.ModuleSharding",
    "ReadsOnHost": "protocols.ModuleInputs",
    "ReadsTokenIds": "protocols.ModuleInputs",
    "SharesDerived": "protocols.CachingContext",
    "TakesExtras": "protocols.ModuleInputs",
    "TakesMasks": "protocols.ModuleInputs",
    "TakesOptionalInputs": "protocols.ModuleInputs",
    "WholePoints": "points.UnshardedPoints",
    "ahead_problem": "rules.mtp_problem",
    "attention_problems": "check_model.attention_problems",
    "check_cuts": "check_model.check_shards",
    "cut_problems": "check_model.shard_problems",
    "cut_sequence": "axes.context.shard_sequence",
    "evaluate_rows": "compute.evaluate_sequences",
    "extra_problems": "check_model.extra_problems",
    "ids_of_cut_logits": "axes.tensor.sharded_logits_vocab_size",
    "join_sequence": "axes.context.gather_sequence",
    "materialise": "parallelize.materialize",  # language: an old name
    "part_problems": "check_model.part_problems",
    "sdpa_problem": "rules.sdpa_problem",
    "width_of_cut_logits": "axes.tensor.sharded_logits_width",
}


def renamed(module: str, name: str, stacklevel: int = 2) -> Any:
    """Return the value of an old name, with a DeprecationWarning.

    `partial(renamed, __name__)` is a module's `__getattr__`; a function that calls this one gives stacklevel 3.
    """
    if name not in NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    owner, _, new = NAMES[name].rpartition(".")
    # 2: a partial has no frame. Beyond the importing module Python would not show the warning.
    text = f"{name}: use forge_parallel.{NAMES[name]}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return getattr(importlib.import_module(f"forge_parallel.{owner}"), new)


def renamed_arguments(**names: str) -> Callable[[F], F]:
    """A decorator: old keywords are taken as the new ones, with a DeprecationWarning."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for old in names.keys() & given.keys():
                warnings.warn(f"{old}=: use {names[old]}=", DeprecationWarning, stacklevel=2)
                given[names[old]] = given.pop(old)
            return function(*args, **given)

        return call  # type: ignore[return-value]

    return decorate


class _OldModules:
    """Finds and makes modules of MODULES, whose names are those of the new module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        old = name.removeprefix("forge_parallel.")
        return ModuleSpec(name, self) if old != name and old in MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = f"forge_parallel.{MODULES[module.__name__.removeprefix('forge_parallel.')]}"
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        names = vars(importlib.import_module(new))
        vars(module).update({n: v for n, v in names.items() if not n.startswith("__")})
        module.__getattr__ = functools.partial(renamed, module.__name__)  # type: ignore[method-assign]


# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, _OldModules())
