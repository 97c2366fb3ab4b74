"""Sinks of rows of metrics by name, beside metrics.jsonl and the console."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from forge_core.registry import Registry
from forge_resilience.sinks import MlflowSink, TensorBoardSink, WandbSink
from forge_train._shared.problems import Problem
from forge_train.config.schema import MetricsConfig
from forge_train.protocols import Sink

SINKS = Registry(
    "metrics.sinks.<name>.name",
    "forge.sinks",
    ("directory", "resume_step"),
    {"tensorboard": TensorBoardSink, "wandb": WandbSink, "mlflow": MlflowSink},
    built_in_options=True,
)
#: Packages and extras that built-in sinks need.
_NEEDS = {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}


def find_sinks(metrics: MetricsConfig) -> dict[str, Callable[[Path, int], Sink]]:
    """The sinks that a configuration names, by their tables' names, with options bound; ValueError with what is
    wrong with names and options, before anything is opened."""
    tables = {name: (sink.name, sink.options) for name, sink in metrics.sinks.items()}
    found = SINKS.bound(tables)
    if metrics.tensorboard and "tensorboard" not in {name for name, _ in tables.values()}:
        found["metrics.tensorboard"] = TensorBoardSink
    return found


def sink_problems(metrics: MetricsConfig) -> Iterator[Problem]:
    """Built-in sinks whose package is not installed, and those that are named twice: a run has one id there."""
    names = Counter(sink.name for sink in metrics.sinks.values())
    wanted = {*names, *(["tensorboard"] if metrics.tensorboard else [])}
    for name, extra in _NEEDS.items():
        if name in wanted and importlib.util.find_spec(name) is None:
            rule = f"has the sink {name!r}, whose package is not installed"
            fix = f"pip install 'forge-train[{extra}]' or leave it out"
            yield Problem("metrics", "requires", ..., rule, fix)
    for name in ("wandb", "mlflow"):
        if names[name] > 1:
            rule = f"has {names[name]} tables of this name, and a run has one id there"
            yield Problem("metrics.sinks", "duplicate", name, rule, "leave one")
