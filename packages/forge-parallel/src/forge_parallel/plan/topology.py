"""Placement of ranks on nodes, and the speed of GPUs and their networks.

Bandwidths are bytes per second of one GPU in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from forge_parallel._shared.problems import invalid
from forge_parallel.config import Layout


@dataclass(frozen=True)
class Hardware:
    """A model of GPU.

    peak             dense bf16 FLOP/s of the datasheet
    memory           bytes of the datasheet
    memory_speed     bytes/s of a copy
    intra, inter     bytes/s of collectives over NVLink, and over the GPU's part of the network
    compiled, eager  fraction of the peak that the matmuls of a training step reach
    usable           fraction of the memory that a plan may fill; the rest is for the CUDA context, fragmentation
                     and errors of the estimate
    """

    name: str
    peak: float
    memory: float
    memory_speed: float
    intra: float
    inter: float
    compiled: float = 0.655
    eager: float = 0.515
    usable: float = 0.85

    @property
    def limit(self) -> float:
        """Bytes that a plan may fill."""
        return self.memory * self.usable


#: Peaks, memory and link speeds are those of NVIDIA's datasheets (dense, SXM; NVLink 3: 300 GB/s a direction,
#: NVLink 4: 450, NVLink 5: 900; HDR: 200 Gb/s = 25 GB/s, NDR: 50). `intra` is 60 % and `inter` 80 % of a link, and
#: `memory_speed` about 90 % of the datasheet's. These fractions, `compiled` and `eager` were fitted on the h200 to the
#: published sweep in test_plan_calibration.py; for the other GPUs they are guesses without a measurement.
HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        Hardware("h200", 989e12, 141e9, 4.3e12, 270e9, 40e9),
        Hardware("h100", 989e12, 80e9, 3.0e12, 270e9, 40e9),
        Hardware("gh200", 989e12, 96e9, 3.6e12, 270e9, 40e9),
        Hardware("a100", 312e12, 80e9, 1.8e12, 180e9, 20e9, compiled=0.7, eager=0.56),
        Hardware("b200", 2250e12, 180e9, 7.0e12, 540e9, 40e9, compiled=0.58, eager=0.46),
        Hardware("gb200", 2500e12, 186e9, 7.0e12, 540e9, 40e9, compiled=0.58, eager=0.46),
    )
}


def find_hardware(name: str) -> Hardware:
    """Return the row of HARDWARE by its name. Raises ValueError for an unknown one."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise invalid("gpu", "unknown", name, f"must be one of {', '.join(HARDWARE)}", "use h200")
    return found


def find_nodes(
    gpu: str, gpus: int, nodes: int | None = None, gpus_per_node: int | None = None
) -> tuple[Hardware, int]:
    """Return the GPU and the number of GPUs in a node, by default 8. Raises ValueError for numbers that do not fit."""
    if gpus < 1:
        raise invalid("gpus", "range", gpus, "must be at least 1", "use 8")
    per_node = gpus_per_node or 8
    if nodes is not None:
        if nodes < 1 or gpus % nodes:
            rule, fix = f"must divide gpus {gpus}", "leave it out for nodes of 8"
            raise invalid("nodes", "divides", nodes, rule, fix)
        per_node = gpus // nodes
    return find_hardware(gpu), min(per_node, gpus)


def this_gpu() -> Hardware:
    """Return the row of this machine's GPU with its real memory; for an unknown model that of the h100."""
    name = torch.cuda.get_device_name().lower()
    known = [kind for kind in sorted(HARDWARE, key=len, reverse=True) if kind in name]
    memory = float(torch.cuda.get_device_properties(0).total_memory)
    return replace(HARDWARE[known[0] if known else "h100"], memory=memory)


_COLLECTIVE_AXES = ("tp", "cp", "fsdp", "ep", "efsdp", "dp_replicate", "pp")


@dataclass(frozen=True)
class Topology:
    """The ranks of a layout (see `Layout.axes`) on nodes of `gpus_per_node` GPUs."""

    layout: Layout
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes; the last may be used in part."""
        *axes, _ = self.layout  # ep borrows its ranks from them
        return -(-prod(axes) // self.gpus_per_node)

    def axes(self) -> dict[str, tuple[int, int]]:
        """Return name -> (ranks of a group, distance between neighbors in it) of the axes with collectives."""
        axes = self.layout.axes()
        return {name: axes[name] for name in _COLLECTIVE_AXES}

    def crosses(self, axis: str) -> bool:
        """Whether a group of `axis` spans nodes."""
        size, step = self.axes()[axis]
        return size > 1 and size * step > self.gpus_per_node

    def seconds(self, axis: str, whole: float, hardware: Hardware) -> float:
        """Seconds of an all-gather or reduce-scatter of `whole` unsharded bytes over a group of `axis`.

        Each of the n members in one node moves (n - 1) / n of the bytes over NVLink. Bytes of other nodes arrive over
        the network cards of all n. The two overlap.
        """
        size, step = self.axes()[axis]
        members = max(1, min(size, self.gpus_per_node // step))
        inside = whole * (members - 1) / members / hardware.intra
        between = whole * (1 - members / size) / (members * hardware.inter)
        return max(inside, between)

    def placement(self, experts: bool = True) -> list[str]:
        """Return a line for each axis larger than 1: the ranks of its first group, and whether groups span nodes."""
        lines = []
        for name, (size, step) in self.axes().items():
            if size == 1 or (name == "efsdp" and not experts):
                continue
            ranks = [i * step for i in range(min(size, 8))]
            shown = ", ".join(map(str, ranks)) + (", ..." if size > 8 else "")
            where = "across nodes" if self.crosses(name) else "inside a node"
            lines.append(f"{name} {size}: ranks {shown}; {where}")
        return lines
