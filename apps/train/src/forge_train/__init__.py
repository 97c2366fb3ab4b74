"""The runner of Forge: a TOML file in, a trained and resumable model out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_train._lazy import import_later

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


_NAMES = {
    "config.layers": "read_layers",
    "config.resolve": "ResolvedJob resolve",
    "config.schema": "JobConfig",
    "errors": "ConfigError DataError JobError StateError",
    "extensions.callback": "Callback",
    "extensions.extension": "Extension",
    "jobs": "load_folder load_job load_model load_trained",
    "protocols": "Sink",
    "report.evaluate": "evaluate_run",
    "report.extract": "extract_run",
    "report.read_run": "Run read_run",
    "study.replay": "replay_step",
    "study.runs": "read_study",
    "trainer.trainer": "RunResult Trainer",
}
__getattr__ = import_later(__name__, _NAMES)
