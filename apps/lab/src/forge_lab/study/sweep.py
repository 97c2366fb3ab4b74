"""`forge-train sweep`: the runs of a study, and the scaling law that fits them."""

from __future__ import annotations

from pathlib import Path

import tyro

from forge_lab._shared.problems import Problem, invalid
from forge_lab.study.arrays import flag_problems, write_arrays
from forge_lab.study.queue import RunQueue, locked
from forge_lab.study.runs import read_study
from forge_resilience import ExitCode
from forge_train.errors import JobError, refuse


def run_sweep(
    study: tyro.conf.Positional[Path],
    /,
    dry_run: bool = False,
    gpu: str | None = None,
    jobs: int = 1,
    slurm: bool = False,
    submit: bool = False,
    site: str | None = None,
    report: Path | None = None,
) -> int:
    """Train the runs of a study that are not done, fit a scaling law to them, and write a page about both.

    Args:
        study: file of the study
        dry_run: print the runs with their price, and train nothing
        gpu: with --dry_run: price by the planner for this GPU, not by a few measured steps
        jobs: runs at the same time on this machine
        slurm: write batch scripts with an element for each run, and train nothing
        submit: with --slurm: submit them
        site: with --slurm: site file, or its name in ~/.config/forge
        report: page to write, .md, with a .json and .svg next to it; without it in study.dir
    """
    problems = list(flag_problems(jobs, slurm, submit, site, dry_run))
    if gpu is not None and not dry_run:
        problems.append(Problem("--gpu", "requires", gpu, "must go with --dry_run", "give both"))
    if report is not None and (report.suffix != ".md" or not report.parent.is_dir()):
        rule = "must be a .md file in a folder that exists"
        problems.append(Problem("--report", "name", str(report), rule, "rename it"))
    refuse(problems)

    described = read_study(study)
    if dry_run:
        from forge_lab.study.price import print_plan

        print_plan(described, gpu)
        return ExitCode.DONE
    if slurm:
        trunks = [run for run in described.runs if run.budget is None]
        others = [run for run in described.runs if run.budget is not None]
        arrays = {"trunks": trunks, "forks": others} if trunks else {"runs": others}
        return write_arrays(described.dir, arrays, submit, site)

    from forge_lab.study.page import check_plot, write_page

    check_plot()
    with locked(described.dir, "study.dir"):
        code = RunQueue(described.dir, described.runs, jobs, described.config.threads).train()
        if code == ExitCode.DONE:
            where = report or described.dir / "study.md"
            try:
                write_page(described, where)
            except OSError as error:
                key, rule = "--report", f"cannot be written ({error.strerror})"
                fix = "choose another"
                raise invalid(key, "write", str(where), rule, fix, kind=JobError) from error
            print(f"the page of the study: {where}")
    return code
