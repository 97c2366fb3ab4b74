#!/bin/bash
# Sections of the batch script. `#@ NAME` begins a section, and script.py replaces each __NAME__. All sections together are
# one valid script, so that shellcheck reads this file.
# shellcheck disable=SC2242,SC2329  # exit codes are placeholders; of two sections that define a function, a job has one
#@ start
# Slurm starts a script elsewhere when its folder is missing on the node, where relative paths name other files.
cd -- __WORKING_DIR__ || exit __CONFIG_ERROR__
run=__RUN_DIR__
job=__JOB__
chain=${FORGE_CHAIN:-$job}  # the first job of resubmitted ones, or the name of an orchestrated run: one count of attempts
attempts=__FOLDER__/lives-$chain  # a line for each attempt: the newest checkpoint when it began
script=__SCRIPT__
attempt_began=$(printf '%(%FT%T)T' -1)
unset FORGE_CHAIN

say() { printf '%(%FT%T)T forge: %s\n' -1 "$*" >&2; }

#@ record_end
write_end() { printf '%s %s\n' "$job" "$1" >>__FOLDER__/ends-"$chain"; }
trap 'write_end "$?"' EXIT

#@ signals
# --signal=B: reaches only this shell, a time limit's TERM the tasks, too. srun passes USR1 on to all ranks; TERM would make it
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

#@ environment
# of the shell that submitted: ranks would take them as set by torchrun
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID FORGE_NPROC
# of a job in which this one was submitted: srun takes them as its own options
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_DISTRIBUTION SLURM_HINT SLURM_EXACT \
  SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SLURM_CPU_BIND_VERBOSE
# the same of GPUs that this job does not ask for; Slurm sets which ones a rank sees when it starts
unset __GPUS__ \
  CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK
# the file that a later job, and a resubmission, start from
export FORGE_JOB_SCRIPT=__SCRIPT__
# lines reach the log when they are printed, not when a buffer is full or lost
export PYTHONUNBUFFERED=1
# compiled kernels survive a requeue: by default they are in /tmp of a node, and are made again in each attempt
export TORCHINDUCTOR_CACHE_DIR=__CACHE__/inductor
export TRITON_CACHE_DIR=__CACHE__/triton
#@ environment_cores
# the cores of a rank; torch would start a thread for each core of the node in every rank
export OMP_NUM_THREADS=__CORES__
#@ prologue
# slurm.prologue
set +u  # scripts of a site read variables that are not set
__PROLOGUE__
set -u

#@ progress
newest() {  # change time and name of the newest committed checkpoint; 'none' before the first
  local found
  found=$(stat --format='%.Y %n' -- "$run"/__CHECKPOINTS__ 2>/dev/null | sort -n | tail -n 1)
  printf '%s\n' "${found:-none}"
}

