"""The small job that keeps another one in the queue: its resources, and its command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from forge_resilience.slurm.config import SlurmConfig
from forge_resilience.slurm.orchestrate import FLAGS

__all__ = ["orchestrator_command", "small_job"]


def small_job(config: SlurmConfig) -> SlurmConfig:
    """One core of one node, in the surroundings of the job; it goes on after each of its own ends."""
    own = config.orchestrator
    return SlurmConfig(
        **{name: getattr(config, name) for name in ("account", "qos", "prologue", "environment")},
        tasks_per_node=1,
        cpus_per_task=1,
        time_limit=own.time_limit,
        partition=own.partition or config.partition,
        max_restarts=10**6,
    )


def orchestrator_command(
    config: SlurmConfig, script: str, sizes: Sequence[int], name: str, journal: str
) -> list[str]:
    """The command that keeps the job of a script in the queue on one of `sizes` nodes: `orchestrate`, without torch."""
    flags = {"name": name, "sizes": ",".join(map(str, sizes)), "max-restarts": config.max_restarts}
    flags |= {"journal": journal}
    flags |= {key.replace("_", "-"): getattr(config.orchestrator, key) for key in FLAGS}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return [sys.executable, "-m", "forge_resilience.slurm", script, *words]
