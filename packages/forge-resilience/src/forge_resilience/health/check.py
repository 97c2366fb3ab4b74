"""Health check: the probes of all ranks, in one report that is the same on every rank."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from forge_resilience._renamed import renamed
from forge_resilience._shared.fields import Checked, field
from forge_resilience._shared.limits import limit_problem
from forge_resilience.agreement import Agreement
from forge_resilience.health import probes
from forge_resilience.health.nvml import NvmlProbe, driver_findings
from forge_resilience.health.probes import BROKEN, DRAIN, OK, WARN, Finding, known_answer
from forge_resilience.journal import read_events
from forge_resilience.provenance import node_name

MOST_FINDINGS = 32  # in an event, whose line must stay readable
_WHOLE = 0.9  # of the time limit, because the clocks of gloo and Python may differ
_FIX = "look at these ranks and their nodes (py-spy dump), and run again without them"
_LIFE = ("start", "resume")


@dataclass(frozen=True)
class HealthConfig(Checked):
    """Probes of every rank: its device computes a known answer and keeps patterns, its node has space, shared memory,
    a clock like the others', loopback and the shared folder, and all ranks arrive."""

    at_start: bool = True
    """probe at the start of each attempt, before the first step"""
    every_steps: int = field(0, between=(0, 10**9))
    """steps between further probes; 0: none"""
    action: Literal["stop", "warn"] = "stop"
    """stop: what is broken ends the run with code 71, and its node is left out of the next attempt; warn: it is an
    event"""
    memory_mib: int | None = field(None, between=(1, 2**20))
    """device memory that is written and read by a probe, in MiB (default: 512 on an accelerator, 1 on a CPU)"""
    timeout_seconds: float = field(60.0, between=(0, 10**6), positive=True)
    """a rank that has not arrived at a probe after so long is named"""


@dataclass(frozen=True)
class RankFinding:
    """A finding that is not ok, its rank, and the name of its node ("" if unknown)."""

    rank: int
    node: str
    finding: Finding

    def __str__(self) -> str:
        return f"rank {self.rank}{f' on {self.node}' if self.node else ''}: {self.finding}"


