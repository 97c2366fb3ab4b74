"""`forge-train grid`: a job trained once for each combination of values of its keys, and a table of the runs.

--over optimizer.lr=1e-4,1e-3         a list; [1, 2],[3, 4] for keys that are lists
--over optimizer.lr=1e-4:1e-2:5log    a range: 5 values from 1e-4 to 1e-2, in equal ratios
--over train.global_batch=8:32:4      in equal steps: 8, 16, 24, 32
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from forge_lab._shared.atomic import write_file
from forge_lab._shared.paths import user_path
from forge_lab._shared.problems import Problem
from forge_lab.study.arrays import flag_problems, write_arrays
from forge_lab.study.queue import PlannedRun, RunQueue, check_all, locked, writing
from forge_resilience import ExitCode
from forge_train import Layers, RunDirectory, read_run, resolve
from forge_train.errors import ConfigError, refuse
from forge_train.slurm import note
from forge_train.toolkit import DEFAULT_DIR, add_flags, build_trained, require_layout, total_steps

_MOST_RUNS = 1000  # elements of an array that Slurm takes where a site sets nothing
_LONGEST = 120  # characters of a run's name
_NUMBER = r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:e[-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}):({_NUMBER}):(\d+)(log)?", re.IGNORECASE)
#: An item of a list: brackets and quotes keep their commas.
_ITEM = re.compile(r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|[^,])+""")
#: Keys that a grid sets itself, or that are those of all its runs.
_OWN = ("run.dir.", "slurm.")
_OF_ARRAYS = ("resilience.save_limit_seconds.", "resilience.watch.")


