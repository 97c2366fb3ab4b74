"""The ranks of a job that this supervisor starts: all of them, those of one node, or a given one."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forge_resilience._renamed import renamed
from forge_resilience._shared.launch import first_address, step_port
from forge_resilience._shared.problems import invalid
from forge_resilience.local_workers import local_ranks, rank_environs


@dataclass(frozen=True)
class NodeSlot:
    """`nproc` ranks from `node * nproc` on, of `nodes` supervisors; None: the command as it is, once."""

    nproc: int | None
    node: int = 0
    nodes: int = 1
    has_all_ranks: bool = True
    """Whether no other process starts ranks of the job: only then this one can start them again."""
    hand_over_port: bool = False
    """Whether rank 0 takes MASTER_PORT as an open socket, as Forge's start-up does."""

    @contextlib.contextmanager
    def environs(
        self, environ: Mapping[str, str]
    ) -> Iterator[tuple[list[dict[str, str]], socket.socket | None]]:
        """Environments of the ranks to start, for each attempt anew, and the socket of MASTER_PORT where it is here."""
        if self.nproc is None:
            yield [dict(environ)], None
        elif self.nodes == 1:
            with local_ranks(self.nproc, environ, self.hand_over_port) as (environs, store):
                yield environs, store
        else:
            yield self._of_node(environ, self.nproc), None

    def _of_node(self, environ: Mapping[str, str], nproc: int) -> list[dict[str, str]]:
        """Environments of the ranks of one node of several."""
        address = environ.get("MASTER_ADDR") or first_address(environ["SLURM_STEP_NODELIST"])
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        run = [environ.get(name, "0") for name in names]
        port = environ.get("MASTER_PORT") or str(step_port(*map(int, run)))
        first, world, name = self.node * nproc, self.nodes * nproc, "-".join(run)
        return rank_environs(
            environ, nproc, world, address=address, port=port, run=name, first=first
        )


def find_node_slot(nproc: int | None, environ: Mapping[str, str] = os.environ) -> NodeSlot:
    """Find the ranks of this supervisor from the variables of srun or torchrun.

    Raises ValueError for `nproc` inside a rank of torchrun, or in a Slurm step with several tasks on a node.
    """
    world = environ.get("WORLD_SIZE", "1")
    step_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1")) if "SLURM_STEP_ID" in environ else 1

    if nproc is None:
        given = "RANK" in environ and world != "1"
        return NodeSlot(None, has_all_ranks=not given and step_tasks == 1)
    if "RANK" in environ and world != "1":
        rule = f"starts ranks, but a launcher started this process as rank {environ['RANK']} of {world}"
        raise invalid("nproc", "in_rank", nproc, rule, "leave nproc out to supervise this one")

    if step_tasks == 1:
        return NodeSlot(nproc)
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes != step_tasks:
        rule = f"starts the ranks of a node, and the Slurm step has {step_tasks} tasks on {nodes} nodes"
        fix = "use srun --ntasks-per-node=1, or leave nproc out"
        raise invalid("nproc", "step_tasks", nproc, rule, fix)
    return NodeSlot(nproc, int(environ["SLURM_PROCID"]), nodes, has_all_ranks=False)


__getattr__ = renamed(__name__)
