"""What a layout will need and how long a step will take, before any GPU is asked."""

from forge_parallel.plan.case import Case, Storage, Wish, describe
from forge_parallel.plan.memory import local_numel
from forge_parallel.plan.profile import Profile
from forge_parallel.plan.report import Plan, make_plan, render
from forge_parallel.plan.search import Candidate, choose, search
from forge_parallel.plan.topology import HARDWARE, Hardware, Topology, find_hardware
from forge_parallel.plan.trace import trace

__all__ = [
    "HARDWARE",
    "Candidate",
    "Case",
    "Hardware",
    "Plan",
    "Profile",
    "Storage",
    "Topology",
    "Wish",
    "choose",
    "describe",
    "find_hardware",
    "local_numel",
    "make_plan",
    "render",
    "search",
    "trace",
]
