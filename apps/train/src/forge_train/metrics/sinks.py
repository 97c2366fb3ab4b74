"""Sinks of rows of metrics by name, beside metrics.jsonl and the console."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from forge_core.registry import Registry
from forge_resilience.sinks import MlflowSink, TensorBoardSink, WandbSink
from forge_train._shared.problems import Problem
from forge_train.config.schema import MetricsConfig
from forge_train.metrics.columns import tracker_name
from forge_train.protocols import Row, Sink

_BUILT_IN = {"tensorboard": TensorBoardSink, "wandb": WandbSink, "mlflow": MlflowSink}
_CALLED_WITH = ("directory", "resume_step")
SINKS = Registry(
    "metrics.sinks.<name>.name", "forge.sinks", _CALLED_WITH, _BUILT_IN, built_in_options=True
)


def find_sinks(metrics: MetricsConfig) -> dict[str, Callable[[Path, int], Sink]]:
    """The sinks that a configuration names, by their tables' names, with options bound; ValueError with what is
    wrong with names and options, before anything is opened."""
    tables = {name: (sink.name, sink.options) for name, sink in metrics.sinks.items()}
    if metrics.tensorboard and "tensorboard" not in {name for name, _ in tables.values()}:
        tables["metrics.tensorboard"] = ("tensorboard", {})
    found = SINKS.bound(tables)
    if not metrics.flat_names:
        trackers = (table for table, (name, _) in tables.items() if name in SINKS.built_in)
        found |= {table: partial(_WithSections, found[table]) for table in trackers}
    return found


class _WithSections:
    """A tracker that gets columns under `tracker_name`."""

    def __init__(self, make: Callable[..., Sink], directory: Path, resume_step: int) -> None:
        self._sink = make(directory, resume_step)
        self.close = self._sink.close

    def write(self, row: Row) -> None:
        self._sink.write({tracker_name(name): value for name, value in row.items()})


def sink_problems(metrics: MetricsConfig) -> Iterator[Problem]:
    """Built-in sinks whose package is not installed, and those that are named twice: a run has one id there."""
    tables = Counter(sink.name for sink in metrics.sinks.values())
    for name, extra in {"tensorboard": "track", "wandb": "wandb", "mlflow": "mlflow"}.items():
        wanted = tables[name] or (metrics.tensorboard and name == "tensorboard")
        if wanted and importlib.util.find_spec(name) is None:
            rule = f"has the sink {name!r}, whose package is not installed"
            fix = f"pip install 'forge-train[{extra}]' or leave it out"
            yield Problem("metrics", "requires", ..., rule, fix)
        if tables[name] > 1 and name != "tensorboard":
            rule = f"has {tables[name]} tables of this name, and a run has one id there"
            yield Problem("metrics.sinks", "duplicate", name, rule, "leave one")
