"""`forge-train slurm`: the batch script of a job, written into its run directory, shown, submitted or run at a terminal."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import tyro

from forge_resilience import ExitCode
from forge_resilience.slurm import (
    JobFacts,
    SlurmConfig,
    batch_script,
    chain_name,
    clean_environ,
    find_site,
    grace_warnings,
    interactive_commands,
    jobs_of,
    limit_problem,
    read_site,
    submit,
)
from forge_train._shared.atomic import write_file
from forge_train._shared.problems import Problem, invalid
from forge_train._shared.toml_files import flatten
from forge_train.config.layers import Layers
from forge_train.config.resolve import ResolvedJob, resolve, resolve_to_show
from forge_train.errors import ConfigError, JobError, config_errors, refuse
from forge_train.trainer.layout import layout_problems
from forge_train.trainer.run_directory import RunDirectory

__all__ = [
    "add_site",
    "job_facts",
    "look_at_limits",
    "refuse_layouts",
    "two_jobs",
    "with_retries",
]

#: Scripts of a run's jobs, in <run.dir>/slurm.
_SCRIPTS = ("job.sh", "orchestrated.sh", "orchestrator.sh")


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The flags of the verb, beside the keys of the configuration."""

    submit: Annotated[bool, tyro.conf.arg(help="submit the script and print the id of the job")] = (
        False
    )
    interactive: Annotated[
        bool, tyro.conf.arg(help="run the job at this terminal, by salloc and srun")
    ] = False
    orchestrate: Annotated[
        bool,
        tyro.conf.arg(
            help="keep the job running on as many nodes of --sizes as there are: from this terminal, or with --submit from "
            "a small job of its own"
        ),
    ] = False
    sizes: Annotated[
        str | None, tyro.conf.arg(help="numbers of nodes for --orchestrate, such as 32,24,16")
    ] = None
    print: Annotated[
        bool, tyro.conf.arg(help="show the script and write nothing; the data need not be there")
    ] = False
    site: Annotated[
        str | None,
        tyro.conf.arg(help="site file, or its name in ~/.config/forge (default: FORGE_SITE, site)"),
    ] = None


def run_slurm(layers: Layers, flags: SlurmFlags) -> int:
    """Do what `flags` say with the job of `layers`. ConfigError for a job that could not run on these nodes."""
    if flags.submit and (flags.interactive or flags.print):
        key, rule = "--interactive" if flags.interactive else "--print", "must go without --submit"
        raise invalid(key, "excludes", ..., rule, "leave one out", kind=ConfigError)
    add_site(layers, flags.site)
    job, missing = resolve_to_show(layers) if flags.print else (resolve(layers), ())
    for problem in missing:
        print(f"forge-train: data is not checked: {problem}", file=sys.stderr)
    if flags.orchestrate or flags.sizes is not None:
        return _orchestrate(job, flags)
    refuse_layouts(job)
    # else refused when the job starts, hours later
    RunDirectory(job.config.run.dir).allowed_changes(job)
    facts, config = job_facts(job), _elements(job)
    look_at_limits(config, facts)
    with config_errors("slurm"):
        if flags.interactive:
            return _interactive(config, _command(config, facts), facts, job, flags.print)
        text = batch_script(config, _command(config, facts), facts)
    if flags.print:
        print(text, end="")
        return ExitCode.DONE
    queued = [job for name in _SCRIPTS for job in jobs_of(_beside(facts, name))]
    if queued and flags.submit:
        raise ConfigError(two_jobs("run.dir", facts.run_dir, queued))
    _write(facts.script, text, facts, job)
    if flags.submit:
        return _submit(facts)
    for number, state in queued:
        print(
            f"forge-train: job {number} ({state}) reads {_config_file(facts)} at its next start",
            file=sys.stderr,
        )
    print(f"wrote {facts.script}\nsubmit it: sbatch {shlex.quote(facts.script)}")
    return ExitCode.DONE


def _orchestrate(job: ResolvedJob, flags: SlurmFlags) -> int:
    """Keep the job in the queue at its legal sizes, in place of this process or in a small job."""
    sizes = _legal_sizes(job, flags)
    facts = replace(job_facts(job), script=_beside(job_facts(job), "orchestrated.sh"))
    config = replace(_elements(job), on_stop="leave", nodes=max(sizes))
    look_at_limits(config, facts)
    name = chain_name(facts.run_dir)
    command = orchestrator_command(job, facts, sizes, name)
    own = replace(
        facts,
        script=_beside(facts, "orchestrator.sh"),
        checkpoints=None,
        save_limit_seconds=1,
        supervisor=(),
    )
    with config_errors("slurm"):
        text = batch_script(config, _command(config, facts), facts)
        small = batch_script(small_job(config), command, own)
    if flags.print:
        print(text, end="")
        return ExitCode.DONE
    # jobs of the run's own name are found again by an orchestrator: they may be there
    others = [
        found
        for script in ("job.sh", "orchestrator.sh")
        for found in jobs_of(_beside(facts, script))
    ]
    if others:
        raise ConfigError(two_jobs("run.dir", facts.run_dir, others))
    _write(facts.script, text, facts, job)
    if flags.submit:
        _write(own.script, small, facts, job)
        return _submit(own)
    print(shlex.join(command), file=sys.stderr, flush=True)
    os.execvpe(command[0], command, clean_environ())


