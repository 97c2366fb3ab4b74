"""A run directory as Python columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_resilience import read_events
from forge_resilience.sinks import columns_of
from forge_train._shared.toml_files import read_toml
from forge_train.build.run_directory import RunDirectory
from forge_train.metrics.columns import read_rows


@dataclass(frozen=True)
class Run:
    """`metrics["loss"][k]` belongs to `metrics["step"][k]`; a value a row lacks is None.

    `parent` of a fork says which checkpoint it began from (`checkpoint`, `step`, `digest`, `run_dir`), what it took
    (`keep`, `patterns`, names `copied`, `fresh`, `unused`) and `changed`, {key: [there, here]}; None for other runs.
    """

    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: dict[str, list[Any]]
    events: list[dict[str, Any]]
    parent: dict[str, Any] | None = None


def read_run(run_dir: str | Path, lists: Callable[[list[Any]], Any] = list) -> Run:
    """Read config, environment, metrics and events of a run; a torn last line is left out, and with a
    warning lines of metrics that are no rows.

    `lists` makes what is kept of a list in a row, such as the loads of many experts, while the rows are read.
    Raises FileNotFoundError when `run_dir` is not the folder of a run, ValueError for a damaged one.
    """
    paths = RunDirectory(run_dir)
    if not paths.config.exists():
        raise FileNotFoundError(f"{paths.config} is not there; name the folder of a run")
    config, environment = read_toml(paths.config), json.loads(paths.environment.read_bytes())
    rows, events = columns_of(read_rows(paths.metrics), lists), list(read_events(paths.events))
    parent = json.loads(paths.parent.read_bytes()) if paths.parent.exists() else None
    return Run(config, environment, rows, events, parent)
