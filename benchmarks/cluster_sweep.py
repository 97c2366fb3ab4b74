"""Layouts x sizes on a cluster: one Slurm job for each cell, and one table of all, next to published figures.

    python -m benchmarks.cluster_sweep submit --site mine       # the cells of benchmarks/cluster_sweep.toml
    python -m benchmarks.cluster_sweep table                    # of what has trained so far

An interrupted sweep goes on: a cell that has all its steps is not submitted again. --only 'pattern' chooses cells, and other
options are passed to `forge-train slurm`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from forge_train import read_run

WARMUP = 5  # steps before the ones that are measured


class Cell(NamedTuple):
    """One job: a size in a layout."""

    name: str
    config: str
    ranks: int
    flags: dict[str, Any]


def cells(sweep: dict[str, Any], only: str) -> Iterator[Cell]:
    """Each layout of each size, by the names "size/layout"."""
    for size in sweep["sizes"]:
        for layout in sweep["layouts"]:
            name = f"{size['name']}/{layout['name']}"
            if fnmatch(name, only) and layout["name"] in size.get("layouts", [layout["name"]]):
                flags = {**sweep["flags"], **size.get("flags", {}), **layout["flags"]}
                ranks = flags.get("slurm.nodes", 1) * flags["slurm.tasks_per_node"]
                yield Cell(name, size["config"], ranks, flags)


def measured(folder: Path, steps: int) -> dict[str, float] | None:
    """Medians of the steps after the first ones; None while there are fewer than `steps`."""
    if not (folder / "metrics.jsonl").exists():
        return None
    metrics = read_run(folder).metrics
    if max(metrics.get("step", [0])) < steps:
        return None
    names = ("tokens_per_second", "mfu", "memory_bytes")
    columns = {name: [v for v in metrics.get(name, []) if v is not None] for name in names}
    return {name: statistics.median(values[WARMUP:] or [0.0]) for name, values in columns.items()}


def table(sweep: dict[str, Any], runs: Path, only: str) -> Iterator[str]:
    """Markdown: the cells, then what others published."""
    yield "| size/layout | GPUs | tokens/s | MFU | GiB on a GPU | source |\n|---|---:|---:|---:|---:|---|"
    for cell in cells(sweep, only):
        found = measured(runs / cell.name, sweep["flags"]["train.steps"])
        speed, mfu, memory = found.values() if found else (0, 0, 0)
        figures = f"{speed:,.0f} | {mfu:.1%} | {memory / 2**30:.1f}" if found else "not yet | |"
        yield f"| {cell.name} | {cell.ranks} | {figures} | this sweep |"
    for row in sweep.get("published", []):
        memory = row.get("gib", "")
        yield f"| {row['name']} | {row['gpus']} | {row['tokens_per_second']:,} | | {memory} | {row['source']} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cluster_sweep", description=__doc__)
    parser.add_argument("verb", choices=["submit", "table"])
    parser.add_argument("--sweep", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--runs", type=Path, default=Path("runs/cluster_sweep"))
    parser.add_argument("--only", default="*")
    args, options = parser.parse_known_args(argv)
    sweep, code = tomllib.loads(args.sweep.read_text()), 0
    if args.verb == "table":
        print("\n".join(table(sweep, args.runs, args.only)))
        return code
    for cell in cells(sweep, args.only):
        if measured(args.runs / cell.name, sweep["flags"]["train.steps"]) is None:
            flags = {**cell.flags, "run.dir": args.runs / cell.name}
            given = [f"--{key}={value}" for key, value in flags.items()]
            command = [sys.executable, "-m", "forge_train", "slurm", cell.config, "--submit"]
            code |= subprocess.run([*command, *given, *options]).returncode
    return code


if __name__ == "__main__":
    sys.exit(main())
