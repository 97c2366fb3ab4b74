"""The ledger of a run's seconds, from its folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from forge_resilience import read_events
from forge_resilience.goodput import Goodput, goodput, read_ledger
from forge_train.errors import ConfigError
from forge_train.trainer.run_directory import RunDirectory


def run_goodput(run_dir: str | Path) -> Goodput:
    """Where the seconds of a run went, over all of its lives; also of a run that goes on.

    Raises ConfigError when `run_dir` has no journal.
    """
    paths = RunDirectory(run_dir)
    if not paths.events.exists():
        raise ConfigError(
            [f"{paths.events} is not there; name the folder of a run that was started once"]
        )
    last_sign = paths.metrics.stat().st_mtime if paths.metrics.exists() else None
    return goodput(read_ledger(read_events(paths.events), last_sign))


def print_report(run_dir: Path, as_json: bool) -> None:
    """The report of a run on stdout, for a person or as one JSON object."""
    found = run_goodput(run_dir)
    print(json.dumps(asdict(found)) if as_json else "\n".join(found.lines()))