@dataclass(frozen=True)
class GridFlags:
    """The flags of `grid`, in addition to the keys of the job."""

    over: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """KEY=VALUES, once for each key: a list 32,64,128 or a range 1e-4:1e-2:5log of five values; without log in equal steps"""
    dir: Path | None = None
    """folder of the grid (default: run.dir of the job, and -grid)"""
    jobs: int | None = None
    """runs at the same time: on this machine (default: 1), or of the array (default: all)"""
    nproc: int | None = None
    """processes of each run on this machine"""
    threads: int = 1
    """threads of each process on this machine"""
    dry_run: bool = False
    """check and list the runs, and train nothing"""
    slurm: bool = False
    """write the batch script of an array with an element for each run, and train nothing"""
    submit: bool = False
    """with --slurm: submit it"""
    site: str | None = None
    """with --slurm: site file, or its name in ~/.config/forge"""

    def problems(self) -> Iterator[Problem]:
        yield from flag_problems(self.jobs, self.slurm, self.submit, self.site, self.dry_run)
        for name in ("nproc", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                yield Problem(f"--{name}", "range", value, "must be at least 1", "use 2")
        if self.slurm and self.nproc is not None:
            rule, fix = "and --slurm exclude each other", "set slurm.tasks_per_node"
            yield Problem("--nproc", "excludes", self.nproc, rule, fix)


@dataclass(frozen=True, kw_only=True)
class GridRun(PlannedRun):
    """A run of a grid, and the values of the keys that vary."""

    folder_key = "--dir"
    varied: Mapping[str, Any]

    def has_begun(self) -> bool:
        """Whether its folder has all files that describe a run; this is the last one."""
        return RunDirectory(self.dir).environment.exists()


def run_grid(layers: Layers, flags: GridFlags) -> int:
    """Do what `flags` say with the job of `layers`; the exit code."""
    refuse(flags.problems())
    axes = read_axes(flags.over, (*_OWN, *_OF_ARRAYS) if flags.slurm else _OWN)
    folder = flags.dir or user_path(f"{layers.at('run.dir') or DEFAULT_DIR}-grid")
    folder = folder.absolute()
    runs = plan_runs(layers, axes, folder, None if flags.slurm else flags.nproc or 1)
    if flags.slurm:
        return write_arrays(folder, {"runs": runs}, flags.submit, flags.site, flags.jobs)
    if flags.dry_run:
        print_table(rows_of(runs))
        return ExitCode.DONE

    queue = RunQueue(folder, runs, flags.jobs or 1, flags.threads, flags.nproc)
    with locked(folder, GridRun.folder_key):
        code = queue.train()
        rows = rows_of(runs, queue.failed)
        with writing(folder / "grid.json", GridRun.folder_key):
            write_file(folder / "grid.json", json.dumps(rows, indent=1) + "\n")
    print_table(rows)
    if not queue.stopped:
        _write_page([run for run in runs if run.has_begun()], folder)
    return code


# ---- what varies


def read_axes(over: Sequence[str], excluded: Sequence[str] = ()) -> dict[str, list[str]]:
    """{key: words of its values, as flags have them}. ConfigError with all problems."""
    axes, problems = dict[str, list[str]](), list[Problem]()
    for text in over:
        key, _, values = text.partition("=")
        items = _ITEM.findall(values)
        if "." not in key or not items:
            fix = "use --over optimizer.lr=1e-4,1e-3"
            problems.append(Problem("--over", "form", text, "must be KEY=VALUES", fix))
        elif f"{key}.".startswith(tuple(excluded)):
            rule = "must be that of all runs"
            problems.append(Problem(key, "excludes", values, rule, "leave it out"))
        elif key in axes:
            rule = "is given twice"
            problems.append(Problem(key, "duplicate", values, rule, "write one list"))
        else:
            # an empty list after a problem keeps the key known
            found = [_expand(key, item.strip()) for item in items]
            problems += [problem for problem in found if isinstance(problem, Problem)]
            axes[key] = [word for words in found if isinstance(words, list) for word in words]

    if not over:
        rule, fix = "must name a key and its values", "use --over optimizer.lr=1e-4,1e-3"
        problems.append(Problem("--over", "missing", ..., rule, fix))
    number = math.prod(map(len, axes.values()))
    if number > _MOST_RUNS:
        rule = f"makes more than {_MOST_RUNS} runs"
        problems.append(Problem("--over", "size", number, rule, "use fewer values"))
    refuse(problems)
    return axes


def _expand(key: str, item: str) -> list[str] | Problem:
    """The words of an item of a list: itself, or those of a range."""
    match = _RANGE.fullmatch(item)
    if match is None:
        return [item]
    low, high, count = float(match[1]), float(match[2]), int(match[3])
    if low == high or not 2 <= count <= _MOST_RUNS or (match[4] and min(low, high) <= 0):
        rule = f"must be FROM:TO:COUNT of 2 to {_MOST_RUNS} values, with log above 0"
        return Problem(key, "range", item, rule, "use 1e-4:1e-2:5log")

    def between(fraction: float) -> str:
        """Six digits, so that names of runs are short; an integer has all."""
        value = low * (high / low) ** fraction if match[4] else low + (high - low) * fraction
        integer = math.isclose(value, round(value), rel_tol=1e-9, abs_tol=1e-9 * abs(high - low))
        return str(round(value)) if integer else f"{value:.6g}"

    return [match[1], *(between(i / (count - 1)) for i in range(1, count - 1)), match[2]]


def plan_runs(
    layers: Layers, axes: Mapping[str, Sequence[str]], folder: Path, nproc: int | None
) -> list[GridRun]:
    """A run for each combination, none of which is started or written. ConfigError with the problems of all.

    `nproc`: processes of each run, which its layout must fit; None where Slurm starts them.
    """
    combinations = [dict(zip(axes, words)) for words in itertools.product(*axes.values())]
    runs = check_all(combinations, partial(_plan, layers, folder, nproc))
    first: dict[str, GridRun] = {}
    problems = [
        Problem("--over", "duplicate", run.name, f"is the run {other.name}", "leave one out")
        for run in runs
        if (other := first.setdefault(_values(run), run)) is not run
    ]
    refuse(problems)
    return runs


def _plan(layers: Layers, folder: Path, nproc: int | None, words: Mapping[str, str]) -> GridRun:
    own, name = copy.deepcopy(layers), _name(words)
    add_flags(own, [f"--{key}={word}" for key, word in words.items()])
    own.set("run.dir", str(folder / "runs" / name), "grid")
    job = resolve(own)
    if nproc:
        require_layout(job.config, nproc, nproc)
    by_size = job.config.train.tokens_per_parameter is not None
    steps = total_steps(job.config, build_trained(job.config) if by_size else None)
    values = job.values()
    varied = {key: values.get(key, word) for key, word in words.items()}
    return GridRun(name=name, steps=steps, toml=job.to_toml(given=True), job=job, varied=varied)


def _name(words: Mapping[str, str]) -> str:
    """The name of a run's folder: the last names of the keys, or all names where two keys end alike."""
    last = [key.rpartition(".")[2] for key in words]
    keys = last if len(set(last)) == len(last) else list(words)
    text = ",".join(f"{key}={word}" for key, word in zip(keys, words.values()))
    name = re.sub(r"[^\w.,=+-]+", "_", text)
    if name == text and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _values(run: GridRun) -> str:
    """The values of its job, without those of its folder."""
    return repr({key: v for key, v in run.job.values().items() if key != "run.dir"})


# ---- the table


def rows_of(
    runs: Sequence[GridRun], failed: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """A row for each run, the best first: by validation loss where runs have one, else by loss."""
    rows = [_row(run, (failed or {}).get(run.name)) for run in runs]
    done = [row for row in rows if row["status"] == "done"]
    by = "val_loss" if any(row["val_loss"] is not None for row in done) else "loss"
    return sorted(rows, key=lambda row: (row["status"] != "done", row[by] is None, row[by] or 0.0))


def _row(run: GridRun, code: int | None) -> dict[str, Any]:
    """What a run has reached; None where there is nothing, or no finite number."""
    columns, events = dict[str, list[Any]](), list[dict[str, Any]]()
    if run.has_begun():
        found = read_run(run.dir)
        columns, events = found.metrics, found.events
    losses = [event.get("val_loss") for event in events if event["event"] == "evaluation"]
    speeds = [speed for speed in columns.get("tokens_per_second", []) if speed]
    step = (columns.get("step") or [0])[-1]

    status = f"step {step} of {run.steps}" if columns else "not started"
    if run.is_done():
        status = "done"
    elif code is not None:
        status = f"failed with code {code}, {status}"
    numbers = {
        "loss": (columns.get("loss") or [None])[-1],
        "val_loss": (losses or [None])[-1],
        "tokens": (columns.get("tokens") or [None])[-1],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
    }
    finite = {k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
    return {"run": run.name, **run.varied, **finite, "status": status}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows without the names of runs, which the values make."""
    heads = {"val_loss": "validation loss", "tokens_per_second": "tokens/s"}
    names = [name for name in rows[0] if name != "run"]
    table = Table(*(heads.get(name, name) for name in names), box=SIMPLE_HEAD)
    forms = {"loss": ".4f", "val_loss": ".4f", "tokens": ",.0f", "tokens_per_second": ",.0f"}
    for row in rows:
        cells = (format(row[n], forms.get(n, "")) if row[n] is not None else "-" for n in names)
        table.add_row(*cells)
    console = Console()
    console = console if console.is_terminal else Console(width=1000)
    console.print(table)


def _write_page(runs: Sequence[GridRun], folder: Path) -> None:
    """The report page of the runs; a note where its packages are missing."""
    from forge_lab.report.page import write_page

    try:
        print(f"report: {write_page([run.dir for run in runs], folder / 'report.html')}")
    except ConfigError as error:
        note(f"no report: {error}")
