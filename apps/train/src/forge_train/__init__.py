"""The runner of Forge: a TOML file in, a trained and resumable model out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forge_train._renamed import OF_LAB, moved

if TYPE_CHECKING:
    from forge_train.build.resolve import ResolvedJob, resolve
    from forge_train.build.run_directory import RunDirectory
    from forge_train.config.layers import Layers, read_layers
    from forge_train.config.schema import JobConfig
    from forge_train.errors import ConfigError, DataError, JobError, StateError
    from forge_train.jobs import from_pretrained, load_folder, load_job, load_model, load_trained
    from forge_train.loop.trainer import RunResult, Trainer
    from forge_train.metrics.columns import column_of, read_rows
    from forge_train.protocols import Sink
    from forge_train.report.read_run import Run, read_run
    from forge_train.run.callback import Callback
    from forge_train.run.extension import Extension

__all__ = [
    "Callback", "ConfigError", "DataError", "Extension", "JobConfig", "JobError", "Layers",
    "ResolvedJob", "Run", "RunDirectory", "RunResult", "Sink", "StateError", "Trainer", "column_of",
    "from_pretrained", "load_folder", "load_job", "load_model", "load_trained", "read_layers",
    "read_rows", "read_run", "resolve",
]  # fmt: skip


#: The names of each module. Imported at first use: a typo in a TOML file is answered without waiting for
#: torch's checkpoint and distributed packages, which take longer to import than the check takes.
_NAMES = {
    "config.layers": "Layers read_layers",
    "build.resolve": "ResolvedJob resolve",
    "config.schema": "JobConfig",
    "errors": "ConfigError DataError JobError StateError",
    "jobs": "from_pretrained load_folder load_job load_model load_trained",
    "metrics.columns": "column_of read_rows",
    "protocols": "Sink",
    "report.read_run": "Run read_run",
    "run.callback": "Callback",
    "run.extension": "Extension",
    "build.run_directory": "RunDirectory",
    "loop.trainer": "RunResult Trainer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in OF_LAB:
        return moved(__name__, name, stacklevel=3)
    if name not in _HOME:
        raise AttributeError(f"module 'forge_train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"forge_train.{_HOME[name]}"), name)
