"""The ranks of each node, and the speed of a GPU and its networks.

Bandwidths are bytes per second of one GPU in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from forge_parallel.config import Layout


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU. `peak` dense bf16 FLOP/s and `memory` bytes are the datasheet's; `compiled` and
    `eager` the part of the peak that a whole training step's products reach; `intra` and `inter` what
    collectives reach on NVLink and on the GPU's share of the network; `memory_speed` a copy's bytes/s;
    `usable` the part of the memory that a plan may fill (the rest: context, fragments, what is not known)."""

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


#: Peaks, memory and link speeds are NVIDIA's datasheets (dense, SXM; NVLink 4: 450 GB/s a direction,
#: NVLink 5: 900, NVLink 3: 300; NDR: 400 Gb/s = 50 GB/s, HDR: 25). Of the links 60 % inside and 80 % between
#: nodes are taken, and of the peak what stands in Hardware: fitted on the h200 to the published sweep in
#: test_plan_calibration.py. For the other cards they are guesses that nobody measured.
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
    """The row of HARDWARE by its name. ValueError for an unknown one."""
    found = HARDWARE.get(name.lower())
    if found is None:
        raise ValueError(f"gpu {name!r} must be one of {', '.join(HARDWARE)}; use h200")
    return found


_SENT_OVER = ("tp", "cp", "fsdp", "ep", "efsdp", "dp_replicate", "pp")


@dataclass(frozen=True)
class Topology:
    """The ranks of a layout (see `Layout.axes`), `gpus_per_node` to a node."""

    layout: Layout
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        *axes, _ = self.layout  # ep borrows its ranks from them
        return -(-prod(axes) // self.gpus_per_node)

    def axes(self) -> dict[str, tuple[int, int]]:
        """name -> (ranks of a group, distance between neighbours in it) of what collectives run over."""
        axes = self.layout.axes()
        return {name: axes[name] for name in _SENT_OVER}

    def crosses(self, axis: str) -> bool:
        """Whether a group of `axis` spans nodes."""
        size, step = self.axes()[axis]
        return size > 1 and size * step > self.gpus_per_node

    def seconds(self, axis: str, whole: float, hardware: Hardware) -> float:
        """Time of an all-gather or reduce-scatter of `whole` bytes over a group of `axis`.

        Inside a node each rank moves (n - 1) / n of them over NVLink. Bytes of other nodes arrive over the network
        cards of all members of the group in this node.
        """
        size, step = self.axes()[axis]
        together = max(1, min(size, self.gpus_per_node // step))
        near = whole * (together - 1) / together / hardware.intra
        far = whole * (1 - together / size) / (together * hardware.inter)
        return max(near, far)

    def placement(self, experts: bool = True) -> list[str]:
        """A line per axis larger than 1: its first ranks, and whether it leaves a node."""
        lines = []
        for name, (size, step) in self.axes().items():
            if size == 1 or (name == "efsdp" and not experts):
                continue
            ranks = [i * step for i in range(min(size, 8))]
            shown = ", ".join(map(str, ranks)) + (", ..." if size > 8 else "")
            where = "across nodes" if self.crosses(name) else "inside a node"
            lines.append(f"{name} {size}: ranks {shown}; {where}")
        return lines
