"""A plan: what a layout stores, sends and takes, and the text that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from torch import nn

from forge_parallel.config import ParallelConfig
from forge_parallel.plan.case import Case, Storage, Wish, describe
from forge_parallel.plan.memory import Memory, stage_memory
from forge_parallel.plan.profile import Profile
from forge_parallel.plan.time import FELT, HIDDEN, Time, step_time
from forge_parallel.plan.topology import Hardware, find_hardware
from forge_parallel.plan.traffic import Traffic, stage_traffic


@dataclass(frozen=True)
class Plan:
    """A case with its numbers, which are computed when they are first asked for."""

    case: Case

    @cached_property
    def memory(self) -> list[Memory]:
        """Of a rank of each pipeline stage."""
        return [stage_memory(self.case, rank) for rank in range(self.case.layout.pp)]

    @cached_property
    def _sent(self) -> list[list[Traffic]]:
        return [stage_traffic(self.case, rank) for rank in range(self.case.layout.pp)]

    @property
    def traffic(self) -> list[Traffic]:
        """Of the pipeline rank that sends most."""
        return max(self._sent, key=lambda rows: sum(row.seconds for row in rows))

    @cached_property
    def time(self) -> Time:
        """Of a step."""
        return step_time(self.case, self.memory, self._sent)

    @property
    def checkpoint(self) -> float:
        """Bytes of a checkpoint: weights and moments."""
        return self.case.profile.numel * (self.case.storage.weights + self.case.storage.moments)

    @property
    def peak(self) -> float:
        """Bytes on the fullest rank."""
        return max(m.peak for m in self.memory)

    @property
    def fits(self) -> bool:
        """Whether that is within the usable part of the GPU's memory."""
        return self.peak <= self.case.hardware.limit

    def to_dict(self) -> dict[str, Any]:
        """All numbers, as JSON takes them."""
        return {
            "layout": self.case.layout._asdict(),
            "micro_batch": self.case.micro_batch,
            "num_micro_batches": self.case.num_micro_batches,
            "filler": self.case.micro_batches.filler,
            "tokens": self.case.tokens,
            "fits": self.fits,
            "peak": self.peak,
            "memory": [asdict(m) for m in self.memory],
            "traffic": [asdict(t) for t in self.traffic],
            "time": asdict(self.time),
            "checkpoint": self.checkpoint,
        }


def make_plan(
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
) -> Plan:
    """Plan `config` for `model` (on the meta device, say) on `world_size` GPUs.

        plan = make_plan(model, ParallelConfig(tp=4), 32, global_batch=64, micro_batch=2, seq_len=4096)
        print(render(plan))

    `micro_batch` is by default what `divide` chooses: a data rank's whole share where shares are equal. No process group, no GPU; under a second for
    any size. Raises ValueError, a line for each rule that the layout breaks.
    """
    profile = model if isinstance(model, Profile) else Profile(model, seq_len)
    gpu = find_hardware(hardware) if isinstance(hardware, str) else hardware
    wish = Wish(profile, config, world_size, global_batch, gpu, gpus_per_node,
                storage=storage or Storage())  # fmt: skip
    return Plan(wish.case(config, micro_batch))


def render(plan: Plan, others: Sequence[Plan] = ()) -> str:
    """Plain text: memory, axes, step, and `others` as a ranked table."""
    parts = [_head(plan), _memory(plan), _axes(plan), _step(plan)]
    if others:
        rows = [("layout", "GB", "tok/s", "MFU")]
        for c in others:
            fits = "" if c.fits else "  does not fit"
            rows.append((describe(c.case), f"{c.peak / 1e9:.1f}",
                         f"{c.time.tokens_per_second:,.0f}", f"{c.time.mfu:.1%}{fits}"))  # fmt: skip
        parts.append(
            "alternatives, best first (every further axis must pay for itself)\n" + _table(rows)
        )
    return "\n\n".join(parts) + "\n"


def _head(plan: Plan) -> str:
    case, p, gpu = plan.case, plan.case.profile, plan.case.hardware
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return "\n".join((
        f"{p.numel / 1e9:.2f} B parameters on {case.world_size} x {gpu.name}, "
        f"{case.topology.nodes} nodes of {case.gpus_per_node}: {describe(case)}",
        f"{case.tokens:,} tokens a step: {case.global_batch} rows of {p.seq_len}, "
        f"{case.num_micro_batches} micro-batches of {case.micro_batch} on each of "
        f"{case.layout.batch_size} data ranks",
        f"{verdict}: {_gb(plan.peak)} of {_gb(gpu.limit)} GB usable ({_gb(gpu.memory)} in all); "
        f"a checkpoint is {_gb(plan.checkpoint)} GB",
        *filter(None, [case.micro_batches.cost]),
        *_waits(case),
    ))  # fmt: skip


def _waits(case: Case) -> list[str]:
    """What FSDP2 waits for where gradients lie on the host."""
    further = case.num_micro_batches - 1
    if not case.config.cpu_offload or not further:
        return []
    tensors = sum(len(part.rows) for part in case.load(0).parts)
    return [
        f"cpu_offload waits for the device {tensors * further} times a step: once for each of {tensors} "
        f"parameters in each of {further} further micro-batches; use a larger micro_batch"
    ]


def _memory(plan: Plan) -> str:
    rows = [("GB per rank", *(f.name.replace("_", " ") for f in fields(Memory)))]
    for rank, memory in enumerate(plan.memory):
        label = f"pp rank {rank}" if len(plan.memory) > 1 else "every rank"
        *sizes, in_flight = asdict(memory).values()
        rows.append((label, *map(_gb, sizes), f"{in_flight:g}"))
    return _table(rows)


def _axes(plan: Plan) -> str:
    lines = plan.case.topology.placement(plan.case.profile.num_experts > 0)
    rows = [("axis", "GB per step", "seconds", "", "what")]
    for row in plan.traffic:
        where = "across nodes" if row.crosses else "inside a node"
        rows.append((row.axis, _gb(row.received), f"{row.seconds:.2f}", where, row.what))
    return "\n".join(lines) + ("\n\n" + _table(rows) if plan.traffic else "")


def _step(plan: Plan) -> str:
    case, t, gpu = plan.case, plan.time, plan.case.hardware
    waits = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in t.exposed.items()) or "nothing"
    share = gpu.compiled if case.config.compile else gpu.eager
    return "\n".join((
        f"step {t.step:.2f} s: products {t.products:.2f}, waiting for {waits}, bubble {t.bubble:.2f}, "
        f"update {t.update:.2f}",
        f"{t.tokens_per_second:,.0f} tokens/s ({t.tokens_per_second / case.world_size:,.0f} per GPU), "
        f"MFU {t.mfu:.1%}",
        f"assumed: products at {share:.1%} of {gpu.peak / 1e12:.0f} TFLOP/s, "
        f"{gpu.intra / 1e9:.0f} GB/s inside a node, {gpu.inter / 1e9:.0f} between; "
        f"tp, cp, ep are waited for; FSDP hides behind {HIDDEN:.0%} of the products, {FELT:.0%} of it is "
        "felt in any case; activations as an eager GPU keeps them",
    ))  # fmt: skip


def _gb(number: float) -> str:
    return f"{number / 1e9:.2f}" if number < 1e9 else f"{number / 1e9:.1f}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns side by side: the first to the left, the last as it is, the others to the right."""
    first, *others, _ = (max(map(len, column)) for column in zip(*rows))
    return "\n".join(
        "  ".join([row[0].ljust(first), *map(str.rjust, row[1:-1], others), row[-1]]).rstrip()
        for row in rows
    )
