"""The rank and the world size of this process, read from the environment alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from forge_parallel._shared.problems import invalid

Environ = Mapping[str, str]
Launcher = Literal["none", "torchrun", "slurm", "environment"]
LOOPBACK = "127.0.0.1"
STORE_FD = "FORGE_STORE_FD"
"""Set by a launcher on this host: for rank 0 a descriptor that listens on MASTER_PORT already, else empty."""
RUN_NAME = "FORGE_RUN_NAME"
"""Set by a launcher to a new random name; ranks started by hand may be given one, the same to all."""

_FIX = (
    "start every rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use torchrun or srun"
)
_PORTS = (20000, 10007)  # the first, and how many: below Linux's ephemeral ports, a prime


@dataclass(frozen=True)
class World:
    """This process among the processes of its job.

    `address` and `port` are where rank 0 (or torchrun's agent) is met; with one rank they mean
    nothing. `local_rank` counts the ranks on this host: the index of a rank's GPU.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    address: str = LOOPBACK
    port: int = 0
    launcher: Launcher = "none"

    @property
    def where(self) -> str:
        """`address:port`."""
        return f"{self.address}:{self.port}"


def is_loopback(address: str) -> bool:
    """True for an address that means the host on which it is read."""
    return address in ("localhost", "::1") or address.startswith("127.")


def find_world(environ: Environ = os.environ) -> World:
    """The world that `environ` describes. No torch; the network only to look up a Slurm node's name.

    In this order: torchrun (TORCHELASTIC_RUN_ID), RANK with its companions, a Slurm step
    (SLURM_STEP_ID; an sbatch script without srun is none), one process. Raises ValueError, with
    variable, value, rule and fix, for a half-set or contradicting environment.
    Usage: `world = find_world()`.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_ranks(environ, "torchrun")
    if "RANK" in environ:
        return _from_ranks(environ, "environment")
    if _in_step(environ):
        return _from_step(environ)
    if environ.get("WORLD_SIZE", "1") != "1":
        rule = "is set and RANK is not, so this process cannot know which rank it is"
        fix = f"{_FIX}, or unset WORLD_SIZE for one process"
        raise invalid("WORLD_SIZE", "requires", environ["WORLD_SIZE"], rule, fix)
    return World()


def _from_ranks(environ: Environ, launcher: Launcher) -> World:
    world_size = _integer(environ, "WORLD_SIZE", least=1)
    rank = _integer(environ, "RANK", below=("WORLD_SIZE", world_size))
    alone = world_size == 1
    address = environ.get("MASTER_ADDR") or (LOOPBACK if alone else "")
    if not address:
        rule = f"must be set for {world_size} ranks and is not"
        raise invalid("MASTER_ADDR", "missing", ..., rule, _FIX)
    number = 0 if alone and "MASTER_PORT" not in environ else _port(environ)
    local_rank, local_world_size = _local(environ, rank, world_size, address)
    return World(rank, world_size, local_rank, local_world_size, address, number, launcher)


def _local(environ: Environ, rank: int, world_size: int, address: str) -> tuple[int, int]:
    """(local_rank, local_world_size): LOCAL_* if set, else what a loopback address or Slurm implies."""
    implied: dict[str, str] = {}
    if is_loopback(address):
        implied = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    elif _in_step(environ):
        local_rank, size = _local_in_step(environ, world_size)
        implied = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size)}
    elif "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        return 0, 1  # one rank per host; two on one GPU are found at the check-in
    known = {**implied, **environ}
    size = _integer(known, "LOCAL_WORLD_SIZE", least=1)
    if size > world_size:
        rule = f"must be at most WORLD_SIZE {world_size}"
        raise invalid("LOCAL_WORLD_SIZE", "world_size", size, rule, _FIX)
    return _integer(known, "LOCAL_RANK", below=("LOCAL_WORLD_SIZE", size)), size


def _in_step(environ: Environ) -> bool:
    """True in a task of srun; False in an sbatch script, a salloc shell, and outside Slurm.

    Seen on Slurm 22.05: an sbatch script has SLURM_PROCID=0 and SLURM_NTASKS=4 although it is one
    process, and so has the shell of salloc; only a step has SLURM_STEP_ID. The interactive step of
    `salloc` has one from the reserved range, with SLURM_STEP_NUM_TASKS=1 beside the job's SLURM_NTASKS.
    """
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def _from_step(environ: Environ) -> World:
    """The world of a task of one `srun`. MASTER_ADDR and MASTER_PORT win over what follows from the step.

    Raises ValueError for variables that are missing or contradict each other.
    """
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, name, least=1)
    if environ.get("WORLD_SIZE", str(world_size)) != str(world_size):
        rule = f"must equal {name} {world_size} in a Slurm step"
        fix = "unset it, or set RANK as well"
        raise invalid("WORLD_SIZE", "mismatch", environ["WORLD_SIZE"], rule, fix)
    rank = _integer(environ, "SLURM_PROCID", below=(name, world_size))
    if world_size == 1:
        return World(launcher="slurm")
    local_rank, size = _local_in_step(environ, world_size)
    number = _port(environ) if "MASTER_PORT" in environ else _step_port(environ)
    address = environ.get("MASTER_ADDR") or _address(environ, size == world_size)
    return World(rank, world_size, local_rank, size, address, number, "slurm")


def _local_in_step(environ: Environ, world_size: int) -> tuple[int, int]:
    """This task's index on its node and the tasks there, of a step of `world_size` tasks."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = tasks_per_node(text)
    if sum(counts) != world_size:
        rule = f"must add up to the step's {world_size} tasks"
        raise invalid("SLURM_STEP_TASKS_PER_NODE", "mismatch", text, rule, _FIX)
    node = _integer(environ, "SLURM_NODEID", below=("the nodes of the step,", len(counts)))
    size = counts[node]
    return _integer(environ, "SLURM_LOCALID", below=("the node's tasks,", size)), size


def _step_port(environ: Environ) -> int:
    """A port that every task of a step computes alike, and another for each job, step and requeue.

    SLURM_JOB_ID differs between the elements of an array. SLURM_RESTART_COUNT is unset until the
    first requeue.
    """
    job = _integer(environ, "SLURM_JOB_ID")
    step = _integer(environ, "SLURM_STEP_ID")
    restarts = _integer({"SLURM_RESTART_COUNT": "0", **environ}, "SLURM_RESTART_COUNT")
    first, count = _PORTS
    return first + (7 * job + step + 3 * restarts) % count


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is [2, 2, 2, 1]. Raises ValueError for anything else."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            rule = "must read like 2(x3),1"
            raise invalid("SLURM_STEP_TASKS_PER_NODE", "syntax", text, rule, _FIX)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `rack1-n[003-007,9],login` is `rack1-n003`.

    The first of a range is its first number as written, so the list need not be expanded. Raises
    ValueError for an empty or unbalanced list.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes.strip())
    if first is None or nodes.count("[") != nodes.count("]"):
        rule = "must be a list such as n[1-4]"
        raise invalid("SLURM_STEP_NODELIST", "syntax", nodes, rule, _FIX)
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


def _integer(
    environ: Environ, name: str, *, least: int = 0, below: tuple[str, int] | None = None
) -> int:
    """`environ[name]` as an int of at least `least`, and below a (name, value) if one is given.

    Raises ValueError that names the variable, its value, the rule and the fix.
    """
    if name not in environ:
        raise invalid(name, "missing", ..., "must be set here and is not", _FIX)
    text = environ[name]
    try:
        value = int(text)
    except ValueError:
        raise invalid(name, "type", text, "must be an integer", _FIX) from None
    if value < least:
        raise invalid(name, "range", value, f"must be at least {least}", _FIX)
    if below is not None and value >= below[1]:
        raise invalid(name, "below", value, f"must be below {below[0]} {below[1]}", _FIX)
    return value


def _port(environ: Environ) -> int:
    """MASTER_PORT as a port number. Raises ValueError as `_integer` does."""
    return _integer(environ, "MASTER_PORT", least=1, below=("the end of the port range,", 65536))
