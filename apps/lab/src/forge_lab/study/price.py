"""The price of a study: by the planner for a kind of GPU, or by a few measured steps on this machine."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from forge_lab.study.runs import Study, StudyRun
from forge_train import read_run
from forge_train.errors import JobError
from forge_train.toolkit import price

_STEPS = 12
#: Without a warm-up the learning rate may be too high: values that are not finite do not end a measurement.
_MEASURED: dict[str, Any] = {
    "resilience.nonfinite.action": "skip", "resilience.nonfinite.max_in_a_row": _STEPS,
    "train.steps": _STEPS, "schedule.name": "constant", "schedule.warmup_steps": 0, "eval.every_steps": 0,
    "checkpoint.every_steps": 0, "metrics.every_steps": 1, "metrics.console": "off", "sample.max_new_tokens": 0,
}  # fmt: skip


class Price(NamedTuple):
    """Seconds until the first step, seconds of a step, and bytes of memory."""

    start: float
    step: float
    memory: float


def print_plan(study: Study, gpu: str | None) -> None:
    """Print the runs with parameters, own steps, tokens and operations, seconds and memory, and their sums."""
    prices: dict[tuple[str, str], Price] = {}
    for run in study.runs:
        key = (run.size, run.optimizer)
        if key not in prices:
            prices[key] = _planned(run, gpu) if gpu else _measured(run, study.config.threads)

    names = Column("run", no_wrap=True, min_width=max(len(run.name) for run in study.runs))
    heads = ("N", "steps", "tokens", "FLOPs", "seconds", "GB")
    table = Table(names, *heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))

    total = 0.0
    for run in study.runs:
        cost = prices[run.size, run.optimizer]
        seconds = cost.start + cost.step * (run.steps - run.begin)
        done = run.is_done()
        total += 0.0 if done else seconds
        table.add_row(
            run.name, f"{run.parameters:,}", f"{run.begin}-{run.steps}", f"{run.tokens * run.own_part:,.0f}",
            f"{run.flops * run.own_part:.1e}", "done" if done else f"{seconds:,.1f}", f"{cost.memory / 1e9:.2f}",
        )  # fmt: skip
    Console().print(table)

    by = f"the planner for one {gpu}" if gpu else f"{_STEPS} steps of each size on this machine"
    print(
        f"{len(study.runs)} runs, {sum(r.tokens * r.own_part for r in study.runs):,.0f} tokens, "
        f"{sum(r.flops * r.own_part for r in study.runs):.2e} FLOPs; {total:,.0f} seconds for those that are not done, one after "
        f"another and without evaluations and saves; at most {max(p.memory for p in prices.values()) / 1e9:.2f} GB a run; by {by}"
    )


def _planned(run: StudyRun, gpu: str) -> Price:
    slurm = run.job.config.slurm
    nodes = slurm.node_range[1]
    found = price(run.job.config, gpu, nodes * slurm.ranks_per_node, nodes)
    return Price(0.0, found.time.step, found.peak)


def _measured(run: StudyRun, threads: int) -> Price:
    """The price of a run by `_STEPS` real steps in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "job.toml", Path(folder) / "run"
        file.write_text(run.job.to_toml(given=True), encoding="utf-8")
        flags = [f"--{key}={value}" for key, value in _MEASURED.items()]

        began = time.monotonic()
        command = [sys.executable, "-m", "forge_train", "run", str(file), f"--run.dir={out}"]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([*command, *flags], capture_output=True, text=True, env=environ)
        if done.returncode:
            reason = done.stderr.strip()
            raise JobError([f"{run.name}: {_STEPS} steps could not be measured: {reason}"])
        seconds = time.monotonic() - began
        rows = read_run(out).metrics

    step = statistics.median_high(b - a for a, b in itertools.pairwise(rows["seconds"]))
    return Price(max(0.0, seconds - _STEPS * step), step, max(rows["memory_bytes"]))
