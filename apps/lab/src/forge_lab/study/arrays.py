"""Slurm arrays with one element per run, of `sweep --slurm` and `grid --slurm`; forks wait for the array of trunks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forge_lab._shared.atomic import write_file
from forge_lab._shared.problems import Problem
from forge_lab.study.queue import PlannedRun, check_all, writing
from forge_resilience import ExitCode
from forge_resilience.slurm import (
    SlurmConfig,
    batch_script,
    check_limits,
    jobs_of,
    two_jobs,
    with_retries,
)
from forge_train import Layers, ResolvedJob
from forge_train.errors import config_errors, refuse
from forge_train.slurm import add_site, job_facts, note, refuse_layouts, submitted
from forge_train.toolkit import structure_table


def flag_problems(
    jobs: int | None, slurm: bool, submit: bool, site: str | None, dry_run: bool
) -> Iterator[Problem]:
    """Problems of the flags that both `sweep` and `grid` have."""
    if jobs is not None and jobs < 1:
        yield Problem("--jobs", "range", jobs, "must be at least 1", "use --jobs 2")
    for key, value in (("--submit", submit or None), ("--site", site)):
        if value is not None and not slurm:
            yield Problem(key, "requires", value, "must go with --slurm", "give it, too")
    if dry_run and slurm:
        rule, fix = "and --slurm exclude each other", "give one of them"
        yield Problem("--dry_run", "excludes", ..., rule, fix)


def write_arrays(
    folder: Path,
    arrays: Mapping[str, Sequence[PlannedRun]],
    submits: bool,
    site: str | None,
    at_once: int | None = None,
) -> int:
    """Write `<folder>/slurm/<name>/job.sh` for the runs of each array that are not done; a later array waits for the first.

    Element i reads task-i.toml next to its script; task-i is the folder of that run. A requeued element resumes from its
    newest checkpoint, as any job of `forge-train slurm` does. `at_once`: how many elements run at the same time.
    """
    limit = f"%{at_once}" if at_once else ""
    waiting = {name: [run for run in runs if not run.is_done()] for name, runs in arrays.items()}
    refuse(problem for runs in arrays.values() for run in runs for problem in run.problems())
    scripts = [
        _write(folder / "slurm" / name, runs, site, limit, has_forks=len(arrays) > 1)
        for name, runs in waiting.items()
        if runs
    ]
    if not scripts:
        print("all runs are done; without --slurm the command compares them")
    elif submits:
        number, options = "", tuple[str, ...]()
        for script in scripts:
            number = submitted(script, *options)
            # forks start when all trunks are done, and are removed if one fails
            options = (f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes")
            print(number)
    else:
        print(f"submit: first=$(sbatch --parsable {shlex.quote(scripts[0])})")
        for script in scripts[1:]:
            print(f"        sbatch --dependency=afterok:$first {shlex.quote(script)}")
    return ExitCode.DONE


def _write(
    folder: Path, runs: Sequence[PlannedRun], site: str | None, limit: str, has_forks: bool
) -> str:
    """Write the script of an array, its configurations and links to the runs; return its path."""
    key, elements = runs[0].folder_key, f"0-{len(runs) - 1}{limit}"
    jobs = check_all(runs, lambda run: _element(run, site, folder, elements, has_forks))
    check_all(jobs, refuse_layouts)
    facts = replace(job_facts(jobs[0]), run_dir=str(folder), script=str(folder / "job.sh"))
    config = with_retries(jobs[0].config.slurm, jobs[0].config.resilience.watch)
    with config_errors("slurm"):
        for warning in check_limits(config, facts):
            note(warning)
        text = batch_script(config, [config.python, "-m", "forge_train", "run"], facts)

    refuse(two_jobs(key, str(folder), jobs_of(facts.script)))
    with writing(folder, key):
        folder.mkdir(parents=True, exist_ok=True)
        for number, run in enumerate(runs):
            run.write()
            run.dir.mkdir(exist_ok=True)
            _link(folder / f"task-{number}.toml", run.file)
            _link(folder / f"task-{number}", run.dir)
        write_file(Path(facts.script), text)
    print(f"wrote {facts.script}: {len(runs)} elements")
    return facts.script


def _element(
    run: PlannedRun, site: str | None, folder: Path, elements: str, has_forks: bool
) -> ResolvedJob:
    """The job with the [slurm] of an array and of the site. ConfigError for keys that the array sets itself."""
    layers = Layers()
    for key, value in run.job.values().items():
        if key.startswith("slurm.") and run.job.origin(key) != "default":
            layers.set(key, value, run.job.origin(key))
    add_site(layers, site)

    table = layers.values.get("slurm", {})
    problems = [
        Problem(f"slurm.{key}", "excludes", table[key], "is made by the command", "leave it out")
        for key in ("array", "array_run_dirs", "array_arguments")
        if key in table
    ]
    if has_forks and table.get("on_stop", "requeue") != "requeue":
        rule, fix = "ends the job that forks wait for", "use 'requeue', or study.trunk = false"
        problems.append(Problem("slurm.on_stop", "trunk", table["on_stop"], rule, fix))
    refuse(problems)

    own = {
        "array": elements,
        "array_run_dirs": True,
        "array_arguments": [f"{folder}/task-%a.toml"],
        "job_name": table.get("job_name") or f"{folder.parent.parent.name}-{folder.name}",
    }
    config, found = structure_table({**table, **own}, SlurmConfig, "slurm")
    refuse(found)
    return replace(run.job, config=replace(run.job.config, slurm=config))


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
