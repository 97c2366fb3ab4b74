"""Rank and world size of this process, read from the environment only; no import of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from forge_parallel._shared.launch import LOOPBACK, first_address, step_port
from forge_parallel._shared.problems import invalid

Environ = Mapping[str, str]
Launcher = Literal["none", "torchrun", "slurm", "environment"]

_FIX = (
    "start every rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use torchrun or srun"
)
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """This process among the processes of its job.

    `address` and `port` are where rank 0, or torchrun's agent, hosts the store; unused with one rank. `local_rank`
    counts the ranks on this host: it is the index of a rank's GPU.
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
    """Whether an address means the host on which it is read."""
    return address in ("localhost", "::1") or address.startswith("127.")


def find_world(environ: Environ = os.environ) -> World:
    """Return the world that `environ` describes.

        world = find_world()

    Looks in this order for torchrun (TORCHELASTIC_RUN_ID), RANK with its companions, a Slurm step (SLURM_STEP_ID; an
    sbatch script without srun has none), and one process. Uses the network only to look up a Slurm node's name. Raises
    ValueError, with variable, value, rule and fix, for an environment that is incomplete or contradicts itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_ranks(environ, "torchrun")
    if "RANK" in environ:
        return _from_ranks(environ, "environment")
    if _in_step(environ):
        return _from_step(environ)
    if environ.get("WORLD_SIZE", "1") != "1":
        rule = "is set and RANK is not, so the rank of this process is unknown"
        fix = f"{_FIX}, or unset WORLD_SIZE for one process"
        raise invalid("WORLD_SIZE", "requires", environ["WORLD_SIZE"], rule, fix)
    return World()


def _from_ranks(environ: Environ, launcher: Launcher) -> World:
    """World of a process with RANK and WORLD_SIZE."""
    world_size = _integer(environ, "WORLD_SIZE", least=1)
    rank = _integer(environ, "RANK", below=("WORLD_SIZE", world_size))
    address = environ.get("MASTER_ADDR") or (LOOPBACK if world_size == 1 else "")
    if not address:
        rule = f"must be set for {world_size} ranks and is not"
        raise invalid("MASTER_ADDR", "missing", ..., rule, _FIX)
    port = 0 if world_size == 1 and "MASTER_PORT" not in environ else _port(environ)

    # LOCAL_* if set, else the numbers that a loopback address or Slurm implies
    implied: tuple[int, ...]
    if is_loopback(address):
        implied = rank, world_size
    elif _in_step(environ):
        implied = _local_in_step(environ, world_size)
    elif any(name in environ for name in _LOCAL):
        implied = ()  # both must be set
    else:
        implied = 0, 1  # one rank per host; the check-in finds two ranks on one GPU

    known = {**dict(zip(_LOCAL, map(str, implied))), **environ}
    size = _integer(known, "LOCAL_WORLD_SIZE", least=1)
    if size > world_size:
        rule = f"must be at most WORLD_SIZE {world_size}"
        raise invalid("LOCAL_WORLD_SIZE", "world_size", size, rule, _FIX)
    local_rank = _integer(known, "LOCAL_RANK", below=("LOCAL_WORLD_SIZE", size))
    return World(rank, world_size, local_rank, size, address, port, launcher)


def _in_step(environ: Environ) -> bool:
    """Whether this is a task of srun: False in an sbatch script, a salloc shell, and outside Slurm.

    Seen on Slurm 22.05: an sbatch script has SLURM_PROCID=0 and SLURM_NTASKS=4 although it is one process, and so has
    the shell of salloc; only a step has SLURM_STEP_ID. The interactive step of `salloc` has one from the reserved
    range, with SLURM_STEP_NUM_TASKS=1 next to the job's SLURM_NTASKS.
    """
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ


def _from_step(environ: Environ) -> World:
    """World of a task of one `srun`. MASTER_ADDR and MASTER_PORT take precedence over the step's own.

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
    if "MASTER_PORT" in environ:
        port = _port(environ)
    else:
        restarts = {"SLURM_RESTART_COUNT": "0", **environ}
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        port = step_port(*(_integer(restarts, name) for name in names))
    address = environ.get("MASTER_ADDR")
    if not address and size == world_size:
        address = LOOPBACK
    address = address or first_address(environ.get("SLURM_STEP_NODELIST", ""))
    return World(rank, world_size, local_rank, size, address, port, "slurm")


def _local_in_step(environ: Environ, world_size: int) -> tuple[int, int]:
    """(index of this task on its node, number of tasks there) in a step of `world_size` tasks."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = tasks_per_node(text)
    if sum(counts) != world_size:
        rule = f"must add up to the step's {world_size} tasks"
        raise invalid("SLURM_STEP_TASKS_PER_NODE", "mismatch", text, rule, _FIX)
    node = _integer(environ, "SLURM_NODEID", below=("the nodes of the step,", len(counts)))
    size = counts[node]
    return _integer(environ, "SLURM_LOCALID", below=("the node's tasks,", size)), size


def tasks_per_node(text: str) -> list[int]:
    """Number of tasks on each node: [2, 2, 2, 1] of `2(x3),1`. Raises ValueError for another syntax."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            rule = "must read like 2(x3),1"
            raise invalid("SLURM_STEP_TASKS_PER_NODE", "syntax", text, rule, _FIX)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _integer(
    environ: Environ, name: str, *, least: int = 0, below: tuple[str, int] | None = None
) -> int:
    """Return `environ[name]` as an int. Raises ValueError unless it is at least `least`, and below the value of `below`,
    a (name, value)."""
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
    """Return MASTER_PORT as a port number. Raises ValueError as `_integer` does."""
    return _integer(environ, "MASTER_PORT", least=1, below=("the end of the port range,", 65536))
