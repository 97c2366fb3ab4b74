"""Verified, atomic checkpoints behind torch.distributed.checkpoint."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from forge_ckpt._renamed import OLD_MODULES

if TYPE_CHECKING:
    from forge_ckpt.callbacks import lightning_callback, transformers_callback
    from forge_ckpt.errors import CheckpointMismatch, CorruptCheckpoint, StepExists, StoreInUse
    from forge_ckpt.hf.load import load_hf
    from forge_ckpt.hf.save import save_hf
    from forge_ckpt.read.load import load_step
    from forge_ckpt.read.planner import ForgeLoadPlanner
    from forge_ckpt.read.reader import ForgeReader
    from forge_ckpt.read.tensors import SavedTensors, read_tensors
    from forge_ckpt.retention import Keep
    from forge_ckpt.rng import RNGState
    from forge_ckpt.store import Store
    from forge_ckpt.weights import WeightsReport, load_weights, match_weights
    from forge_ckpt.write.background import SaveEvent, SaveHandle
    from forge_ckpt.write.planner import ForgeSavePlanner
    from forge_ckpt.write.writer import ForgeWriter

__all__ = [
    "CheckpointMismatch",
    "CorruptCheckpoint",
    "ForgeLoadPlanner",
    "ForgeReader",
    "ForgeSavePlanner",
    "ForgeWriter",
    "Keep",
    "RNGState",
    "SaveEvent",
    "SaveHandle",
    "SavedTensors",
    "StepExists",
    "Store",
    "StoreInUse",
    "WeightsReport",
    "lightning_callback",
    "load_hf",
    "load_step",
    "load_weights",
    "match_weights",
    "read_tensors",
    "save_hf",
    "transformers_callback",
]

#: Module -> its names in `__all__`. Each is imported at its first use: `import forge_ckpt` imports no torch.
_NAMES = {
    "callbacks": "lightning_callback transformers_callback",
    "errors": "CheckpointMismatch CorruptCheckpoint StepExists StoreInUse",
    "hf.load": "load_hf",
    "hf.save": "save_hf",
    "read.load": "load_step",
    "read.planner": "ForgeLoadPlanner",
    "read.reader": "ForgeReader",
    "read.tensors": "SavedTensors read_tensors",
    "retention": "Keep",
    "rng": "RNGState",
    "store": "Store",
    "weights": "WeightsReport load_weights match_weights",
    "write.background": "SaveEvent SaveHandle",
    "write.planner": "ForgeSavePlanner",
    "write.writer": "ForgeWriter",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, or a module below the package."""
    if name in _MODULES:
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = found
        return found
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, OLD_MODULES)
