"""Tiny jobs in real processes, real ranks, and ways to hurt them."""

from forge_testing.devices import NotOnThisDevice, choose, device
from forge_testing.faults import flip_bit, rank_pids, signal_at_random, signal_rank, truncate
from forge_testing.jobs import TINY_JOB, write_job
from forge_testing.processes import Outcome, forge_train, kill_after_step, start, wait_for_step
from forge_testing.rank_process import rank_mesh
from forge_testing.ranks import RankError, run_on_ranks

__all__ = [
    "TINY_JOB",
    "NotOnThisDevice",
    "Outcome",
    "RankError",
    "choose",
    "device",
    "flip_bit",
    "forge_train",
    "kill_after_step",
    "rank_mesh",
    "rank_pids",
    "run_on_ranks",
    "signal_at_random",
    "signal_rank",
    "start",
    "truncate",
    "wait_for_step",
    "write_job",
]
