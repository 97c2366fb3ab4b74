"""The batch script of a job that goes on after each stop, for any command; its bash is in batch.sh."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_resilience._shared.problems import invalid
from forge_resilience.exit_codes import FINAL_CODES, ExitCode
from forge_resilience.local_workers import words_of
from forge_resilience.slurm.config import JobFacts, SlurmConfig, seconds_of

#: Options of sbatch and salloc for keys of SlurmConfig; None leaves one out, so that Slurm's default holds.
_RESOURCES = {
    "--cpus-per-task": "cpus_per_task", "--mem": "memory", "--time": "time_limit", "--partition": "partition",
    "--account": "account", "--qos": "qos", "--mail-user": "mail_user", "--mail-type": "mail_type",
}  # fmt: skip
#: Variables in which srun reads its options about GPUs, and sbatch leaves those of the job: SLURM_GPUS of --gpus.
_OF_GPUS = ("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GPU_BIND", "GPU_FREQ", "CPUS_PER_GPU",
            "NTASKS_PER_GPU", "GRES", "TRES_PER_TASK")  # fmt: skip


def batch_script(config: SlurmConfig, command: Sequence[str], facts: JobFacts) -> str:
    """Return the text of a batch script that runs `command` as the ranks of a job, attempt after attempt.

    The command saves and exits with 75 when it gets SIGUSR1 or SIGTERM (`StopSignal`), and goes on from its newest
    checkpoint when it is started again. SIGUSR1 is sent again every 30 s until it has left.

    75 and a lost node continue the job as `config.on_stop` says, and so does 71, without the nodes that
    `facts.broken_nodes` prints. Other codes end it with that code. 70 is the code of two attempts in a row without a new
    checkpoint. Needs bash 4.2, GNU coreutils, Slurm 21.08.

    srun starts a task for each rank, with Slurm's variables alone; `facts.supervisor` sets RANK and the others of torch. Raises
    ValueError for a time limit that leaves no time before the save, and for a command that is one text, or torchrun on
    nodes of several tasks, each of which would start ranks. The folder of `facts.script` must exist when
    the job starts: its log and its list of attempts are written there.
    """
    _check_time_limit(config, facts)
    _check_command(config, command)
    values = _values(config, command, facts)
    hardware = ["loop_hardware"] if _excludes_nodes(config, facts) else []
    leaves = config.on_stop == "leave"
    carry_on = [] if leaves else [f"again_{config.on_stop}"]

    blocks = [
        "#!/bin/bash",
        "\n".join(_directives(config, facts)),
        f"# Written by forge_resilience.slurm. Submit it with: sbatch {shlex.quote(facts.script)}\nset -u",
        _fill(values, "start"),
        *([_fill(values, "record_end")] if leaves else []),
        _fill(values, "signals"),
        _environment(config, values),
        _fill(values, "no_checkpoints" if facts.checkpoints is None else "progress"),
        _fill(values, "exclude_nodes"),
        _fill(values, "again", *carry_on, "again_end"),
        _fill(values, "lost_node"),
        _fill(values, "first_code"),
        _start_ranks(config, facts, values),
        _fill(values, "loop", *hardware, "loop_end"),
    ]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _check_command(config: SlurmConfig, command: Sequence[str]) -> None:
    """ValueError for a command that is one text, or torchrun on several tasks of a node."""
    torchrun = {"torchrun", "torch.distributed.run"} & {
        os.path.basename(word) for word in words_of(command)
    }
    if torchrun and config.ranks_per_node > 1:
        rule = f"starts ranks itself, and srun starts it {config.ranks_per_node} times on each node"
        fix = "give the command of one rank, or tasks_per_node = 1"
        raise invalid("command", "launcher", shlex.join(command), rule, fix)


def interactive_commands(
    config: SlurmConfig, command: Sequence[str], facts: JobFacts
) -> tuple[list[str], str]:
    """Return (salloc command, script that it runs) for a job at a terminal: one attempt, no requeue.

    The ranks get USR1 `facts.lead_seconds` before the time limit. The script is to be written to the last word of the
    command. Raises ValueError as `batch_script` does, and for arrays.
    """
    _check_time_limit(config, facts)
    _check_command(config, command)
    if config.array:
        fix = "leave it out, or submit the job"
        raise invalid("array", "unsupported", config.array, "needs a batch job", fix)

    values = _values(config, command, facts)
    salloc = ["salloc", f"--signal=USR1@{facts.lead_seconds}"]
    salloc += [o if value is None else f"{o}={value}" for o, value in _resources(config, facts)]

    lines = [
        "#!/bin/bash",
        f"# Written by forge_resilience.slurm; runs inside: {shlex.join(salloc)}",
        "set -u",
        f"cd -- {shlex.quote(facts.working_dir)} || exit {int(ExitCode.CONFIG_ERROR)}",
        _environment(config, values),
        _start_ranks(config, facts, values),
        "start_ranks",
    ]
    return [*salloc, "bash", facts.path_of("interactive.sh")], "\n".join(lines) + "\n"


def _check_time_limit(config: SlurmConfig, facts: JobFacts) -> None:
    """ValueError for a time limit that leaves no time before the save."""
    seconds, lead = seconds_of(config.time_limit or ""), facts.lead_seconds
    if seconds is not None and seconds <= lead:
        save = f"save_limit_seconds {facts.save_limit_seconds:g}"
        early = f"the minute that Slurm's clock is early ({lead} s)"
        rule = f"must be longer than {save} and {early}: the job would be asked to stop at once"
        fix = "use a longer limit or a lower save_limit_seconds"
        raise invalid("time_limit", "lead", config.time_limit, rule, fix)


def _resources(config: SlurmConfig, facts: JobFacts) -> Iterator[tuple[str, str | None]]:
    """Yield (option, value) for sbatch and salloc."""
    yield "--job-name", config.job_name or os.path.basename(facts.run_dir) or "forge"
    yield "--nodes", str(config.nodes)
    low, high = config.node_range
    if low < high and config.ranks_per_node == 1:
        # with --ntasks-per-node=1 Slurm (22.05) gives the fewest nodes of a range, though all are idle
        yield "--mincpus", str(config.cpus_per_task or 1)
    else:
        yield "--ntasks-per-node", str(config.ranks_per_node)

    options = list(config.sbatch_options)
    if config.gpus_per_node:
        options.insert(0, config.gpus_option.format(gpus=config.gpus_per_node))
    for key, name in _RESOURCES.items():
        if (value := getattr(config, name)) is not None:
            yield key, str(value)

    for option in options:
        name, _, value = option.partition("=")
        yield name, value or None


def _directives(config: SlurmConfig, facts: JobFacts) -> Iterator[str]:
    """The #SBATCH lines, with reasons."""
    for option, value in _resources(config, facts):
        yield directive(option, value)
    if config.array:
        yield directive("--array", config.array)
    name = "job-%A_%a.out" if config.array else "job-%j.out"
    yield directive("--output", os.path.dirname(facts.script).replace("%", "%%") + f"/{name}")

    yield "# all attempts of a job write one log; without this a requeue empties it"
    yield directive("--open-mode", "append")
    yield "# to this shell, so long before the time limit: save_limit_seconds, and a minute by which Slurm may be late"
    yield directive("--signal", f"B:USR1@{facts.lead_seconds}")

    if config.on_stop == "requeue":
        yield "# a node that fails, and preemption, put the job into the queue again; scontrol requeue needs it, too"
        yield directive("--requeue")
    else:
        yield f"# slurm.on_stop = '{config.on_stop}': a stopped job goes on as another one"
        yield directive("--no-requeue")


