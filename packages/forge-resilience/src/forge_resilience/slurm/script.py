"""The batch script of a job that goes on after each stop: text from a description, for any command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence

from forge_resilience._shared.problems import invalid
from forge_resilience.exit_codes import ExitCode
from forge_resilience.slurm.config import JobFacts, SlurmConfig, seconds_of
from forge_resilience.slurm.quote import directive, expanded

__all__ = ["batch_script", "interactive_commands"]

#: Exit codes that starting again does not fix.
_FINAL = sorted({code for code in ExitCode if code > 1} - {ExitCode.REQUEUE})

#: Variables in which srun reads its options about GPUs, and sbatch leaves those of the job: SLURM_GPUS of --gpus.
_OF_GPUS = ("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GPU_BIND", "GPU_FREQ", "CPUS_PER_GPU",
            "NTASKS_PER_GPU", "GRES", "TRES_PER_TASK")  # fmt: skip

_START = r"""
# Slurm starts a script elsewhere when its folder is missing on the node, where relative paths name other files.
cd -- {working_dir} || exit {config_error}
run={run_dir}
job={job}
chain=${{FORGE_CHAIN:-$job}}  # the first job of resubmitted ones: their lives are counted together
lives={folder}/lives-$chain  # a line for each life: the newest checkpoint when it began
script={script}
life_began=$(printf '%(%FT%T)T' -1)
unset FORGE_CHAIN

say() {{ printf '%(%FT%T)T forge: %s\n' -1 "$*" >&2; }}
"""

_PROGRESS = r"""
newest() {{  # change time and name of the newest committed checkpoint; 'none' before the first
  local found
  found=$(stat --format='%.Y %n' -- "$run"/{checkpoints} 2>/dev/null | sort -n | tail -n 1)
  printf '%s\n' "${{found:-none}}"
}}

