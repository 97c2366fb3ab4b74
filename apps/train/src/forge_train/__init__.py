"""The runner of Forge: a TOML file in, a trained and resumable model out."""

from forge_train.config.layers import read_layers
from forge_train.config.resolve import ResolvedJob, resolve
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, DataError, JobError, StateError
from forge_train.jobs import load_job, load_trained
from forge_train.report.read_run import Run, read_run
from forge_train.trainer.callbacks import Callback
from forge_train.trainer.trainer import RunResult, Trainer

__all__ = [
    "Callback",
    "ConfigError",
    "DataError",
    "JobConfig",
    "JobError",
    "ResolvedJob",
    "Run",
    "RunResult",
    "StateError",
    "Trainer",
    "load_job",
    "load_trained",
    "read_layers",
    "read_run",
    "resolve",
]
