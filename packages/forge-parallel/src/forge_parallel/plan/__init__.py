"""Estimates of memory, traffic and time of a layout, without GPUs, and a search for the best one."""

from forge_parallel.plan.candidate import Candidate, SearchSpace, Storage, describe
from forge_parallel.plan.memory import local_numel
from forge_parallel.plan.profile import Profile
from forge_parallel.plan.report import Estimate, estimate_layout, render
from forge_parallel.plan.search import auto_layout, score, search
from forge_parallel.plan.topology import (
    HARDWARE,
    Hardware,
    Topology,
    find_hardware,
    find_nodes,
    this_gpu,
)
from forge_parallel.plan.trace import trace

__all__ = [
    "HARDWARE",
    "Candidate",
    "Estimate",
    "Hardware",
    "Profile",
    "SearchSpace",
    "Storage",
    "Topology",
    "auto_layout",
    "describe",
    "estimate_layout",
    "find_hardware",
    "find_nodes",
    "local_numel",
    "render",
    "score",
    "search",
    "this_gpu",
    "trace",
]
