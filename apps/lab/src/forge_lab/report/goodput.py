"""The ledger of a run's seconds, from its folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from forge_lab._shared.problems import invalid
from forge_resilience import read_events
from forge_resilience.goodput import Goodput, goodput, read_ledger
from forge_train import RunDirectory, read_rows
from forge_train.errors import ConfigError


def run_goodput(run_dir: str | Path) -> Goodput:
    """Where the seconds of a run went, over all of its lives; also of a run that goes on.

    Raises ConfigError when `run_dir` has no journal.
    """
    paths = RunDirectory(run_dir)
    if not paths.events.exists():
        rule, fix = f"has no {paths.events.name}", "name the folder of a run that was started once"
        raise invalid("run", "not_found", str(run_dir), rule, fix, kind=ConfigError)
    last_sign = paths.metrics.stat().st_mtime if paths.metrics.exists() else None
    return goodput(read_ledger(read_events(paths.events), last_sign))


def data_wait_seconds(run_dir: str | Path) -> float | None:
    """Seconds that rank 0's steps waited for data, over the rows of a run; None without a row."""
    rows = read_rows(RunDirectory(run_dir).metrics)
    waits = [row["data_wait_seconds"] for row in rows if row.get("data_wait_seconds") is not None]
    return sum(waits) if waits else None


def print_goodput(run_dir: Path, as_json: bool) -> None:
    """The ledger of a run on stdout, for a person or as one JSON object."""
    found, waited = run_goodput(run_dir), data_wait_seconds(run_dir)
    if as_json:
        print(json.dumps({**asdict(found), "data_wait_seconds": waited}))
        return
    print("\n".join(found.lines()))
    if waited is not None:
        print(f"of the steps {waited:.3f} s were waiting for data")
