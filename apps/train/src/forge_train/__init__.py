"""The runner of Forge: a TOML file in, a trained and resumable model out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_train.config.layers import read_layers
    from forge_train.config.resolve import ResolvedJob, resolve
    from forge_train.config.schema import JobConfig
    from forge_train.errors import ConfigError, DataError, JobError, StateError
    from forge_train.extensions.callback import Callback
    from forge_train.extensions.extension import Extension
    from forge_train.jobs import load_folder, load_job, load_model, load_trained
    from forge_train.protocols import Sink
    from forge_train.report.evaluate import evaluate_run
    from forge_train.report.extract import extract_run
    from forge_train.report.read_run import Run, read_run
    from forge_train.study.replay import replay_step
    from forge_train.study.runs import read_study
    from forge_train.trainer.trainer import RunResult, Trainer

#: Where each name lives. Imported at first use: a typo in a TOML file is answered without waiting for
#: torch's checkpoint and distributed packages, which take longer to import than the check takes.
_HOME = {
    "Callback": "forge_train.extensions.callback",
    "ConfigError": "forge_train.errors",
    "DataError": "forge_train.errors",
    "Extension": "forge_train.extensions.extension",
    "JobConfig": "forge_train.config.schema",
    "JobError": "forge_train.errors",
    "ResolvedJob": "forge_train.config.resolve",
    "Run": "forge_train.report.read_run",
    "RunResult": "forge_train.trainer.trainer",
    "Sink": "forge_train.protocols",
    "StateError": "forge_train.errors",
    "Trainer": "forge_train.trainer.trainer",
    "evaluate_run": "forge_train.report.evaluate",
    "extract_run": "forge_train.report.extract",
    "load_folder": "forge_train.jobs",
    "load_job": "forge_train.jobs",
    "load_model": "forge_train.jobs",
    "load_trained": "forge_train.jobs",
    "read_layers": "forge_train.config.layers",
    "read_run": "forge_train.report.read_run",
    "read_study": "forge_train.study.runs",
    "replay_step": "forge_train.study.replay",
    "resolve": "forge_train.config.resolve",
}

__all__ = [
    "Callback",
    "ConfigError",
    "DataError",
    "Extension",
    "JobConfig",
    "JobError",
    "ResolvedJob",
    "Run",
    "RunResult",
    "Sink",
    "StateError",
    "Trainer",
    "evaluate_run",
    "extract_run",
    "load_folder",
    "load_job",
    "load_model",
    "load_trained",
    "read_layers",
    "read_run",
    "read_study",
    "replay_step",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge_train' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
