"""Start of a job: rank and world size of this process, and the process group of all ranks."""

from forge_parallel._shared.launch import RUN_NAME, STORE_FD
from forge_parallel.start.group import end_process_group, leave, lost_rank, start_process_group
from forge_parallel.start.store import StartError
from forge_parallel.start.world import World, find_world

__all__ = [
    "RUN_NAME",
    "STORE_FD",
    "StartError",
    "World",
    "end_process_group",
    "find_world",
    "leave",
    "lost_rank",
    "start_process_group",
]
