"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Module below forge_data -> the module that has its names now.
MODULES = {
    "chat.cache": "chat.rows",
    "chat.config": "kinds",
    "chat.records": "chat.messages",
    "folders": "io.files",
    "label_checks": "run_checks",
    "prepare.byte_streams": "io.files",
    "prepare.duplicates": "prepare.assemble",
    "prepare.output": "tokens.format",
    "prepare.parquet": "io.parquet",
    "prepare.parts": "prepare.folder",
    "prepare.readers": "prepare.read",
    "prepare.statistics": "tokens.format",
    "prepare.text_documents": "prepare.read",
    "prepare.token_writer": "tokens.writer",
    "prepare.unit_file": "prepare.chunks",
    "prepare.unit_workers": "prepare.workers",
    "raw_kinds": "kinds",
    "sources.checks": "tokens.format",
    "sources.datasets_library": "io.datasets_library",
    "sources.header": "tokens.cache",
    "sources.huggingface_stream": "sources.huggingface",
    "sources.id_shards": "tokens.raw",
    "sources.integrity": "tokens.format",
    "sources.json_text": "io.json_text",
    "sources.megatron": "tokens.raw_formats",
    "sources.nanogpt": "tokens.raw_formats",
    "sources.npy": "tokens.raw_formats",
    "sources.sidecar": "tokens.format",
    "sources.text_column": "io.text_column",
    "sources.token_cache": "tokens.cache",
    "sources.token_files": "tokens.files",
}
#: Name -> the module below forge_data that has it, and its name there.
NAMES = {
    "DOCUMENT_KINDS": "kinds.DOCUMENTS",
    "PIECE": "prepare.read.SLICE",
    "Part": "prepare.plan.FileRange",
    "Parts": "prepare.folder.ChunkFolder",
    "Piece": "prepare.read.DocumentSlice",
    "QUANTILES": "prepare.assemble.QUANTILES",
    "SplitStatistics": "prepare.assemble.SplitStatistics",
    "Stretch": "phases.PhaseSegment",
    "Unit": "prepare.plan.Chunk",
    "UnitFile": "prepare.chunks.ChunkFile",
    "check_output": "prepare.pipeline._check_output",
    "check_whole": "tokens.format.check_digest",
    "make_folder": "prepare.folder._make_folder",
    "read_pieces": "prepare.read.read_documents",
    "run_units": "prepare.workers.run_chunks",
    "stretches": "phases.phase_segments",
    "unit_path": "prepare.chunks.chunk_path",
    "write_unit": "prepare.chunks.write_chunk",
}


def renamed(module: str, name: str) -> Any:
    """Return the value of an old name, with a DeprecationWarning.

    `partial(renamed, __name__)` is a module's `__getattr__`.
    """
    if name not in NAMES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    owner, _, new = NAMES[name].rpartition(".")
    # 2: a partial has no frame. Beyond the importing module Python would not show the warning.
    warnings.warn(f"{name}: use forge_data.{NAMES[name]}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(f"forge_data.{owner}"), new)


class _OldModules:
    """Finds and makes modules of MODULES, whose names are those of the new module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        old = name.removeprefix("forge_data.")
        return ModuleSpec(name, self) if old != name and old in MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = f"forge_data.{MODULES[module.__name__.removeprefix('forge_data.')]}"
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        names = vars(importlib.import_module(new))
        vars(module).update({n: v for n, v in names.items() if not n.startswith("__")})
        module.__getattr__ = functools.partial(renamed, module.__name__)  # type: ignore[method-assign]


# first: an upgrade in place leaves folders with __pycache__ only, which are packages without content
sys.meta_path.insert(0, _OldModules())