def _legal_sizes(job: ResolvedJob, flags: SlurmFlags) -> list[int]:
    """Numbers of nodes on which the job can run; others are skipped with a warning."""
    if not flags.orchestrate or flags.sizes is None:
        key, other = ("--orchestrate", "--sizes")[:: 1 if flags.orchestrate else -1]
        rule, fix = f"must go with {other}", "give both: --orchestrate --sizes 4,3,2"
        raise invalid(key, "requires", ..., rule, fix, kind=ConfigError)
    if flags.interactive or job.config.slurm.array:
        key, rule = (
            "--interactive" if flags.interactive else "slurm.array",
            "must go without --orchestrate",
        )
        raise invalid(key, "batch", ..., rule, "leave it out", kind=ConfigError)
    words = flags.sizes.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 10**6 for word in words) or len(
        set(words)
    ) < len(words):
        rule, fix = "must be different numbers of nodes", "use --sizes 32,24,16"
        raise invalid("--sizes", "type", flags.sizes, rule, fix, kind=ConfigError)
    per_node = job.config.slurm.ranks_per_node
    problems = {
        int(word): layout_problems(job.config, int(word) * per_node, per_node) for word in words
    }
    wrong = [replace(p, origin=f"--sizes {n}") for n, found in problems.items() for p in found]
    legal = [size for size, found in problems.items() if not found]
    refuse([] if legal else wrong)
    for problem in wrong:
        print(f"forge-train: left out: {problem}", file=sys.stderr)
    return legal


def orchestrator_command(
    job: ResolvedJob, facts: JobFacts, sizes: list[int], name: str
) -> list[str]:
    """The command that orchestrates: the leaf's own, which imports no torch."""
    config = job.config.slurm
    keys = ("wait_seconds", "grow_after_seconds", "max_resizes_per_hour", "poll_seconds")
    command = [sys.executable, "-m", "forge_resilience.slurm", facts.script, "--name", name]
    command += ["--sizes", ",".join(map(str, sizes)), "--max-restarts", str(config.max_restarts)]
    command += ["--journal", str(RunDirectory(facts.run_dir).events)]
    for key in keys:
        command += [f"--{key.replace('_', '-')}", str(getattr(config.orchestrator, key))]
    return command


def small_job(config: SlurmConfig) -> SlurmConfig:
    """One core of one node, in the surroundings of the job; it goes on after each of its own ends."""
    own = config.orchestrator
    return SlurmConfig(
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=1,
        time_limit=own.time_limit,
        partition=own.partition or config.partition,
        account=config.account,
        qos=config.qos,
        prologue=config.prologue,
        environment=config.environment,
        max_restarts=10**6,
    )


def _beside(facts: JobFacts, name: str) -> str:
    return os.path.join(os.path.dirname(facts.script), name)


def two_jobs(key: str, folder: str, queued: list[tuple[str, str]]) -> list[Problem]:
    """A problem for each job that is in the queue for this folder already."""
    rule = "has job {} in the queue ({}), and two jobs cannot train one run"
    fix = "scancel it first, or choose another folder"
    return [Problem(key, "queued", folder, rule.format(*job), fix) for job in queued]


def _command(config: SlurmConfig, facts: JobFacts) -> list[str]:
    python = "python" if config.container else sys.executable
    return [python, "-m", "forge_train", "run", _config_file(facts)]


def look_at_limits(config: SlurmConfig, facts: JobFacts) -> None:
    """Refuse a time limit, and warn of kills, that leave no time for a save; say what a job asks for that names no GPU."""
    if config.time_limit is None:
        problem = limit_problem(facts.lead_seconds, config.partition)
        refuse([] if problem is None else [problem.under("slurm")])
    warnings = grace_warnings(facts.save_limit_seconds, config.partition)
    if not config.gpus_per_node and not any("gpu" in option for option in config.sbatch_options):
        limit = "that of the partition" if config.time_limit is None else config.time_limit
        warnings.append(
            f"the job asks for no GPU: nodes {config.nodes}, tasks on each {config.ranks_per_node}, time limit {limit}; set "
            "more in [slurm], or once for all jobs in a site file (forge-train doctor --init)"
        )
    for warning in warnings:
        print(f"forge-train: {warning}", file=sys.stderr)


