"""`forge-train slurm`: the batch script of a job, written into its run directory, shown, submitted or run at a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from forge_resilience import ExitCode, slurm
from forge_resilience.slurm import JobFacts, SlurmFlags
from forge_train._shared.atomic import write_file
from forge_train._shared.problems import Problem
from forge_train._shared.toml_files import flatten
from forge_train.build.layout import layout_problems
from forge_train.build.resolve import ResolvedJob, resolve, resolve_to_show
from forge_train.build.run_directory import RunDirectory
from forge_train.config.layers import Layers
from forge_train.errors import config_errors, job_errors, refuse, write_errors
from forge_train.process import note

__all__ = ["add_site", "job_facts", "note", "refuse_layouts", "submitted"]


def run_slurm(layers: Layers, flags: SlurmFlags) -> int:
    """Do what `flags` say with the job of `layers`. ConfigError for a job that could not run on these nodes."""
    refuse(flags.problems())
    add_site(layers, flags.site)
    job, missing = resolve_to_show(layers) if flags.dry_run else (resolve(layers), ())
    for problem in missing:
        note(f"data is not checked: {problem}")
    facts = job_facts(job)
    scripts, command = _scripts(job, facts, flags)
    shown, *_ = scripts.values()
    if flags.dry_run:
        print((f"# {shlex.join(command)}\n" if flags.interactive else "") + shown, end="")
        return ExitCode.DONE

    queued = slurm.queued_jobs(flags, facts)
    if flags.submit or flags.orchestrate:
        refuse(slurm.two_jobs("run.dir", facts.run_dir, queued))
    _write(scripts, job)
    *_, last = scripts
    if flags.submit:
        return _submit(last)
    if command:
        print(shlex.join(command), file=sys.stderr, flush=True)
        with job_errors():
            slurm.replace_process(command)
    for number, state in queued:
        note(f"job {number} ({state}) reads {facts.path_of('job.toml')} at its next start")
    print(f"wrote {last}\nsubmit it: sbatch {shlex.quote(last)}")
    return ExitCode.DONE


def _scripts(
    job: ResolvedJob, facts: JobFacts, flags: SlurmFlags
) -> tuple[dict[str, str], list[str]]:
    """`make_scripts` of a job whose layout fits the nodes, and whose run it may go on with."""
    config, sizes = slurm.with_retries(job.config.slurm, job.config.resilience.watch), list[int]()
    if flags.orchestrate:
        sizes = _legal_sizes(job, flags.nodes)
    else:
        refuse_layouts(job)
        # else an error when the job starts, hours later
        RunDirectory(job.config.run.dir).allowed_changes(job)
    command = [config.python, "-m", "forge_train", "run", facts.path_of("job.toml")]
    journal = str(RunDirectory(facts.run_dir).events)
    with config_errors("slurm"):
        return slurm.make_scripts(flags, config, facts, command, sizes, journal, note)


def _legal_sizes(job: ResolvedJob, sizes: list[int]) -> list[int]:
    """Numbers of nodes on which the job can run; others are skipped with a warning."""
    per_node, wrong, legal = job.config.slurm.ranks_per_node, list[Problem](), list[int]()
    for size in sizes:
        found = layout_problems(job.config, size * per_node, per_node)
        wrong += [replace(problem, origin=f"--sizes {size}") for problem in found]
        legal += [] if found else [size]
    refuse([] if legal else wrong)
    for problem in wrong:
        note(f"left out: {problem}")
    return legal


def add_site(layers: Layers, name: str | None) -> None:
    """Lay the site below the job: it gives the keys of [slurm] that the job leaves open."""
    with config_errors():
        path = slurm.find_site(name)
        table = {} if path is None else slurm.read_site(path)
    for key, value in flatten(table):
        if f"slurm.{key}" not in layers.origins:
            layers.set(f"slurm.{key}", value, f"site {path}")


def refuse_layouts(job: ResolvedJob) -> None:
    """Raise the ConfigError with which the ranks would end, hours later, on the numbers of nodes of a job."""
    per_node = job.config.slurm.ranks_per_node
    sizes = {nodes * per_node for nodes in job.config.slurm.node_range}
    problems = [p for size in sorted(sizes) for p in layout_problems(job.config, size, per_node)]
    refuse({str(problem): problem for problem in problems}.values())


def job_facts(job: ResolvedJob) -> JobFacts:
    """The places of a job's script, its logs and its run; with a supervisor of each node's ranks if the job asks for one."""
    run_dir, config = os.path.abspath(job.config.run.dir), job.config.slurm
    watch, supervisor = job.config.resilience.watch, tuple[str, ...]()
    if watch.action == "restart":
        # each element of an array has a journal of its own
        journal = "" if config.array_run_dirs else str(RunDirectory(run_dir).events)
        supervisor = watch.command(journal, config.python)
    with config_errors():
        return JobFacts(
            run_dir,
            os.path.join(run_dir, "slurm", "job.sh"),
            os.getcwd(),
            job.config.resilience.save_limit_seconds,
            supervisor=supervisor,
            broken_nodes=(sys.executable, "-m", "forge_resilience.health"),
        )


def _write(scripts: dict[str, str], job: ResolvedJob) -> None:
    """Write scripts, and the configuration as it is now: editing CONFIG changes no job that waits in the queue."""
    folder = Path(next(iter(scripts))).parent
    with write_errors("run.dir", folder.parent, "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in scripts.items():
            write_file(Path(path), text)
        write_file(folder / "job.toml", job.to_toml(given=True))


def submitted(script: str, *options: str) -> str:
    """`submit`, whose RuntimeError is a JobError."""
    with job_errors(f"{script} was not submitted: "):
        return slurm.submit(script, *options)


def _submit(script: str) -> int:
    if ours := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        note(f"{', '.join(ours)} of this shell win over the script's own options")
    number = submitted(script)
    note(f"its log: {os.path.dirname(script)}/job-{number}*.out")
    print(number)
    return ExitCode.DONE