require_progress() {  # end the job if its last two attempts began with the checkpoint that is still the newest; $1: the state
  local now begun=()
  now=$(newest)
  mapfile -t begun < <(tail -n 2 -- "$attempts" 2>/dev/null)
  [[ ${#begun[@]} -eq 2 && ${begun[0]} == "$now" && ${begun[1]} == "$now" ]] || return 0
  say "$1, but two attempts in a row made no new checkpoint $run/__CHECKPOINTS__ (newest: $now): look into the log, then" \
    "delete $attempts and start again; a program that saves other files needs JobFacts.checkpoints"
  exit __NO_PROGRESS__
}

begin() {  # count this attempt
  require_progress "the next attempt was to begin"
  newest >>"$attempts" || say "cannot write $attempts: attempts are not counted"
}

#@ no_checkpoints
require_progress() { :; }  # no pattern of checkpoints was given
begin() { printf 'life in %s\n' "$run" >>"$attempts" || say "cannot write $attempts: attempts are not counted"; }

#@ exclude_nodes
broken=''  # nodes that this attempt found broken
excluded() {  # those nodes, and the nodes that the job leaves out already
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

#@ again
ended_outside() {  # by scancel, which must be the end, or requeued already; not at a limit, not preempted
  local state reason preempted
  IFS='|' read -r state reason < <(squeue --noheader --format='%T|%r' --jobs="$job" 2>/dev/null)
  [[ $state == COMPLETING && $reason != TimeLimit ]] || return
  # where preemption cancels jobs (PreemptMode=CANCEL), this is all that tells it from scancel
  preempted=$(SLURM_TIME_FORMAT=standard scontrol show job "$job" 2>/dev/null |
    sed -nE 's/.*\bPreemptTime=([-0-9T:]+).*/\1/p')
  [[ $preempted < $attempt_began ]]
}

again() {  # go on in another attempt, for the reason $1; never returns
  if ended_outside; then
    say "$1; the job was cancelled, or requeued by another command"
    exit __REQUEUE__
  fi
  require_progress "$1"
  if ((restarts >= __MAX_RESTARTS__)); then
    say "$1, and was restarted $restarts times, as often as slurm.max_restarts allows: sbatch $script goes on"
    exit __REQUEUE__
  fi
  say "$1: __HOW__"
#@ again_requeue
  local answer tries
  for ((tries = 1; tries <= 30; tries++)); do
    answer=$(scontrol requeue "$job" 2>&1) && { leave_out; exit __REQUEUE__; }
    scontrol ping >/dev/null 2>&1 && break  # the controller answers and rejects it
    sleep 10
  done
  ended_outside || say "was not requeued ($answer): where the site forbids it set slurm.on_stop = 'resubmit'; sbatch $script goes on"
#@ again_resubmit
  for name in "${!SLURM_@}"; do  # the next job has its own
    [[ $name == SLURM_CONF ]] || unset "$name"
  done
  FORGE_CHAIN=$chain sbatch --dependency="afterany:$job" __ELEMENT__${broken:+--exclude="$(excluded)"} -- "$script" ||
    say "sbatch failed: nothing goes on by itself; sbatch $script does"
#@ again_end
  exit __REQUEUE__  # Slurm ends this attempt now; that it must go on is written in Slurm's records already
}

#@ lost_node
nodes_answer() {  # ranks of a dead node only lost a connection; Slurm itself takes minutes to notice
  ((SLURM_JOB_NUM_NODES == 1)) && return
  timeout 60 srun --overlap --export=ALL --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    --ntasks-per-node=1 --kill-on-bad-exit=1 true 2>/dev/null
}

#@ first_code
log=$(readlink "/proc/$$/fd/2")  # srun writes to it, too
code_of_the_first() {  # the code of the rank that left first: srun returns the highest, 143 or 137 of those it then killed
  local first=''
  [[ ! -f $log ]] || first=$(tail -c "+$(($1 + 1))" -- "$log" |
    sed -nE 's/^srun: error: .*: tasks? [-0-9,]+: Exited with exit code ([0-9]+)$/\1/p' | head -n 1)
  printf '%s\n' "${first:-$2}"
}

#@ start_ranks
start_ranks() {
  # kill-on-bad-exit: a rank that dies ends the others, which would wait for it. export: sites and sbatch --export=NONE
  # make srun start ranks without these variables. nodes, ntasks: of a range of nodes Slurm counts the fewest.
#@ start_ranks_supervisor
  # One supervisor on each node starts its ranks: it names a rank that hangs, and starts them again.
#@ start_ranks_cores
  # cpus-per-task: srun does not inherit it since 22.05.
#@ start_ranks_end
  # exec: signals for $ranks reach srun itself. No pipe: ranks would lose its reader before they have saved.
  exec srun __SRUN_OPTIONS__ \
    __RANK_COMMAND__
}

#@ loop
exec {stdout}>&1
wait_for_ranks() {  # prints the process id of srun, and at its end its code
  start_ranks >&"$stdout" &
  trap '' USR1 TERM INT HUP
  printf '%s\n' "$!"
  wait "$!"
  printf '%s\n' "$?"
}
restarts=0
[[ ! -e $attempts ]] || restarts=$(wc -l <"$attempts")
if ((restarts > __MAX_RESTARTS__)); then  # Slurm itself requeues after a node failure, as often as it happens
  say "was restarted $restarts times, more often than slurm.max_restarts allows: sbatch $script goes on"
  exit __REQUEUE__
fi
for ((attempt = 0; ; attempt++)); do
  begin
  [[ -z $stopped ]] || again "was stopped by $stopped before the ranks started"
  say "job $job, restart $restarts (${SLURM_RESTART_COUNT:-0} by Slurm), on $SLURM_JOB_NODELIST"
  written=$(stat --format=%s -- "$log" 2>/dev/null || echo 0)
  # A trap that interrupts bash's wait can lose the code of the child, so a shell without traps waits and writes it to a pipe.
  exec {codes}< <(wait_for_ranks)
  read -ru "$codes" ranks
  [[ -z $stopped ]] || kill -USR1 "$ranks" 2>/dev/null  # it came between the lines above
  until read -t 30 -ru "$codes" code; do
    (($? > 128)) || { code=137; break; }  # the shell that waits was killed
    # again and again: srun drops a signal that it cannot send to the nodes
    [[ -z $stopped ]] || kill -USR1 "$ranks" 2>/dev/null
  done
  exec {codes}<&-
  ranks=''
  [[ $code -lt 128 ]] || code=$(code_of_the_first "$written" "$code")
  case $code in
    0) say "done${stopped:+ (a run that $stopped stopped goes on only if it exits with __REQUEUE__)}"; exit 0 ;;
    __REQUEUE__) again "stopped and saved" ;;
#@ loop_hardware
    __HARDWARE__)
      if broken=$(__COMMAND__) && [[ -n $broken ]]; then
        trap '' USR1 TERM INT HUP  # a requeue sends TERM to all processes of the job; scontrol must outlive it
        again "$broken is broken"
      fi
      say "ended with code __HARDWARE__, and no single node is known to be broken"; exit __HARDWARE__ ;;
#@ loop_end
    __END_CODES__) say "ended with code $code, which starting again does not fix"; exit "$code" ;;
  esac
  # ranks that had no handler yet, or were killed after those that had left already
  [[ -z $stopped || $code -lt 128 ]] || again "was stopped by $stopped (code $code)"
  if ! nodes_answer; then
    # not this job's fault: until Slurm has noticed, minutes later, the next attempts meet the dead node again
    sed -i '$s/$/ (lost a node)/' -- "$attempts"
    again "lost a node (code $code)"
  fi
  ((attempt < __RETRIES__)) || {
    say "ended with code $code: a crash is not requeued; slurm.retries (__RETRIES__ here) starts the ranks again on the same nodes"
    exit "$code"
  }
  [[ -z $stopped ]] || again "crashed with code $code after $stopped"
  say "crashed with code $code: starting the ranks again, retry $((attempt + 1)) of __RETRIES__"
done
