"""`forge-train sweep --slurm`: Slurm arrays with one element per run; forks wait for the array of trunks."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

from forge_lab._shared.atomic import write_file
from forge_lab._shared.problems import Problem
from forge_lab.study.runs import Study, StudyRun, writing
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


def write_arrays(study: Study, submits: bool, site: str | None) -> int:
    """Write <study.dir>/slurm/trunks.sh and forks.sh (without a trunk runs.sh) for the runs that are not done.

    Element i reads task-i.toml next to its script; task-i is the folder of that run. A requeued element resumes from its
    newest checkpoint, as any job of `forge-train slurm` does.
    """
    waiting = [run for run in study.runs if not run.is_done()]
    trunks = [run for run in waiting if run.budget is None]
    others = [run for run in waiting if run.budget is not None]
    names = {"trunks": trunks, "forks" if study.config.trunk else "runs": others}
    scripts = [_write(study, name, runs, site) for name, runs in names.items() if runs]
    if not scripts:
        print("all runs are done; without --slurm the command writes the page")
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


def _write(study: Study, name: str, runs: list[StudyRun], site: str | None) -> str:
    """Write the script of an array, its configurations and links to the runs; return its path."""
    folder = study.dir / "slurm" / name
    jobs = [_element(run, site, folder, len(runs), study) for run in runs]
    for job in jobs:
        refuse_layouts(job)
    facts = replace(job_facts(jobs[0]), run_dir=str(folder), script=str(folder / "job.sh"))
    config = with_retries(jobs[0].config.slurm, jobs[0].config.resilience.watch)
    with config_errors("slurm"):
        for warning in check_limits(config, facts):
            note(warning)
        text = batch_script(config, [config.python, "-m", "forge_train", "run"], facts)

    refuse(two_jobs("study.dir", str(folder), jobs_of(facts.script)))
    with writing(folder):
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
    run: StudyRun, site: str | None, folder: Path, number: int, study: Study
) -> ResolvedJob:
    """The job with the [slurm] of an array and of the site. ConfigError for keys that the study sets itself."""
    layers = Layers()
    for key, value in run.job.values().items():
        if key.startswith("slurm.") and run.job.origin(key) != "default":
            layers.set(key, value, run.job.origin(key))
    add_site(layers, site)

    table = layers.values.get("slurm", {})
    problems = [
        Problem(f"slurm.{key}", "excludes", table[key], "is made by the study", "leave it out")
        for key in ("array", "array_run_dirs", "array_arguments")
        if key in table
    ]
    if study.config.trunk and table.get("on_stop", "requeue") != "requeue":
        rule, fix = "ends the job that forks wait for", "use 'requeue', or study.trunk = false"
        problems.append(Problem("slurm.on_stop", "trunk", table["on_stop"], rule, fix))
    refuse(problems)

    own = {
        "array": f"0-{number - 1}",
        "array_run_dirs": True,
        "array_arguments": [f"{folder}/task-%a.toml"],
        "job_name": table.get("job_name") or f"{study.name}-{folder.name}",
    }
    config, found = structure_table({**table, **own}, SlurmConfig, "slurm")
    refuse(found)
    return replace(run.job, config=replace(run.job.config, slurm=config))


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