def add_site(layers: Layers, name: str | None) -> None:
    """Lay the site below the job: it gives the keys of [slurm] that the job leaves open."""
    with config_errors():
        path = find_site(name)
        table = {} if path is None else read_site(path)
    for key, value in flatten(table):
        if f"slurm.{key}" not in layers.origins:
            layers.set(f"slurm.{key}", value, f"site {path}")


def refuse_layouts(job: ResolvedJob) -> None:
    """Refuse numbers of nodes on which the ranks would end with a ConfigError, hours later."""
    config = job.config.slurm
    per_node = config.ranks_per_node
    low, high = config.node_range
    found: dict[str, Problem] = {}
    for nodes in dict.fromkeys((low, high)):
        problems = layout_problems(job.config, nodes * per_node, per_node)
        found |= {str(problem): problem for problem in problems}
    refuse(found.values())


def job_facts(job: ResolvedJob) -> JobFacts:
    """The places of a job's script, its logs and its run."""
    run_dir = os.path.abspath(job.config.run.dir)
    with config_errors():
        return JobFacts(
            run_dir=run_dir,
            script=os.path.join(run_dir, "slurm", "job.sh"),
            working_dir=os.getcwd(),
            save_limit_seconds=job.config.resilience.save_limit_seconds,
            supervisor=_supervisor(job, run_dir),
            broken_nodes=(sys.executable, "-m", "forge_resilience.health"),
        )


def _supervisor(job: ResolvedJob, run_dir: str) -> tuple[str, ...]:
    """The command of a supervisor of a node's ranks, which starts them again; empty unless the job asks for one."""
    watch, config = job.config.resilience.watch, job.config.slurm
    if watch.action != "restart":
        return ()
    words = ["python" if config.container else sys.executable, "-m", "forge_resilience.supervise"]
    for item in fields(watch):
        value = getattr(watch, item.name)
        if item.name == "limits":
            value = ",".join(f"{phase}={seconds}" for phase, seconds in value.items())
        if value != "":
            words.append(f"--{item.name}={value}")
    if not config.array_run_dirs:  # else each element has a journal of its own
        words.append(f"--journal={RunDirectory(run_dir).events}")
    return (*words, "--expect_heartbeats")


def _elements(job: ResolvedJob) -> SlurmConfig:
    """The description with the folder of each element of an array among its arguments, and restarts of crashes."""
    config = with_retries(job)
    if not config.array_run_dirs:
        return config
    own = f"--run.dir={os.path.abspath(job.config.run.dir)}/task-%a"
    return replace(config, array_arguments=(own, *config.array_arguments))


def with_retries(job: ResolvedJob) -> SlurmConfig:
    """The description with restarts of crashes: a supervisor of one node of several cannot start the others' ranks again, so
    that the script does it for all of them."""
    config, watch = job.config.slurm, job.config.resilience.watch
    if watch.action == "restart" and config.node_range[1] > 1 and not config.retries:
        return replace(config, retries=watch.max_restarts)
    return config


def _config_file(facts: JobFacts) -> str:
    return os.path.join(os.path.dirname(facts.script), "job.toml")


def _write(path: str, text: str, facts: JobFacts, job: ResolvedJob) -> None:
    """Write a script, and the configuration as it is now: editing CONFIG changes no job that waits in the queue."""
    folder = Path(facts.script).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(Path(path), text)
        write_file(Path(_config_file(facts)), job.to_toml(given=True))
    except OSError as error:
        key, rule = "run.dir", f"cannot be written ({error.strerror})"
        raise invalid(
            key, "write", facts.run_dir, rule, "choose another", kind=ConfigError
        ) from error


def _submit(facts: JobFacts) -> int:
    ours = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    if ours:
        print(
            f"forge-train: {', '.join(ours)} of this shell win over the script's own options",
            file=sys.stderr,
        )
    try:
        number = submit(facts.script)
    except RuntimeError as error:
        raise JobError([f"{facts.script} was not submitted: {error}"]) from error
    print(
        f"forge-train: its log: {os.path.dirname(facts.script)}/job-{number}*.out", file=sys.stderr
    )
    print(number)
    return ExitCode.DONE


def _interactive(
    config: SlurmConfig, command: list[str], facts: JobFacts, job: ResolvedJob, show: bool
) -> int:
    salloc, text = interactive_commands(config, command, facts)
    if show:
        print(f"# {shlex.join(salloc)}\n{text}", end="")
        return ExitCode.DONE
    _write(salloc[-1], text, facts, job)
    print(shlex.join(salloc), file=sys.stderr, flush=True)
    try:
        os.execvpe(salloc[0], salloc, clean_environ())
    except FileNotFoundError:
        raise JobError(
            ["salloc is not on this machine; run this on a login node of the cluster"]
        ) from None
