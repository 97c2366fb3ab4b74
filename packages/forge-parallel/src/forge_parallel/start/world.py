"""Which rank of how many this process is, read from the environment and nothing else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from forge_parallel.start.variables import Environ, integer, port

Launcher = Literal["none", "torchrun", "slurm", "environment"]
LOOPBACK = "127.0.0.1"
_FIX = (
    "start every rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use torchrun or srun"
)


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


def find_world(environ: Environ = os.environ) -> World:
    """The world that `environ` describes. No torch, no network; asks Slurm's `scontrol` if it must.

    In this order: torchrun (TORCHELASTIC_RUN_ID), RANK with its companions, a Slurm step
    (SLURM_STEP_ID; an sbatch script without srun is none), one process. Raises ValueError, with
    variable, value, rule and fix, for a half-set or contradicting environment.
    Usage: `world = find_world()`.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _from_ranks(environ, "torchrun")
    if "RANK" in environ:
        return _from_ranks(environ, "environment")
    from forge_parallel.start import slurm

    if slurm.in_step(environ):
        return slurm.find(environ)
    if environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE {environ['WORLD_SIZE']!r} is set and RANK is not: this process cannot know "
            f"which rank it is; {_FIX}, or unset WORLD_SIZE for one process"
        )
    return World()


def _from_ranks(environ: Environ, launcher: Launcher) -> World:
    world_size = integer(environ, "WORLD_SIZE", _FIX, least=1)
    rank = integer(environ, "RANK", _FIX, below=("WORLD_SIZE", world_size))
    alone = world_size == 1
    if not environ.get("MASTER_ADDR") and not alone:
        raise ValueError(f"MASTER_ADDR must be set for {world_size} ranks and is not; {_FIX}")
    address = environ.get("MASTER_ADDR") or LOOPBACK
    number = 0 if alone and "MASTER_PORT" not in environ else port(environ, _FIX)
    local_rank, local_world_size = _local(environ, rank, world_size, address)
    return World(rank, world_size, local_rank, local_world_size, address, number, launcher)


def _local(environ: Environ, rank: int, world_size: int, address: str) -> tuple[int, int]:
    """(local_rank, local_world_size). On a loopback address all ranks are on one host."""
    here = is_loopback(address)
    if "LOCAL_WORLD_SIZE" in environ:
        size = integer(environ, "LOCAL_WORLD_SIZE", _FIX, least=1)
        if size > world_size:
            raise ValueError(
                f"LOCAL_WORLD_SIZE {size} must be at most WORLD_SIZE {world_size}; {_FIX}"
            )
    elif here:
        size = world_size
    elif "LOCAL_RANK" in environ and environ["LOCAL_RANK"] != "0":
        raise ValueError(
            f"LOCAL_RANK {environ['LOCAL_RANK']!r} needs LOCAL_WORLD_SIZE when MASTER_ADDR "
            f"{address!r} is another host; set it to the number of ranks on this host"
        )
    else:
        size = 1
    if "LOCAL_RANK" in environ:
        return integer(environ, "LOCAL_RANK", _FIX, below=("LOCAL_WORLD_SIZE", size)), size
    return (rank if here else 0), size


def is_loopback(address: str) -> bool:
    """True for an address that only this host can mean."""
    return address in ("localhost", "::1") or address.startswith("127.")