class HealthCheck:
    """The probes of this rank's device and node, exchanged with the others.

        check = HealthCheck("runs/a", device)
        for found in check.run():            # on every rank; the same list
            print(found)                     # "rank 3 on n7: computing: cuda:1: 12 of 8388608 elements ..."

    folder: of the run, which all nodes must see. group: gloo, over all ranks (as in `Agreement`).
    Cost of `run`: see `known_answer` and `memory_patterns`; a barrier and two small exchanges between hosts.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: Any = "cpu",
        config: HealthConfig | None = None,
        group: Any = None,
    ) -> None:
        import torch

        self._folder, self._device = str(folder), torch.device(device)
        self._config, self._group = config or HealthConfig(), group
        self._agreement = Agreement(group)
        self._nvml = NvmlProbe.of(self._device)
        self._count = 0
        # by rank, from the last time that all arrived, because a rank that is late cannot tell its node
        self._nodes: dict[int, str] = {}

    def run(self) -> list[RankFinding]:
        """Run all probes and return what is not ok, by rank; empty if all is well. Every rank calls it.

        If a rank does not arrive in time, the list holds only that finding, only rank 0 knows which rank it is, and no
        collective works any more.
        """
        live, late = arrived(self._group, self._config.timeout_seconds)
        rank = self._rank()
        if live.state == BROKEN:
            if not late:  # this rank knows of no rank at fault, and its own node is not
                return [RankFinding(rank, "", live)]
            return [RankFinding(n, self._nodes.get(n, ""), live) for n in late]

        self._count += 1
        own = [f.as_dict() for f in self._probe_this_rank() if f.state != OK]
        token: str | None = None
        if rank == 0:  # a file for the other nodes to see; `disk` reports that none can be written
            with contextlib.suppress(OSError):
                token = probes.write_token(self._folder)

        name = self._agreement.exchange(token)[0]
        now = time.time()  # all leave an exchange at about this moment, so clocks can be compared
        row = {"node": node_name(), "time": now, "findings": own}
        row["seen"] = name is None or probes.sees_token(self._folder, name)
        rows = self._agreement.exchange(row)

        self._nodes = {rank: row["node"] for rank, row in enumerate(rows)}
        if token is not None:
            with contextlib.suppress(OSError):
                Path(self._folder, token).unlink()
        return _findings_of_all_ranks(self._folder, rows)

    def nodes_at_fault(self, found: Sequence[RankFinding]) -> list[str]:
        """Return the nodes with a broken finding; [] if they are more than half of all, as that has a common cause."""
        nodes = list(dict.fromkeys(f.node for f in found if f.finding.state == BROKEN and f.node))
        several = len(set(self._nodes.values()))
        return nodes if several == 1 or 2 * len(nodes) <= several else []

    def event_fields(self, found: Sequence[RankFinding]) -> dict[str, Any]:
        """Fields of a `health` event: the broken findings, else the warnings, and the nodes at fault."""
        nodes = self.nodes_at_fault(found)
        broken = [f for f in found if f.finding.state == BROKEN]
        return {
            "state": "broken" if broken else "warn",
            "cause": str((broken or found)[0]),
            "rank": broken[0].rank if len(broken) == 1 else None,
            "ranks": sorted({f.rank for f in broken}),
            "nodes": nodes,
            "is_known": bool(nodes),
            "findings": [str(f) for f in found[:MOST_FINDINGS]],
            "num_findings": len(found),
        }

    def _probe_this_rank(self) -> list[Finding]:
        """All probes that need no other rank."""
        device, mib = self._device, self._config.memory_mib
        return [
            _catch_device_errors("computing", lambda: known_answer(device, seed=self._count)),
            _catch_device_errors("device memory", lambda: probes.memory_patterns(device, mib)),
            *driver_findings(self._nvml),
            *(probes.disk(self._folder), probes.shared_memory(), probes.loopback()),
        ]

    def _rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank(self._group) if dist.is_initialized() else 0


def _catch_device_errors(what: str, probe: Callable[[], Finding]) -> Finding:
    """Run a probe of a device and turn its exception into a finding: a memory error in the middle is an exception."""
    try:
        return probe()
    except (RuntimeError, MemoryError) as error:
        value = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        # a limit of the process is no fault of the device
        state = WARN if limit_problem(error) else BROKEN
        return Finding(what, state, value, "a device must answer", DRAIN)


def _findings_of_all_ranks(folder: str, rows: list[dict[str, Any]]) -> list[RankFinding]:
    """The findings of all ranks that are not ok, with those that need a comparison; each rank computes them."""
    nodes = [row["node"] for row in rows]
    time_of = probes.clocks([row["time"] for row in rows])
    seen = probes.shared_folder(folder, [row["seen"] for row in rows], nodes)
    found = []
    for rank, row in enumerate(rows):
        own = [*(Finding(**each) for each in row["findings"]), time_of[rank], seen[rank]]
        found += [RankFinding(rank, nodes[rank], each) for each in own if each.state != OK]
    return found


def arrived(group: Any = None, timeout_seconds: float = 60.0) -> tuple[Finding, list[int]]:
    """Wait for all ranks of a gloo group, by default the default group; return a finding and the late ranks. Collective.

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
        # too early for the time limit, so a rank has ended and none was waited for
        if time.monotonic() - began < _WHOLE * timeout_seconds:
            if not late:  # gloo names no rank, so its own words go on
                raise
            gone = f"rank {', '.join(map(str, late))} has ended"
            raise RuntimeError(f"{gone} (gloo: Connection closed by peer)") from error

        names = f"rank {', '.join(map(str, late))}" if late else "a rank that rank 0 names"
        value = f"{names} did not arrive within {timeout_seconds:g} s"
        return Finding("ranks", BROKEN, value, f"all {world} must", _FIX), late
    return Finding("ranks", OK, f"all {world} arrived"), []


def broken_nodes(journal: str | os.PathLike[str]) -> list[str]:
    """Return the nodes that the last attempt of a run found broken, by its events `health` and `mismatch`.

    Of two replicas that differ either may be wrong, so their nodes are not in the list.
    """
    nodes: dict[str, None] = {}
    for event in read_events(journal):
        if event.get("event") in _LIFE:
            nodes.clear()
        elif event.get("event") in ("health", "mismatch") and event.get("is_known"):
            nodes.update(dict.fromkeys(event.get("nodes") or ()))
    return list(nodes)


__getattr__ = renamed(__name__)
