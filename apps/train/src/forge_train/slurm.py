"""`forge-train slurm`: the batch script of a job, written into its run directory, shown, submitted or run at a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from forge_resilience import ExitCode, slurm
from forge_resilience.slurm import JobFacts, SlurmConfig
from forge_train._shared.atomic import write_file
from forge_train._shared.problems import Problem, invalid
from forge_train._shared.toml_files import flatten
from forge_train.build.layout import layout_problems
from forge_train.build.resolve import ResolvedJob, resolve, resolve_to_show
from forge_train.build.run_directory import RunDirectory
from forge_train.config.layers import Layers
from forge_train.errors import ConfigError, config_errors, job_errors, refuse
from forge_train.process import note

__all__ = ["add_site", "check_limits", "job_facts", "refuse_layouts", "submitted", "with_retries"]

#: Scripts of a run's jobs, in <run.dir>/slurm.
_JOB, _ORCHESTRATED, _ORCHESTRATOR = "job.sh", "orchestrated.sh", "orchestrator.sh"


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The flags of the verb, beside the keys of the configuration."""

    submit: bool = False
    """submit the script and print the id of the job"""
    interactive: bool = False
    """run the job at this terminal, by salloc and srun"""
    orchestrate: bool = False
    """keep the job running on as many nodes of --sizes as there are: from this terminal, or with --submit from a small job of
    its own"""
    sizes: str | None = None
    """numbers of nodes for --orchestrate, such as 32,24,16"""
    dry_run: bool = False
    """show the script and write nothing; the data need not be there"""
    site: str | None = None
    """site file, or its name in ~/.config/forge (default: FORGE_SITE, site)"""


def run_slurm(layers: Layers, flags: SlurmFlags) -> int:
    """Do what `flags` say with the job of `layers`. ConfigError for a job that could not run on these nodes."""
    refuse(_flag_problems(flags))
    add_site(layers, flags.site)
    job, missing = resolve_to_show(layers) if flags.dry_run else (resolve(layers), ())
    for problem in missing:
        note(f"data is not checked: {problem}")
    with config_errors("slurm"):
        scripts, command = _orchestrated(job, flags) if flags.orchestrate else _scripts(job, flags)
    shown, *_ = scripts.values()
    if flags.dry_run:
        print((f"# {shlex.join(command)}\n" if flags.interactive else "") + shown, end="")
        return ExitCode.DONE

    # jobs of the run's own name are found again by an orchestrator: they may be there
    facts = job_facts(job)
    names = [_JOB, _ORCHESTRATOR] + [_ORCHESTRATED] * (not flags.orchestrate)
    queued = [] if flags.interactive else slurm.jobs_of(*map(facts.path_of, names))
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


def _flag_problems(flags: SlurmFlags) -> Iterator[Problem]:
    for name in ("interactive", "dry_run"):
        if flags.submit and getattr(flags, name):
            rule = "must go without --submit"
            yield Problem(f"--{name}", "excludes", ..., rule, "leave one out")
    if flags.orchestrate != (flags.sizes is not None):
        key, other = ("--orchestrate", "--sizes")[:: 1 if flags.orchestrate else -1]
        fix = "give both: --orchestrate --sizes 4,3,2"
        yield Problem(key, "requires", ..., f"must go with {other}", fix)
    if flags.orchestrate and flags.interactive:
        yield Problem(
            "--interactive", "batch", ..., "must go without --orchestrate", "leave it out"
        )

    words = [] if flags.sizes is None else flags.sizes.split(",")
    numbers = all(word.isdecimal() and 1 <= int(word) <= 10**6 for word in words)
    if not numbers or len(set(words)) < len(words):
        rule, fix = "must be different numbers of nodes", "use --sizes 32,24,16"
        yield Problem("--sizes", "type", flags.sizes, rule, fix)


def _scripts(job: ResolvedJob, flags: SlurmFlags) -> tuple[dict[str, str], list[str]]:
    """{path of a script: its text}, and for a terminal the command that runs it there."""
    refuse_layouts(job)
    # else an error when the job starts, hours later
    RunDirectory(job.config.run.dir).allowed_changes(job)
    facts, config = job_facts(job), with_retries(job)
    if config.array_run_dirs:
        own = f"--run.dir={facts.run_dir}/task-%a"
        config = replace(config, array_arguments=(own, *config.array_arguments))
    check_limits(config, facts)
    if flags.interactive:
        salloc, text = slurm.interactive_commands(config, _command(config, facts), facts)
        return {salloc[-1]: text}, salloc
    return {facts.script: slurm.batch_script(config, _command(config, facts), facts)}, []


def _orchestrated(job: ResolvedJob, flags: SlurmFlags) -> tuple[dict[str, str], list[str]]:
    """As `_scripts`, of a job that is kept in the queue at its legal sizes: by the command, or by a small job."""
    if job.config.slurm.array:
        rule = "must go without --orchestrate"
        raise invalid("slurm.array", "batch", ..., rule, "leave it out", kind=ConfigError)
    sizes = _legal_sizes(job, [int(word) for word in (flags.sizes or "").split(",")])
    facts, small = job_facts(job, _ORCHESTRATED), job_facts(job, _ORCHESTRATOR)
    config = replace(with_retries(job), on_stop="leave", nodes=max(sizes))
    check_limits(config, facts)

    name, journal = slurm.chain_name(facts.run_dir), str(RunDirectory(facts.run_dir).events)
    command = slurm.orchestrator_command(config, facts.script, sizes, name, journal)
    scripts = {facts.script: slurm.batch_script(config, _command(config, facts), facts)}
    small = replace(small, checkpoints=None, save_limit_seconds=1, supervisor=())
    text = slurm.batch_script(slurm.small_job(config), command, small)
    return scripts | ({small.script: text} if flags.submit else {}), command


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


def _command(config: SlurmConfig, facts: JobFacts) -> list[str]:
    return [config.python, "-m", "forge_train", "run", facts.path_of("job.toml")]


def check_limits(config: SlurmConfig, facts: JobFacts) -> None:
    """ConfigError for a time limit that leaves no time for a save; warnings of kills that do not, and of a job without GPUs."""
    if config.time_limit is None and (
        problem := slurm.limit_problem(facts.lead_seconds, config.partition)
    ):
        refuse([problem.under("slurm")])
    for warning in slurm.job_warnings(config, facts.save_limit_seconds):
        note(warning)


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


def job_facts(job: ResolvedJob, script: str = _JOB) -> JobFacts:
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
            os.path.join(run_dir, "slurm", script),
            os.getcwd(),
            job.config.resilience.save_limit_seconds,
            supervisor=supervisor,
            broken_nodes=(sys.executable, "-m", "forge_resilience.health"),
        )


def with_retries(job: ResolvedJob) -> SlurmConfig:
    """The description with restarts of crashes: a supervisor of one node of several cannot start the others' ranks again, so
    that the script does it for all of them."""
    config, watch = job.config.slurm, job.config.resilience.watch
    if watch.action == "restart" and config.node_range[1] > 1 and not config.retries:
        return replace(config, retries=watch.max_restarts)
    return config


def _write(scripts: dict[str, str], job: ResolvedJob) -> None:
    """Write scripts, and the configuration as it is now: editing CONFIG changes no job that waits in the queue."""
    folder = Path(next(iter(scripts))).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in scripts.items():
            write_file(Path(path), text)
        write_file(folder / "job.toml", job.to_toml(given=True))
    except OSError as error:
        value, rule = str(folder.parent), f"cannot be written ({error.strerror})"
        raise invalid(
            "run.dir", "write", value, rule, "choose another", kind=ConfigError
        ) from error


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
