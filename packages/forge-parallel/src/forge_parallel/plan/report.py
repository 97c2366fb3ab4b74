"""Estimate of a candidate's memory, traffic and time, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from torch import nn

from forge_parallel.config import ParallelConfig
from forge_parallel.plan.candidate import Candidate, SearchSpace, Storage, describe
from forge_parallel.plan.memory import Memory, stage_memory
from forge_parallel.plan.profile import Profile
from forge_parallel.plan.time import HIDDEN, MIN_EXPOSED, Time, Traffic, stage_traffic, step_time
from forge_parallel.plan.topology import Hardware, find_hardware


@dataclass(frozen=True)
class Estimate:
    """A candidate with its numbers, computed at first use."""

    candidate: Candidate

    @cached_property
    def memory(self) -> list[Memory]:
        """Memory of each pipeline rank."""
        return [stage_memory(self.candidate, rank) for rank in range(self.candidate.layout.pp)]

    @cached_property
    def _traffic(self) -> list[list[Traffic]]:
        """Traffic of each pipeline rank."""
        return [stage_traffic(self.candidate, rank) for rank in range(self.candidate.layout.pp)]

    @property
    def traffic(self) -> list[Traffic]:
        """Traffic of the pipeline rank that sends longest."""
        return max(self._traffic, key=lambda rows: sum(row.seconds for row in rows))

    @cached_property
    def time(self) -> Time:
        """Time of a step."""
        return step_time(self.candidate, self.memory, self._traffic)

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint: weights and moments, without frozen weights that are saved apart."""
        profile, storage = self.candidate.profile, self.candidate.storage
        saved = profile.numel if storage.frozen is None else profile.trained
        return saved * storage.weights + profile.state_bytes(storage.moments)

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(m.peak for m in self.memory)

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable part of the GPU's memory."""
        return self.peak <= self.candidate.hardware.limit

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            "layout": self.candidate.layout._asdict(),
            "micro_batch": self.candidate.micro_batch,
            "num_micro_batches": self.candidate.num_micro_batches,
            "filler": self.candidate.micro_batches.filler,
            "tokens": self.candidate.tokens,
            "fits": self.fits,
            "peak": self.peak,
            "memory": [asdict(m) for m in self.memory],
            "traffic": [asdict(t) for t in self.traffic],
            "time": asdict(self.time),
            "checkpoint": self.checkpoint,
        }


def estimate_layout(
    model: nn.Module | Profile,
    config: ParallelConfig,
    world_size: int,
    *,
    global_batch: int,
    micro_batch: int | None = None,
    seq_len: int = 2048,
    hardware: Hardware | str = "h200",
    gpus_per_node: int = 8,
    storage: Storage | None = None,
) -> Estimate:
    """Estimate `config` for `model`, which may be on the meta device, on `world_size` GPUs.

        plan = estimate_layout(model, ParallelConfig(tp=4), 32, global_batch=64, micro_batch=2, seq_len=4096)
        print(render(plan))

    `micro_batch` None: that of `divide_batch`, all sequences of a data rank if data ranks have equally many. Needs no
    process group and no GPU; takes under a second for any size. Raises ValueError with every rule that the layout breaks.
    """
    profile = model if isinstance(model, Profile) else Profile(model, seq_len)
    gpu = find_hardware(hardware) if isinstance(hardware, str) else hardware
    space = SearchSpace(profile, config, world_size, global_batch, gpu, gpus_per_node,
                storage=storage or Storage())  # fmt: skip
    return Estimate(space.candidate(config, micro_batch))