stuck() {{  # whether the last two lives began with the checkpoint that is still the newest
  local now begun=()
  now=$(newest)
  mapfile -t begun < <(tail -n 2 -- "$lives" 2>/dev/null)
  [[ ${{#begun[@]}} -eq 2 && ${{begun[0]}} == "$now" && ${{begun[1]}} == "$now" ]]
}}

begin() {{  # count this life, unless the job gets nowhere
  if stuck; then
    say "two lives in a row ended without a new checkpoint ($(newest)): look into the log before starting again"
    exit {no_progress}
  fi
  newest >>"$lives" || say "cannot write $lives: lives are not counted"
}}
"""

_WITHOUT_PROGRESS = r"""
stuck() { false; }  # no pattern of checkpoints was given
begin() { printf 'life in %s\n' "$run" >>"$lives" || say "cannot write $lives: lives are not counted"; }
"""

_AGAIN = r"""
ended_outside() {{  # by scancel, which must be the end, or requeued by somebody already; not at a limit, not preempted
  local state reason preempted
  IFS='|' read -r state reason < <(squeue --noheader --format='%T|%r' --jobs="$job" 2>/dev/null)
  [[ $state == COMPLETING && $reason != TimeLimit ]] || return
  # where preemption cancels jobs (PreemptMode=CANCEL), this is all that tells it from scancel
  preempted=$(SLURM_TIME_FORMAT=standard scontrol show job "$job" 2>/dev/null |
    sed -nE 's/.*\bPreemptTime=([-0-9T:]+).*/\1/p')
  [[ $preempted < $life_began ]]
}}

again() {{  # go on in another life, for the reason $1; never returns
  if ended_outside; then
    say "$1; the job was cancelled, or requeued by somebody else"
    exit {requeue}
  fi
  if stuck; then
    say "$1, but two lives in a row made no new checkpoint ($(newest)): look into the log before starting again"
    exit {no_progress}
  fi
  if ((restarts >= {max_restarts})); then
    say "$1, and was restarted $restarts times, as often as slurm.max_restarts allows: sbatch $script goes on"
    exit {requeue}
  fi
  say "$1: {how}"
{carry_on}  exit {requeue}  # Slurm ends this life now; that it must go on is written in Slurm's books already
}}
"""

_REQUEUE = r"""  local refusal tries
  for ((tries = 1; tries <= 30; tries++)); do
    refusal=$(scontrol requeue "$job" 2>&1) && {{ leave_out; exit {requeue}; }}
    scontrol ping >/dev/null 2>&1 && break  # the controller is there, and refuses
    sleep 10
  done
  ended_outside || say "was not requeued ($refusal): where the site forbids it set slurm.on_stop = 'resubmit'; sbatch $script goes on"
"""

# A new job inherits the environment of sbatch: this job's SLURM_RESTART_COUNT, SLURM_MEM_PER_NODE and the like are not its.
_RESUBMIT = r"""  for name in "${{!SLURM_@}}"; do  # the next job has its own
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
  FORGE_CHAIN=$chain sbatch --dependency="afterany:$job" {element}${{broken:+--exclude="$(excluded)"}} -- "$script" ||
    say "sbatch failed: nothing goes on by itself; sbatch $script does"
"""

_BROKEN = r"""
broken=''  # nodes that this life found broken
excluded() {  # they, and those that the job leaves out already
  local words
  words=$(scontrol --oneliner show job "$job" 2>/dev/null)
  words=${words##* ExcNodeList=}
  words=${words%% *}
  [[ -z $words || $words == '(null)' ]] || printf '%s,' "$words"
  printf '%s\n' "$broken"
}
leave_out() {  # while the requeued job waits until its old credential has expired
  [[ -z $broken ]] || scontrol update JobId="$job" ExcNodeList="$(excluded)" || say "cannot exclude $broken: it may start there"
}
"""

_BROKEN_CODE = """    {hardware})
      if broken=$({command}) && [[ -n $broken ]]; then
        trap '' USR1 TERM INT HUP  # a requeue sends TERM to all processes of the job; scontrol must outlive it
        again "$broken is broken"
      fi
      say "ended with code {hardware}, and no single node is known to be broken"; exit {hardware} ;;
"""

# Slurm forgets a job minutes after its end; whoever submitted it may have been away for longer.
_LEAVE = r"""
write_end() {{ printf '%s %s\n' "$job" "$1" >>{folder}/ends-"$chain"; }}
trap 'write_end "$?"' EXIT
"""

_SIGNALS = r"""
# --signal=B: reaches this shell alone, a time limit's TERM the tasks, too. srun passes USR1 on to all ranks; TERM would make it
# kill them. A signal before the ranks start is remembered. INT and HUP come from scancel --full, which reaches srun, too.
stopped=''
ranks=''
stop() {
  stopped=$1
  say "got $1: telling the ranks to save and leave"
  [[ -z $ranks ]] || kill -USR1 "$ranks" 2>/dev/null
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM
trap 'stop INT' INT
trap 'stop HUP' HUP
"""

_LOST = r"""
nodes_answer() {  # ranks of a dead node only lost a connection; Slurm itself takes minutes to notice
  ((SLURM_JOB_NUM_NODES == 1)) && return
  timeout 60 srun --overlap --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --ntasks-per-node=1 --kill-on-bad-exit=1 true 2>/dev/null
}
"""

_CAUSE = r"""
log=$(readlink "/proc/$$/fd/2")  # srun writes to it, too
code_of_the_first() {  # the code of the rank that left first: srun returns the highest, 143 or 137 of those it then killed
  local first=''
  [[ ! -f $log ]] || first=$(tail -c "+$(($1 + 1))" -- "$log" |
    sed -nE 's/^srun: error: .*: tasks? [-0-9,]+: Exited with exit code ([0-9]+)$/\1/p' | head -n 1)
  printf '%s\n' "${first:-$2}"
}
"""

_LOOP = r"""
exec {{stdout}}>&1
wait_for_ranks() {{  # prints the process id of srun, and at its end its code
  start_ranks >&"$stdout" &
  trap '' USR1 TERM INT HUP
  printf '%s\n' "$!"
  wait "$!"
  printf '%s\n' "$?"
}}
restarts=0
[[ ! -e $lives ]] || restarts=$(wc -l <"$lives")
if ((restarts > {max_restarts})); then  # Slurm itself requeues after a node failure, as often as it happens
  say "was restarted $restarts times, more often than slurm.max_restarts allows: sbatch $script goes on"
  exit {requeue}
fi
for ((attempt = 0; ; attempt++)); do
  begin
  [[ -z $stopped ]] || again "was stopped by $stopped before the ranks started"
  say "job $job, restart $restarts (${{SLURM_RESTART_COUNT:-0}} by Slurm), on $SLURM_JOB_NODELIST"
  written=$(stat --format=%s -- "$log" 2>/dev/null || echo 0)
  # A trap that interrupts bash's wait can lose the code of the child, so a shell without traps waits and writes it to a pipe.
  exec {{codes}}< <(wait_for_ranks)
  read -ru "$codes" ranks
  [[ -z $stopped ]] || kill -USR1 "$ranks" 2>/dev/null  # it came between the lines above
  until read -t 30 -ru "$codes" code; do
    (($? > 128)) || {{ code=137; break; }}  # somebody killed the shell that waits
    # again and again: srun drops a signal that it cannot send to the nodes
    [[ -z $stopped ]] || kill -USR1 "$ranks" 2>/dev/null
  done
  exec {{codes}}<&-
  ranks=''
  [[ $code -lt 128 ]] || code=$(code_of_the_first "$written" "$code")
  case $code in
    0) say "done"; exit 0 ;;
    {requeue}) again "stopped and saved" ;;
{hardware}    {final}) say "ended with code $code, which starting again does not fix"; exit "$code" ;;
  esac
  # ranks that had no handler yet, or were killed behind those that had left already
  [[ -z $stopped || $code -lt 128 ]] || again "was stopped by $stopped (code $code)"
  if ! nodes_answer; then
    # not this job's fault: until Slurm has noticed, minutes later, the next lives meet the dead node again
    sed -i '$s/$/ (lost a node)/' -- "$lives"
    again "lost a node (code $code)"
  fi
  ((attempt < {retries})) || {{ say "ended with code $code"; exit "$code"; }}
  [[ -z $stopped ]] || again "crashed with code $code after $stopped"
  say "crashed with code $code: starting the ranks again, retry $((attempt + 1)) of {retries}"
done
"""


def batch_script(config: SlurmConfig, command: Sequence[str], facts: JobFacts) -> str:
    """The text of a batch script that runs `command` as the ranks of a job, life after life.

    The command saves and exits with 75 when it gets SIGUSR1 or SIGTERM (`StopSignal`), and goes on from its newest
    checkpoint when it is started again. SIGUSR1 is sent again every 30 s until it has left. 75 and a lost node continue the job as `config.on_stop` says, and so does 71, without
    the nodes that `facts.broken_nodes` prints; other codes end it with that code; 70 is the code of two lives in a row without a new checkpoint. Needs bash 4.2, GNU coreutils, Slurm 21.08.
    Raises ValueError for a time limit that leaves no time before the save. The folder of `facts.script` must exist when
    the job starts: its log and its list of lives are written there.
    """
    _check(config, facts)
    hardware = _hardware(config, facts)
    blocks = [
        "#!/bin/bash",
        "\n".join(_directives(config, facts)),
        f"# Written by forge_resilience.slurm. Submit it with: sbatch {shlex.quote(facts.script)}\nset -u",
        _places(config, facts),
        *([_LEAVE.format(folder=_folder(facts))] if config.on_stop == "leave" else []),
        _SIGNALS,
        "\n".join(_surroundings(config, facts)),
        _progress(facts),
        _BROKEN,
        _again(config),
        _LOST,
        _CAUSE,
        "\n".join(_start_ranks(config, command, facts)),
        _LOOP.format(
            requeue=int(ExitCode.REQUEUE),
            hardware=hardware,
            final=" | ".join(
                str(int(code)) for code in _FINAL if not (hardware and code == ExitCode.HARDWARE)
            ),
            retries=config.retries,
            max_restarts=_max_restarts(config),
        ),
    ]
    return "\n\n".join(block.strip("\n") for block in blocks) + "\n"


def interactive_commands(
    config: SlurmConfig, command: Sequence[str], facts: JobFacts
) -> tuple[list[str], str]:
    """(salloc command, script that it runs) for a job at a terminal: one life, no requeue.

    The ranks get USR1 `facts.lead_seconds` before the time limit. The script is to be written to the last word of the
    command. Raises ValueError as `batch_script` does, and for arrays.
    """
    _check(config, facts)
    if config.array:
        fix = "leave it out, or submit the job"
        raise invalid("array", "unsupported", config.array, "needs a batch job", fix)
    salloc = ["salloc", f"--signal=USR1@{facts.lead_seconds}"]
    for option, value in _resources(config, facts):
        salloc.append(option if value is None else f"{option}={value}")
    lines = [
        "#!/bin/bash",
        f"# Written by forge_resilience.slurm; runs inside: {shlex.join(salloc)}",
        "set -u",
        f"cd -- {shlex.quote(facts.working_dir)} || exit {int(ExitCode.CONFIG_ERROR)}",
        *_surroundings(config, facts),
        *_start_ranks(config, command, facts),
        "start_ranks",
    ]
    return [*salloc, "bash", facts.path_of("interactive.sh")], "\n".join(lines) + "\n"


def _check(config: SlurmConfig, facts: JobFacts) -> None:
    seconds = None if config.time_limit is None else seconds_of(config.time_limit)
    if seconds is not None and seconds <= facts.lead_seconds:
        rule = (
            f"must be longer than save_limit_seconds {facts.save_limit_seconds:g} and the minute that Slurm's clock is "
            f"early ({facts.lead_seconds} s): the job would be told to stop at once"
        )
        fix = "use a longer limit or a lower save_limit_seconds"
        raise invalid("time_limit", "lead", config.time_limit, rule, fix)


def _resources(config: SlurmConfig, facts: JobFacts) -> Iterator[tuple[str, str | None]]:
    """(option, value) of what sbatch and salloc are asked for."""
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
    for key, number in (
        ("--cpus-per-task", config.cpus_per_task),
        ("--mem", config.memory),
        ("--time", config.time_limit),
        ("--partition", config.partition),
        ("--account", config.account),
        ("--qos", config.qos),
        ("--mail-user", config.mail_user),
        ("--mail-type", config.mail_type),
    ):
        if number is not None:
            yield key, str(number)
    for option in options:
        name, _, value = option.partition("=")
        yield name, value or None


def _directives(config: SlurmConfig, facts: JobFacts) -> Iterator[str]:
    for option, value in _resources(config, facts):
        yield directive(option, value)
    if config.array:
        yield directive("--array", config.array)
    name = "job-%A_%a.out" if config.array else "job-%j.out"
    yield directive("--output", os.path.dirname(facts.script).replace("%", "%%") + f"/{name}")
    yield "# all lives of a job write one log; without this a requeue empties it"
    yield directive("--open-mode", "append")
    yield "# to this shell, so long before the time limit: save_limit_seconds, and a minute by which Slurm may be late"
    yield directive("--signal", f"B:USR1@{facts.lead_seconds}")
    if config.on_stop == "requeue":
        yield "# a node that fails, and preemption, put the job into the queue again; scontrol requeue needs it, too"
        yield directive("--requeue")
    else:
        yield f"# slurm.on_stop = '{config.on_stop}': a stopped job goes on as another one"
        yield directive("--no-requeue")


def _places(config: SlurmConfig, facts: JobFacts) -> str:
    own = '/"task-$SLURM_ARRAY_TASK_ID"' if config.array_run_dirs else ""
    element = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # the job id of the last element means the whole array"
    return _START.format(
        working_dir=shlex.quote(facts.working_dir),
        run_dir=shlex.quote(facts.run_dir) + own,
        script=shlex.quote(facts.script),
        folder=_folder(facts),
        job=element if config.array else "$SLURM_JOB_ID",
        config_error=int(ExitCode.CONFIG_ERROR),
    )


def _progress(facts: JobFacts) -> str:
    if facts.checkpoints is None:
        return _WITHOUT_PROGRESS
    return _PROGRESS.format(checkpoints=facts.checkpoints, no_progress=int(ExitCode.NO_PROGRESS))


def _surroundings(config: SlurmConfig, facts: JobFacts) -> Iterator[str]:
    """Variables, each with its reason, and the lines of the site."""
    cache = shlex.quote(os.path.join(os.path.dirname(facts.script), "cache"))
    cache = cache if config.cache_dir is None else expanded(config.cache_dir)
    stale = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID FORGE_NPROC"
    yield "# of the shell that submitted: ranks would believe that torchrun started them"
    yield f"unset {stale}"
    yield "# of a job in which this one was submitted: srun takes them as its own options"
    yield "unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_DISTRIBUTION SLURM_HINT SLURM_EXACT \\"
    yield "  SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SLURM_CPU_BIND_VERBOSE"
    asked = {option[2:].upper().replace("-", "_") for option, _ in _resources(config, facts)}
    gpus = " ".join(f"SLURM_{name}" for name in _OF_GPUS if name not in asked)
    yield "# the same of GPUs that this job does not ask for; which ones a rank sees, Slurm tells it when it starts"
    yield f"unset {gpus} \\\n  CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK"
    yield "# the file that a later job, and a resubmission, start from"
    yield f"export FORGE_JOB_SCRIPT={shlex.quote(facts.script)}"
    yield "# lines reach the log when they are printed, not when a buffer is full or lost"
    yield "export PYTHONUNBUFFERED=1"
    yield "# compiled kernels survive a requeue: by default they are in /tmp of a node, and are made again in each life"
    yield f"export TORCHINDUCTOR_CACHE_DIR={cache}/inductor"
    yield f"export TRITON_CACHE_DIR={cache}/triton"
    if config.cpus_per_task:
        yield "# the cores of a rank; torch would start a thread for each core of the node in every rank"
        yield f"export OMP_NUM_THREADS={config.cpus_per_task}"
    if config.prologue:
        yield "# slurm.prologue"
        yield "set +u  # scripts of a site read variables that nobody set"
        yield from config.prologue
        yield "set -u"
    for name, value in config.environment.items():
        yield f"export {name}={expanded(value)}  # slurm.environment"


def _again(config: SlurmConfig) -> str:
    element = '--array="$SLURM_ARRAY_TASK_ID" ' if config.array else ""
    requeue = int(ExitCode.REQUEUE)
    how, carry_on = {
        "requeue": ("back into the queue", _REQUEUE.format(requeue=requeue)),
        "resubmit": ("the next job goes on", _RESUBMIT.format(element=element)),
        "leave": ("leaving with code 75 to whoever submitted this job", ""),
    }[config.on_stop]
    return _AGAIN.format(
        no_progress=int(ExitCode.NO_PROGRESS),
        requeue=requeue,
        max_restarts=_max_restarts(config),
        how=how,
        carry_on=carry_on,
    )


def _max_restarts(config: SlurmConfig) -> int:
    """Lives after the first that the script itself allows; whoever submits them counts them otherwise."""
    return 10**9 if config.on_stop == "leave" else config.max_restarts


def _folder(facts: JobFacts) -> str:
    return shlex.quote(os.path.dirname(facts.script))


def _hardware(config: SlurmConfig, facts: JobFacts) -> str:
    """The case of the code for broken hardware, before that of codes that end the job."""
    if not facts.broken_nodes or config.on_stop == "leave":
        return ""
    words = [expanded(word) for word in config.container]
    words += [shlex.quote(word) for word in facts.broken_nodes]
    return _BROKEN_CODE.format(
        hardware=int(ExitCode.HARDWARE), command=" ".join([*words, '"$run"'])
    )


def _start_ranks(config: SlurmConfig, command: Sequence[str], facts: JobFacts) -> Iterator[str]:
    """The function start_ranks of the script: one srun, with the reason of each option."""
    tasks, cpus = config.ranks_per_node, config.cpus_per_task
    if (
        facts.supervisor
    ):  # one task on each node, which starts its ranks and has the cores of all of them
        command = [*facts.supervisor, "--nproc", str(tasks), "--", *command]
        tasks, cpus = 1, tasks * (cpus or 1)
    words = [expanded(word) for word in config.container]
    words += [shlex.quote(word) for word in command]
    words += [_of_element(word) for word in config.array_arguments]
    options = [
        "--kill-on-bad-exit=1",
        "--export=ALL",
        '--nodes="$SLURM_JOB_NUM_NODES"',
        f"--ntasks=$((SLURM_JOB_NUM_NODES * {tasks}))",
        f"--ntasks-per-node={tasks}",
    ]
    if cpus:
        options.append(f"--cpus-per-task={cpus}")
    options += [expanded(option) for option in config.srun_options]
    yield "start_ranks() {"
    yield "  # kill-on-bad-exit: a rank that dies ends the others, which would wait for it. export: sites and sbatch --export=NONE"
    yield "  # make srun start ranks without these variables. nodes, ntasks: of a range of nodes Slurm counts the fewest."
    if facts.supervisor:
        yield "  # One supervisor on each node starts its ranks: it names a rank that hangs, and starts them again."
    if cpus:
        yield "  # cpus-per-task: srun does not inherit it since 22.05."
    yield "  # exec: signals for $ranks reach srun itself. No pipe: ranks would lose its reader before they have saved."
    yield "  exec srun " + " ".join(options) + " \\"
    yield "    " + " ".join(words)
    yield "}"


def _of_element(word: str) -> str:
    """`word` quoted, with the element of the array for each %a."""
    return '"$SLURM_ARRAY_TASK_ID"'.join(
        shlex.quote(part) if part else "" for part in word.split("%a")
    )
