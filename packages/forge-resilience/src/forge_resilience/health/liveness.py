"""Which ranks do not arrive."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

from forge_resilience.health.finding import BROKEN, OK, Finding

_WHOLE = 0.9  # of the time limit: clocks of two libraries
_FIX = "look at these ranks and their nodes (py-spy dump), and run again without them"


def arrived(group: Any = None, timeout_seconds: float = 60.0) -> tuple[Finding, list[int]]:
    """A finding, and the numbers of the ranks that are late.

    Wait for all ranks of a gloo group, by default the default group, at most so long. Collective.

    Rank 0 of the group names those that have not come; the others know that it has not let them go. After a
    broken finding the group cannot be used any more: end the process. Cost: a message to rank 0 and back.
    Raises RuntimeError at once if a rank has ended: a process that died is no sign of a broken node.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Finding("ranks", OK, "one rank"), []
    world = dist.get_world_size(group)
    if dist.get_backend(group) != "gloo":
        return Finding("ranks", OK, f"{world} ranks, of a group that cannot be asked"), []
    began = time.monotonic()
    try:
        limit = timedelta(seconds=timeout_seconds)
        dist.monitored_barrier(group, timeout=limit, wait_all_ranks=True)
    except RuntimeError as error:
        late = [int(n) for n in re.findall(r"[Rr]anks? ([\d, ]+) failed", str(error)) for n in re.findall(r"\d+", n)]  # fmt: skip
        if time.monotonic() - began < _WHOLE * timeout_seconds:  # nobody was waited for
            if not late:  # gloo's own words
                raise
            gone = f"rank {', '.join(map(str, late))} has ended"
            raise RuntimeError(f"{gone} (gloo: Connection closed by peer)") from error
        names = f"rank {', '.join(map(str, late))}" if late else "a rank that rank 0 names"
        value = f"{names} did not arrive within {timeout_seconds:g} s"
        return Finding("ranks", BROKEN, value, f"all {world} must", _FIX), late
    return Finding("ranks", OK, f"all {world} arrived"), []
