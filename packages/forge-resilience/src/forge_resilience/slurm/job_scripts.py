"""The batch scripts of a run's jobs, from the flags of a trainer's verb.

flags = SlurmFlags(submit=True)
raise_problems("", flags.problems())
scripts, command = make_scripts(flags, config, facts, ["python", "train.py"])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_resilience._shared.problems import Problem, invalid, raise_problems
from forge_resilience.slurm.client import jobs_of
from forge_resilience.slurm.config import FLAGS, JobFacts, SlurmConfig
from forge_resilience.slurm.orchestrate import chain_name
from forge_resilience.slurm.script import batch_script, interactive_commands
from forge_resilience.slurm.site import job_warnings, limit_problem

if TYPE_CHECKING:
    from forge_resilience.supervise.watch import WatchConfig

#: Scripts of a run's jobs: in one folder, so each needs a name of its own.
_JOB, _ORCHESTRATED, _ORCHESTRATOR = "job.sh", "orchestrated.sh", "orchestrator.sh"


@dataclass(frozen=True, kw_only=True)
class SlurmFlags:
    """The flags of a verb that starts jobs."""

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
    """site file, or its name in ~/.config/forge; without it FORGE_SITE, site"""

    @property
    def nodes(self) -> list[int]:
        """The numbers of `sizes`."""
        return [int(word) for word in (self.sizes or "").split(",") if word]

    def problems(self) -> Iterator[Problem]:
        """Yield problems of flags that exclude or require each other."""
        for name in ("interactive", "dry_run"):
            if self.submit and getattr(self, name):
                rule = "must go without --submit"
                yield Problem(f"--{name}", "excludes", ..., rule, "leave one out")
        if self.orchestrate != (self.sizes is not None):
            key, other = ("--orchestrate", "--sizes")[:: 1 if self.orchestrate else -1]
            fix = "give both: --orchestrate --sizes 4,3,2"
            yield Problem(key, "requires", ..., f"must go with {other}", fix)
        if self.orchestrate and self.interactive:
            rule = "must go without --orchestrate"
            yield Problem("--interactive", "batch", ..., rule, "leave it out")

        words = [] if self.sizes is None else self.sizes.split(",")
        numbers = all(word.isdecimal() and 1 <= int(word) <= 10**6 for word in words)
        if not numbers or len(set(words)) < len(words):
            rule, fix = "must be different numbers of nodes", "use --sizes 32,24,16"
            yield Problem("--sizes", "type", self.sizes, rule, fix)


def check_limits(config: SlurmConfig, facts: JobFacts) -> list[str]:
    """Return warnings of kills that leave no time for a save, and of a job without GPUs.

    Raises ValueError for a time limit that leaves none.

    Asks Slurm, where there is one.
    """
    if config.time_limit is None:
        problem = limit_problem(facts.lead_seconds, config.partition)
        raise_problems("", [] if problem is None else [problem])
    return job_warnings(config, facts.save_limit_seconds)


def with_retries(config: SlurmConfig, watch: WatchConfig) -> SlurmConfig:
    """Set `retries` from the supervisor's limit where a job has several nodes: a supervisor of one node cannot start the
    ranks of other nodes again, so the script does it."""
    if watch.action == "restart" and config.node_range[1] > 1 and not config.retries:
        return replace(config, retries=watch.max_restarts)
    return config


def make_scripts(
    flags: SlurmFlags,
    config: SlurmConfig,
    facts: JobFacts,
    command: Sequence[str],
    sizes: Sequence[int] = (),
    journal: str = "",
    warn: Callable[[str], None] = print,
) -> tuple[dict[str, str], list[str]]:
    """Return {path of a script: its text}, and the command that a terminal runs, if the flags ask for one.

    An orchestrated job is kept in the queue at one of `sizes`, by the command or by a small job that runs it, and `journal`
    gets an event for each action. `warn` gets what `check_limits` returns. ValueError for a job that cannot run.
    """
    if flags.orchestrate:
        if config.array:
            raise invalid("array", "batch", ..., "must go without --orchestrate", "leave it out")
        config = replace(config, on_stop="leave", nodes=max(sizes))
    elif config.array_run_dirs:
        own = f"--run.dir={facts.run_dir}/task-%a"
        config = replace(config, array_arguments=(own, *config.array_arguments))
    for warning in check_limits(config, facts):
        warn(warning)
    if flags.interactive:
        salloc, text = interactive_commands(config, command, facts)
        return {salloc[-1]: text}, salloc

    facts = replace(facts, script=facts.path_of(_ORCHESTRATED if flags.orchestrate else _JOB))
    scripts = {facts.script: batch_script(config, command, facts)}
    if not flags.orchestrate:
        return scripts, []
    name = chain_name(facts.run_dir)
    orchestrator = orchestrator_command(config, facts.script, sizes, name, journal)
    if flags.submit:
        path = facts.path_of(_ORCHESTRATOR)
        small = replace(facts, script=path, checkpoints=None, save_limit_seconds=1, supervisor=())
        scripts[path] = batch_script(small_job(config), orchestrator, small)
    return scripts, orchestrator


def queued_jobs(flags: SlurmFlags, facts: JobFacts) -> list[tuple[str, str]]:
    """Return (id, state) of this run's jobs in the queue, without those that an orchestrator finds again."""
    names = [_JOB, _ORCHESTRATOR] + [_ORCHESTRATED] * (not flags.orchestrate)
    return [] if flags.interactive else jobs_of(*map(facts.path_of, names))


def small_job(config: SlurmConfig) -> SlurmConfig:
    """Return the resources of the orchestrator's own job: one core of one node, restarted after each end."""
    own = config.orchestrator
    kept = {name: getattr(config, name) for name in ("account", "qos", "prologue", "environment")}
    kept |= {"time_limit": own.time_limit, "partition": own.partition or config.partition}
    return SlurmConfig(**kept, tasks_per_node=1, cpus_per_task=1, max_restarts=10**6)


def orchestrator_command(
    config: SlurmConfig, script: str, sizes: Sequence[int], name: str, journal: str
) -> list[str]:
    """Return the command that keeps a script's job in the queue on one of `sizes` nodes: `orchestrate`, without torch."""
    flags: dict[str, Any] = {"name": name, "sizes": ",".join(map(str, sizes)), "journal": journal}
    flags |= {"max-restarts": config.max_restarts}
    flags |= {key.replace("_", "-"): getattr(config.orchestrator, key) for key in FLAGS}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "forge_resilience.slurm", script, *words]
