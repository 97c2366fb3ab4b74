"""What a job asks of Slurm, and how its ranks are started: `SlurmConfig`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.problems import Problem

#: Options of sbatch that a config may not have, because the script sets them or its loop relies on them, and the key to
#: use instead.
_OF_SBATCH = {
    "--nodes": "nodes", "-N": "nodes", "--ntasks": "tasks_per_node", "-n": "tasks_per_node",
    "--ntasks-per-node": "tasks_per_node", "--cpus-per-task": "cpus_per_task", "-c": "cpus_per_task",
    "--time": "time_limit", "-t": "time_limit", "--partition": "partition", "-p": "partition",
    "--account": "account", "-A": "account", "--qos": "qos", "-q": "qos", "--array": "array", "-a": "array",
    "--job-name": "job_name", "-J": "job_name", "--mem": "memory", "--requeue": "on_stop",
    "--no-requeue": "on_stop", "--mail-user": "mail_user", "--mail-type": "mail_type",
    "--signal": "", "--open-mode": "", "--output": "", "-o": "", "--error": "", "-e": "", "--wrap": "",
}  # fmt: skip
_OF_SRUN = {
    "--nodes": "nodes", "-N": "nodes", "--ntasks": "tasks_per_node", "-n": "tasks_per_node",
    "--ntasks-per-node": "tasks_per_node", "--cpus-per-task": "cpus_per_task", "-c": "cpus_per_task",
    "--kill-on-bad-exit": "", "-K": "", "--export": "environment", "--no-kill": "", "-k": "",
}  # fmt: skip
_HETEROGENEOUS = re.compile(r"^(:|hetjob|packjob|--het-group|--pack-group)")
_TIME = re.compile(
    r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<m>\d+)(?::(?P<s>\d+))?)"
)
#: From the signal to the limit beyond the save: Slurm looks at limits once a minute.
_EARLY_SECONDS = 60
_SAVE_SECONDS = (0, 65535 - _EARLY_SECONDS)  # sbatch --signal takes at most 65535 seconds
_FROM_0, _FROM_1 = (0, 10**6), (1, 10**6)
#: Fields of OrchestratorConfig that are flags of `python -m forge_resilience.slurm`, so that a script can pass them on.
FLAGS = ("wait_seconds", "grow_after_seconds", "max_resizes_per_hour", "poll_seconds")


@dataclass(frozen=True)
class OrchestratorConfig(Checked):
    """When a job is submitted at which size, and when it moves to a larger one.

    Raises ValueError with every broken rule. Usage: `OrchestratorConfig(wait_seconds=1800)`.
    """

    wait_seconds: float = field(
        600.0,
        "seconds to wait: the largest size that starts within them is taken, else the one that starts first",
        (0, 10**7),
    )
    grow_after_seconds: float = field(
        900.0, "seconds that the nodes of a larger size must be free", (0, 10**7)
    )
    max_resizes_per_hour: int = field(
        2,
        "times per hour that a job is stopped for a larger size, or withdrawn for a smaller one; 0: never",
        (0, 60),
    )
    poll_seconds: float = field(30.0, "seconds between looks at the queue", (0.1, 3600))
    partition: str | None = field(
        None, "partition of the small job that orchestrates (default: that of the job)"
    )
    time_limit: int | str | None = field(
        None,
        "limit of one attempt of it: minutes or 'D-HH:MM:SS' (default: that of the partition)",
        range="at least 1 minute",
    )


@dataclass(frozen=True)
class SlurmConfig(Checked):
    """The resources of a job, its surroundings on the nodes, and what follows a stop.

    Values of `environment`, `container`, `srun_options` may name variables, `$SCRATCH` or `${SCRATCH}`, which the batch
    script expands; everything else in them is literal. Raises ValueError with every broken rule, one a line.
    Usage: `SlurmConfig(nodes=4, gpus_per_node=8, time_limit="12:00:00", partition="gpu")`.
    """

    nodes: int | str = field(1, range="at least 1")
    """nodes of the job: 4, or a range '3-4' of which Slurm gives what is free"""
    tasks_per_node: int | None = field(None, between=_FROM_1)
    """ranks on each node (default: gpus_per_node, or 1 without)"""
    gpus_per_node: int = field(0, between=_FROM_0)
    """GPUs of each node"""
    gpus_option: str = "--gpus-per-node={gpus}"
    """how this site asks for GPUs, such as '--gres=gpu:h100:{gpus}'"""
    cpus_per_task: int | None = field(None, between=_FROM_1)
    """cores of each rank, also its OMP_NUM_THREADS"""
    memory: str | None = None
    """host memory of each node, as sbatch --mem takes it: '200G', or '0' for all"""
    time_limit: int | str | None = field(None, range="at least 1 minute")
    """limit of one attempt: minutes or 'D-HH:MM:SS' (default: that of the partition)"""
    partition: str | None = None
    """partition of the job (default: that of the site)"""
    account: str | None = None
    """account that pays (default: the user's)"""
    qos: str | None = None
    """quality of service (default: the user's)"""
    job_name: str | None = None
    """name in the queue (default: that of the run's folder)"""
    mail_user: str | None = None
    """address that Slurm writes to"""
    mail_type: str | None = None
    """events that Slurm writes about, such as 'END,FAIL'"""
    array: str | None = None
    """elements of a job array, '0-7' or '1-20%4'; '%1' runs one after another"""
    array_run_dirs: bool = False
    """each element of the array trains in a folder of its own, <run>/task-<number>"""
    array_arguments: tuple[str, ...] = ()
    """arguments added to the command, in which %a is the element: '--run.seed=%a'"""
    sbatch_options: tuple[str, ...] = ()
    """further options of sbatch, such as '--exclude=n7'"""
    srun_options: tuple[str, ...] = ()
    """further options of srun, such as '--cpu-bind=cores'"""
    prologue: tuple[str, ...] = ()
    """shell lines before the ranks start, such as 'module load cuda/12.8'"""
    environment: dict[str, str] = field(dict)
    """variables of the ranks, set after the script's own"""
    container: tuple[str, ...] = ()
    """command before that of each rank, such as ['apptainer', 'exec', '--nv', '$SCRATCH/torch.sif']"""
    cache_dir: str | None = None
    """folder of compiled kernels, kept from attempt to attempt (default: slurm/cache in the run's folder)"""
    on_stop: Literal["requeue", "resubmit", "leave"] = "requeue"
    """how a stopped job goes on: its own requeue, or a new job after it, where a site forbids requeues; leave: it
    ends with code 75, for an orchestrator. The latter two set --no-requeue: a first node that dies ends the job"""
    max_restarts: int = field(1000, between=_FROM_0)
    """attempts after the first, retries included; a job that stops once more ends with 75, and its orchestrator with 1"""
    retries: int = field(0, between=_FROM_0)
    """times that crashed ranks are started again on the same nodes, without a requeue; each counts as an attempt, for
    max_restarts and for the limit of two without a new checkpoint"""
    orchestrator: OrchestratorConfig = field(OrchestratorConfig)
    """of --orchestrate"""

    def _problems(self) -> Iterator[Problem]:
        for rules in (_number_problems, _text_problems, _option_problems, _array_problems):
            yield from rules(self)

    @property
    def python(self) -> str:
        """The interpreter of the ranks: this one, or that of a container."""
        return "python" if self.container else sys.executable

    @property
    def node_range(self) -> tuple[int, int]:
        """(fewest, most) nodes."""
        low, _, high = str(self.nodes).partition("-")
        return int(low), int(high or low)

    @property
    def ranks_per_node(self) -> int:
        """Tasks of a node: those that are set, else one for each GPU, else 1."""
        return self.tasks_per_node or self.gpus_per_node or 1


@dataclass(frozen=True)
class JobFacts(Checked):
    """Paths and limits of one job; paths are absolute, and every node sees them.

    run_dir: folder of the run. script: where its batch script is kept, for a resubmission and for people.
    working_dir: where the command runs.
    supervisor: a command that starts the ranks of a node, given `--nproc N -- COMMAND`: srun then starts one of it on each
    node, such as `("python", "-m", "forge_resilience.supervise")`, instead of the ranks.
    broken_nodes: a command that gets run_dir as its last argument and prints, with commas between them, the nodes that the
    last attempt found broken; it fails if it knows of none. After code 71 the job goes on without them (empty: 71 ends it).
    """

    run_dir: str
    script: str
    working_dir: str
    save_limit_seconds: float = field(300.0, between=_SAVE_SECONDS, positive=True)
    """longest time from a stop signal to the end of the save that it asks for"""
    checkpoints: str | None = "checkpoints/step-*/manifest.json"
    """pattern, below run_dir, of a file that each committed checkpoint has, by default of forge-ckpt. Its newest change
    is the progress of an attempt: where no file matches, two stops in a row end the job with 70. None: nothing looks"""
    supervisor: tuple[str, ...] = ()
    broken_nodes: tuple[str, ...] = ()

    def _problems(self) -> Iterator[Problem]:
        for name in ("run_dir", "script", "working_dir"):
            if not (path := getattr(self, name)).startswith("/") or "\n" in path:
                rule = "must be an absolute path without line breaks"
                yield Problem(name, "path", path, rule, "write it out")

        pattern = self.checkpoints or "x"
        if not re.fullmatch(r"[\w.*?/\-\[\]]+", pattern) or pattern.startswith("/"):
            rule = "must be a pattern below run_dir of letters, digits and ./*?[]-"
            fix = "name a file of each checkpoint, such as 'checkpoint-*/trainer_state.json'"
            yield Problem("checkpoints", "pattern", pattern, rule, fix)

    def path_of(self, name: str) -> str:
        """The path of a file next to the script."""
        return os.path.join(os.path.dirname(self.script), name)

    @property
    def lead_seconds(self) -> int:
        """Seconds before the time limit at which the job is asked to stop."""
        return int(-(-self.save_limit_seconds // 1)) + _EARLY_SECONDS


def seconds_of(time_limit: int | str) -> int | None:
    """A time limit of Slurm in seconds; None if unlimited or invalid.

    `90` and `"90"` are minutes, `"90:30"` minutes and seconds, `"1-12"` days and hours.
    """
    match = _TIME.fullmatch(str(time_limit))
    if match is None:
        return None
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    hours = 24 * part["d"] + part["dh"] + part["h"]
    minutes = 60 * hours + part["dm"] + part["hm"] + part["m"]
    return 60 * minutes + part["ds"] + part["hs"] + part["s"]


def _number_problems(c: SlurmConfig) -> Iterator[Problem]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(c.nodes))
    if match is None or int(match[1]) < 1 or int(match[2] or match[1]) < int(match[1]):
        rule = "must be a number or a range such as '3-4'"
        yield Problem("nodes", "format", c.nodes, rule, "use nodes = 1")

    limit = "UNLIMITED" if c.time_limit is None else c.time_limit
    if str(limit).upper() not in ("UNLIMITED", "INFINITE") and not seconds_of(limit):
        rule, fix = "must be minutes or 'D-HH:MM:SS'", "use '12:00:00' for twelve hours"
        yield Problem("time_limit", "format", limit, rule, fix)


def _text_problems(c: SlurmConfig) -> Iterator[Problem]:
    """Values that would end a directive, or a line of the script, before its end."""
    for name in ("partition", "account", "qos", "mail_user", "mail_type", "memory"):
        value = getattr(c, name)
        if value is not None and not re.fullmatch(r"[^\s'\"\\#]+", value):
            rule = "must be one word without quotes"
            yield Problem(name, "word", value, rule, "write what Slurm calls it")

    broken = [("job_name", c.job_name), ("cache_dir", c.cache_dir), ("gpus_option", c.gpus_option)]
    lists = ("sbatch_options", "srun_options", "container", "prologue", "array_arguments")
    broken += [(name, text) for name in lists for text in getattr(c, name)]
    broken += [(f"environment.{name}", text or "empty") for name, text in c.environment.items()]
    for name, text in broken:
        if text is not None and (not text.strip() or "\n" in text or "\0" in text):
            rule, fix = "must be one line that is not empty", "leave it out, or write a line each"
            yield Problem(name, "line", text, rule, fix)
    if not re.fullmatch(r"[^{}]*(\{gpus\}[^{}]*)+", c.gpus_option):
        rule = "must contain {gpus} for their number, and no other braces"
        fix = "use '--gres=gpu:{gpus}'"
        yield Problem("gpus_option", "placeholder", c.gpus_option, rule, fix)

    for name in c.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            rule, fix = "must be the name of a variable", "use letters, digits and underscores"
            yield Problem(f"environment.{name}", "name", ..., rule, fix)
    if c.mail_type and not c.mail_user:
        rule, fix = "needs an address", "set mail_user, too"
        yield Problem("mail_type", "requires", c.mail_type, rule, fix)


def _option_problems(c: SlurmConfig) -> Iterator[Problem]:
    for key, owned in (("sbatch_options", _OF_SBATCH), ("srun_options", _OF_SRUN)):
        for option in getattr(c, key):
            name = option.partition("=")[0].split()[0] if option.strip() else ""
            if _HETEROGENEOUS.match(name) or " : " in option:
                rule = "makes a heterogeneous job, which is not supported"
                yield Problem(key, "heterogeneous", option, rule, "ask for nodes of one kind")
            elif not name.startswith("-"):
                fix = "write each option with its value, as '--exclude=n7'"
                yield Problem(key, "dash", option, "must begin with a dash", fix)
            elif name in owned:
                fix = f"set {owned[name]}" if owned[name] else "leave it out"
                yield Problem(key, "owned", option, "would undo what the script relies on", fix)
    yield from _container_problems(c.container)


def _container_problems(words: Sequence[str]) -> Iterator[Problem]:
    """`bash -c` takes the command as its own arguments, and a pipe hides signals and the exit code."""
    shell = bool(words) and words[0].rpartition("/")[2] in ("sh", "bash", "zsh", "dash")
    if shell and "-c" in words:
        rule = "must end so that the command can follow, and a shell -c loses signals and exit code"
        fix = 'name a script whose last line is: exec "$@"'
        yield Problem("container", "shell", shlex.join(words), rule, fix)
    if "|" in words:
        rule = "must be one command, and a pipe loses signals"
        yield Problem(
            "container", "pipe", list(words), rule, "the batch script keeps the log anyway"
        )


def _array_problems(c: SlurmConfig) -> Iterator[Problem]:
    if c.array is None:
        for name in ("array_run_dirs", "array_arguments"):
            if value := getattr(c, name):
                yield Problem(name, "requires", value, "belongs to an array", "set array, too")
        return
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", c.array):
        fix = "use '0-7' or '1-20%4'"
        yield Problem("array", "format", c.array, "must be as sbatch takes it", fix)
    elif not c.array_run_dirs and not c.array.endswith("%1") and not c.array.isdecimal():
        one = c.array.partition("%")[0]
        rule = "runs elements at once in one run's folder, which only one job may use"
        fix = f"set array_run_dirs = true, or array = '{one}%1' for one element after another"
        yield Problem("array", "run_dirs", c.array, rule, fix)