def render(estimate: Estimate, others: Sequence[Estimate] = ()) -> str:
    """Return plain text: memory, axes, step, and `others` as a ranked table."""
    parts = [_head(estimate), _memory(estimate), _axes(estimate), _step(estimate)]
    if others:
        rows = [("layout", "GB", "tok/s", "MFU")]
        for c in others:
            fits = "" if c.fits else "  does not fit"
            rows.append((describe(c.candidate), f"{c.peak / 1e9:.1f}",
                         f"{c.time.tokens_per_second:,.0f}", f"{c.time.mfu:.1%}{fits}"))  # fmt: skip
        title = "alternatives, best first (every further axis must pay for itself)"
        parts.append(f"{title}\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def _head(estimate: Estimate) -> str:
    """Lines on the model, the batch, and whether the layout fits."""
    candidate, p, gpu = estimate.candidate, estimate.candidate.profile, estimate.candidate.hardware
    verdict = "fits" if estimate.fits else "DOES NOT FIT"
    lines = [
        f"{p.numel / 1e9:.2f} B parameters on {candidate.world_size} x {gpu.name}, "
        f"{candidate.topology.nodes} nodes of {candidate.gpus_per_node}: {describe(candidate)}",
        f"{candidate.tokens:,} tokens a step: {candidate.global_batch} sequences of {p.seq_len}, "
        f"{candidate.num_micro_batches} micro-batches of {candidate.micro_batch} on each of "
        f"{candidate.layout.batch_size} data ranks",
        f"{verdict}: {_gb(estimate.peak)} of {_gb(gpu.limit)} GB usable ({_gb(gpu.memory)} in all); "
        f"a checkpoint is {_gb(estimate.checkpoint)} GB",
        *filter(None, [candidate.micro_batches.cost]),
    ]

    # FSDP2 waits for the copy of a gradient that it adds to an earlier one in host memory
    further = candidate.num_micro_batches - 1
    if candidate.config.cpu_offload and further:
        tensors = sum(len(group.params) for group in candidate.load(0).groups)
        lines.append(
            f"cpu_offload waits for the device {tensors * further} times a step: once for each of {tensors} "
            f"parameters in each of {further} further micro-batches; use a larger micro_batch"
        )
    return "\n".join(lines)


def _memory(estimate: Estimate) -> str:
    """Table of memory, a row for each pipeline rank."""
    rows = [("GB per rank", *(f.name.replace("_", " ") for f in fields(Memory)))]
    for rank, memory in enumerate(estimate.memory):
        label = f"pp rank {rank}" if len(estimate.memory) > 1 else "every rank"
        *sizes, in_flight = asdict(memory).values()
        rows.append((label, *map(_gb, sizes), f"{in_flight:g}"))
    return _table(rows)


def _axes(estimate: Estimate) -> str:
    """Placement of the axes, and a table of their traffic."""
    lines = estimate.candidate.topology.placement(estimate.candidate.profile.num_experts > 0)
    rows = [("axis", "GB per step", "seconds", "", "what")]
    for row in estimate.traffic:
        where = "across nodes" if row.crosses else "inside a node"
        rows.append((row.axis, _gb(row.received), f"{row.seconds:.2f}", where, row.what))
    return "\n".join(lines) + ("\n\n" + _table(rows) if estimate.traffic else "")


def _step(estimate: Estimate) -> str:
    """Lines on the time of a step and its assumptions."""
    candidate, t, gpu = estimate.candidate, estimate.time, estimate.candidate.hardware
    waits = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in t.exposed.items()) or "nothing"
    fraction = gpu.compiled if candidate.config.compile else gpu.eager
    return "\n".join((
        f"step {t.step:.2f} s: products {t.products:.2f}, waiting for {waits}, bubble {t.bubble:.2f}, "
        f"update {t.update:.2f}",
        f"{t.tokens_per_second:,.0f} tokens/s ({t.tokens_per_second / candidate.world_size:,.0f} per GPU), "
        f"MFU {t.mfu:.1%}",
        f"assumed: products at {fraction:.1%} of {gpu.peak / 1e12:.0f} TFLOP/s, "
        f"{gpu.intra / 1e9:.0f} GB/s inside a node, {gpu.inter / 1e9:.0f} between; "
        f"tp, cp, ep are waited for; FSDP overlaps with {HIDDEN:.0%} of the products, {MIN_EXPOSED:.0%} of it is "
        "felt in any case; activations as an eager GPU keeps them",
    ))  # fmt: skip


def _gb(number: float) -> str:
    return f"{number / 1e9:.2f}" if number < 1e9 else f"{number / 1e9:.1f}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Align columns: the first to the left, the last as it is, the others to the right."""
    first, *others, _ = (max(map(len, column)) for column in zip(*rows))
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:-1], others), row[-1]]).rstrip()
        for row in rows
    )
