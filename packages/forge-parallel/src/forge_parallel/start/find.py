"""Which rank of how many this process is, read from the environment and nothing else."""

from __future__ import annotations

import os

from forge_parallel.start import slurm
from forge_parallel.start.world import (
    LOOPBACK,
    Environ,
    Launcher,
    World,
    integer,
    is_loopback,
    port,
)

_FIX = (
    "start every rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or use torchrun or srun"
)


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
    if slurm.in_step(environ):
        return slurm.find(environ)
    if environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"WORLD_SIZE {environ['WORLD_SIZE']!r} is set and RANK is not, so this process cannot know "
            f"which rank it is; {_FIX}, or unset WORLD_SIZE for one process"
        )
    return World()


def _from_ranks(environ: Environ, launcher: Launcher) -> World:
    world_size = integer(environ, "WORLD_SIZE", _FIX, least=1)
    rank = integer(environ, "RANK", _FIX, below=("WORLD_SIZE", world_size))
    alone = world_size == 1
    address = environ.get("MASTER_ADDR") or (LOOPBACK if alone else "")
    if not address:
        raise ValueError(f"MASTER_ADDR must be set for {world_size} ranks and is not; {_FIX}")
    number = 0 if alone and "MASTER_PORT" not in environ else port(environ, _FIX)
    local_rank, local_world_size = _local(environ, rank, world_size, address)
    return World(rank, world_size, local_rank, local_world_size, address, number, launcher)


def _local(environ: Environ, rank: int, world_size: int, address: str) -> tuple[int, int]:
    """(local_rank, local_world_size): LOCAL_* if set, else what a loopback address or Slurm implies."""
    implied: dict[str, str] = {}
    if is_loopback(address):
        implied = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    elif slurm.in_step(environ):
        local_rank, size = slurm.local_rank_and_size(environ, world_size)
        implied = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size)}
    elif "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        return 0, 1  # one rank per host; two on one GPU are found at the check-in
    known = {**implied, **environ}
    size = integer(known, "LOCAL_WORLD_SIZE", _FIX, least=1)
    if size > world_size:
        raise ValueError(f"LOCAL_WORLD_SIZE {size} must be at most WORLD_SIZE {world_size}; {_FIX}")
    return integer(known, "LOCAL_RANK", _FIX, below=("LOCAL_WORLD_SIZE", size)), size