# ---- batch.sh


def _fill(values: Mapping[str, object], *names: str) -> str:
    """Concatenate sections of batch.sh and replace their placeholders."""
    text = Path(__file__).with_name("batch.sh").read_text(encoding="utf-8")
    _, *parts = re.split(r"^#@ (\w+)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2]))
    joined = "".join(sections[name].rstrip("\n") + "\n" for name in names)
    return re.sub(r"__([A-Z_]+)__", lambda found: str(values[found[1]]), joined).rstrip("\n")


def _values(config: SlurmConfig, command: Sequence[str], facts: JobFacts) -> dict[str, object]:
    """The placeholders of batch.sh."""
    folder = os.path.dirname(facts.script)
    cache = shlex.quote(os.path.join(folder, "cache"))
    task = '/"task-$SLURM_ARRAY_TASK_ID"' if config.array_run_dirs else ""
    element = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the job id of the last element means the whole array"
    how = {"requeue": "back into the queue", "resubmit": "the next job goes on"}
    how["leave"] = "leaving with code 75 to whoever submitted this job"

    own_cases = {ExitCode.DONE, ExitCode.REQUEUE}
    if _excludes_nodes(config, facts):
        own_cases.add(ExitCode.HARDWARE)
    asked = {option[2:].upper().replace("-", "_") for option, _ in _resources(config, facts)}
    options, ranks = _srun(config, command, facts)

    return {
        **{code.name: int(code) for code in ExitCode},
        "WORKING_DIR": shlex.quote(facts.working_dir),
        "RUN_DIR": shlex.quote(facts.run_dir) + task,
        "SCRIPT": shlex.quote(facts.script),
        "FOLDER": shlex.quote(folder),
        "JOB": element if config.array else "$SLURM_JOB_ID",
        "CACHE": cache if config.cache_dir is None else expanded(config.cache_dir),
        "GPUS": " ".join(f"SLURM_{name}" for name in _OF_GPUS if name not in asked),
        "CORES": config.cpus_per_task,
        "PROLOGUE": "\n".join(config.prologue),
        "CHECKPOINTS": facts.checkpoints,
        "HOW": how[config.on_stop],
        "ELEMENT": '--array="$SLURM_ARRAY_TASK_ID" ' if config.array else "",
        "COMMAND": _bash_command(config, facts.broken_nodes) + ' "$run"',
        "END_CODES": " | ".join(str(int(code)) for code in sorted(FINAL_CODES - own_cases)),
        "RETRIES": config.retries,
        # whoever submits a job that leaves counts its attempts
        "MAX_RESTARTS": 10**9 if config.on_stop == "leave" else config.max_restarts,
        "SRUN_OPTIONS": " ".join(options),
        "RANK_COMMAND": ranks,
    }


def _excludes_nodes(config: SlurmConfig, facts: JobFacts) -> bool:
    """Whether the script itself starts the job again without broken nodes."""
    return bool(facts.broken_nodes) and config.on_stop != "leave"


def _environment(config: SlurmConfig, values: Mapping[str, object]) -> str:
    """Variables of the ranks, and the lines of the site."""
    cores = ["environment_cores"] if config.cpus_per_task else []
    prologue = ["prologue"] if config.prologue else []
    set_to = {name: expanded(value) for name, value in config.environment.items()}
    own = [f"export {name}={value}  # slurm.environment" for name, value in set_to.items()]
    return "\n".join([_fill(values, "environment", *cores, *prologue), *own])


def _start_ranks(config: SlurmConfig, facts: JobFacts, values: Mapping[str, object]) -> str:
    """The function start_ranks of the script: one srun, with the reason of each option."""
    supervisor = ["start_ranks_supervisor"] if facts.supervisor else []
    cores = ["start_ranks_cores"] if config.cpus_per_task or facts.supervisor else []
    return _fill(values, "start_ranks", *supervisor, *cores, "start_ranks_end")


def _srun(config: SlurmConfig, command: Sequence[str], facts: JobFacts) -> tuple[list[str], str]:
    """(options of srun, command of a task in bash)."""
    tasks, cpus = config.ranks_per_node, config.cpus_per_task
    # one supervisor on each node starts its ranks and has the cores of all of them
    if facts.supervisor:
        command = [*facts.supervisor, "--nproc", str(tasks), "--", *command]
        tasks, cpus = 1, tasks * (cpus or 1)

    options = [
        "--kill-on-bad-exit=1",
        "--export=ALL",
        '--nodes="$SLURM_JOB_NUM_NODES"',
        f"--ntasks=$((SLURM_JOB_NUM_NODES * {tasks}))",
        f"--ntasks-per-node={tasks}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *map(expanded, config.srun_options),
    ]
    words = [_bash_command(config, command), *map(_of_element, config.array_arguments)]
    return options, " ".join(words)


def _bash_command(config: SlurmConfig, command: Sequence[str]) -> str:
    """A command as the ranks run it: in the container, quoted for bash."""
    return " ".join([*map(expanded, config.container), *map(shlex.quote, command)])


def _of_element(word: str) -> str:
    """Quote `word` for bash, with the element of the array for each %a."""
    parts = (part and shlex.quote(part) for part in word.split("%a"))
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts)


def expanded(text: str) -> str:
    """Quote `text` as one word of bash that expands only a leading `~/`, `$NAME` and `${NAME}`."""
    text = "$HOME" + text[1:] if text.startswith("~/") else text
    text = re.sub(r'([\\"`])', r"\\\1", text)
    return '"' + re.sub(r"\$(?!\w|\{\w+\})|\$(?=\d)", r"\\$", text) + '"'


def directive(option: str, value: str | None = None) -> str:
    """Return a line `#SBATCH --option=value`; sbatch reads quotes and backslashes as a shell does, and no variables."""
    if value is None:
        return f"#SBATCH {option}"
    if not re.fullmatch(r"[\w./:@,+%=\-]+", value, re.ASCII):
        value = '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'
    return f"#SBATCH {option}={value}"
