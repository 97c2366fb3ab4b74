"""The world of a Slurm step: the tasks of one `srun`.

Seen on Slurm 22.05: an sbatch script has SLURM_PROCID=0 and SLURM_NTASKS=4 although it is one process,
and so has the shell of salloc; only a step has SLURM_STEP_ID. The interactive step of `salloc` has a
SLURM_STEP_ID from the reserved range with SLURM_STEP_NUM_TASKS=1 beside the job's SLURM_NTASKS.
"""

from __future__ import annotations

import re
import socket
import subprocess

from forge_parallel.start.world import LOOPBACK, Environ, World, integer, port

_FIX = "start the ranks with srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
_PORTS = (20000, 10007)  # the first, and how many: below Linux's ephemeral ports, a prime


def in_step(environ: Environ) -> bool:
    """True in a task of srun; False in an sbatch script, a salloc shell, and outside Slurm."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def find(environ: Environ) -> World:
    """The world of this task. MASTER_ADDR and MASTER_PORT win over what follows from the step.

    Raises ValueError for variables that are missing or contradict each other.
    """
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = integer(environ, name, _FIX, least=1)
    if environ.get("WORLD_SIZE", str(world_size)) != str(world_size):
        raise ValueError(
            f"WORLD_SIZE {environ['WORLD_SIZE']!r} must equal {name} {world_size} in a Slurm step; "
            "unset it, or set RANK as well"
        )
    rank = integer(environ, "SLURM_PROCID", _FIX, below=(name, world_size))
    if world_size == 1:
        return World(launcher="slurm")
    local_rank, size = local_rank_and_size(environ, world_size)
    number = port(environ, _FIX) if "MASTER_PORT" in environ else step_port(environ)
    address = environ.get("MASTER_ADDR") or _address(environ, size == world_size)
    return World(rank, world_size, local_rank, size, address, number, "slurm")


def local_rank_and_size(environ: Environ, world_size: int) -> tuple[int, int]:
    """This task's index on its node and the tasks there, of a step of `world_size` tasks."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = tasks_per_node(text)
    if sum(counts) != world_size:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE {text!r} must add up to the step's {world_size} tasks; {_FIX}"
        )
    node = integer(environ, "SLURM_NODEID", _FIX, below=("the nodes of the step,", len(counts)))
    size = counts[node]
    return integer(environ, "SLURM_LOCALID", _FIX, below=("the node's tasks,", size)), size


def step_port(environ: Environ) -> int:
    """A port that every task of a step computes alike, and another for each job, step and requeue.

    SLURM_JOB_ID differs between the elements of an array. SLURM_RESTART_COUNT is unset until the
    first requeue.
    """
    job = integer(environ, "SLURM_JOB_ID", _FIX)
    step = integer(environ, "SLURM_STEP_ID", _FIX)
    restarts = integer({"SLURM_RESTART_COUNT": "0", **environ}, "SLURM_RESTART_COUNT", _FIX)
    first, count = _PORTS
    return first + (7 * job + step + 3 * restarts) % count


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is [2, 2, 2, 1]. Raises ValueError for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE {text!r} must read like 2(x3),1; {_FIX}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `rack1-n[003-007,9],login` is `rack1-n003`.

    The first of a range is its first number as written, so the list need not be expanded. Raises
    ValueError for an empty or unbalanced list.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes.strip())
    if first is None or nodes.count("[") != nodes.count("]"):
        raise ValueError(f"SLURM_STEP_NODELIST {nodes!r} must be a list such as n[1-4]; {_FIX}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _address(environ: Environ, one_node: bool) -> str:
    if one_node:
        return LOOPBACK
    host = first_host(environ.get("SLURM_STEP_NODELIST", ""))
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # node names need not be host names; Slurm knows the address
        return _node_address(host) or host
    return host


def _node_address(node: str) -> str | None:
    """The NodeAddr that Slurm has for `node`; None where scontrol is absent, slow or fails."""
    command = ["scontrol", "show", "node", node, "--oneliner"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found else None
