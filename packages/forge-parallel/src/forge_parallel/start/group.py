"""The process group of a job: started once per process, ended once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from forge_parallel.start.errors import StartError
from forge_parallel.start.meeting import Meeting, meet
from forge_parallel.start.world import World

_started: Meeting | None = None


def start_process_group(
    world: World,
    device: torch.device | str,
    *,
    timeout_seconds: float = 600.0,
    start_timeout_seconds: float = 300.0,
    facts: Mapping[str, str] = {},
) -> None:
    """Start the default process group: gloo on a CPU, gloo and NCCL on a GPU.

    Every rank calls it with the same arguments. Before any backend starts, the ranks check in with
    host, pid, device, torch version, world size and `facts` (a digest of the configuration, say), all
    of which but host and pid must agree. `timeout_seconds` bounds each later collective,
    `start_timeout_seconds` the time in which all ranks must have come. One rank needs no port.

    Raises StartError, on every rank that came, when a rank did not, when facts differ, when two ranks
    use one GPU, when the port is taken or the address unreachable, and when a group is running.
    Cost: a dozen small messages a rank through a TCP store on rank 0 (or in torchrun's agent), which
    lives as long as rank 0's process.
    Usage: `start_process_group(find_world(), "cpu"); ...; end_process_group()`.
    """
    global _started
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if dist.is_initialized():
        raise StartError(
            f"rank {world.rank}: a process group of {dist.get_world_size()} ranks is running already; "
            "end it first"
        )
    meeting = meet(world, device, start_timeout_seconds, facts)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=meeting.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        meeting.release()
        cause = f"the ranks came and cannot connect: {str(error).splitlines()[0]}"
        raise StartError(meeting.describe(cause)) from error
    _started = meeting


def end_process_group(wait: bool = True) -> None:
    """Destroy the group that `start_process_group` started; do nothing if it did not.

    Rank 0 stays up to 5 s until the others have ended theirs, since it hosts their store; after an
    error, with `wait` False, nobody waits for anybody.
    """
    global _started
    if _started is None:
        return
    meeting, _started = _started, None
    if dist.is_initialized():
        dist.destroy_process_group()
    meeting.end(wait)
