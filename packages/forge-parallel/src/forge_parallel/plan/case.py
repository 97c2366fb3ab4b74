"""One way to run a model: its layout, batch and hardware, and how bytes are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from forge_parallel.config import Layout, ParallelConfig
from forge_parallel.pipeline.schedule import splits_backward, stages_on
from forge_parallel.plan.profile import Part, Profile
from forge_parallel.plan.topology import Hardware, Topology
from forge_parallel.plan.trace import Kept, Trace, trace

_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Storage:
    """Bytes of an element, and what other trainers than Forge do otherwise.

    moments: of the optimizer, per trained parameter (AdamW 8). loss: per logit beside the logits, their
    gradient by default; workspace: of the loss, at most. sync_once: gradients are kept whole until the last
    micro-batch; gathers: how often a whole input is gathered under tp where Forge does it once for
    siblings; whole_logits: logits are gathered; compiled_tp: tp does not break compilation.
    """

    weights: int = 4
    gradients: int = 4
    moments: float = 8
    loss: float = 2
    workspace: float = 2**30
    sync_once: bool = False
    gathers: float = 1.0
    whole_logits: bool = False
    compiled_tp: bool = True


@dataclass(frozen=True)
class Case:
    """A model under a ParallelConfig on `world_size` ranks, `micro_batch` rows at a time."""

    profile: Profile
    config: ParallelConfig
    world_size: int
    global_batch: int
    micro_batch: int
    hardware: Hardware
    gpus_per_node: int
    storage: Storage = field(default_factory=Storage)

    @cached_property
    def layout(self) -> Layout:
        return self.config.axes(self.world_size, self.gpus_per_node)

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.layout, self.gpus_per_node)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a data rank in a step."""
        return self.global_batch // self.layout.batch_size // self.micro_batch

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.profile.seq_len

    @property
    def compute(self) -> int:
        """Bytes of an element in forward and backward."""
        return _BYTES[self.config.precision]

    @property
    def reduce(self) -> int:
        """Bytes of an element of a gradient that is summed."""
        return _BYTES[self.config.reduce_dtype if self.config.precision == "bf16" else "fp32"]

    @property
    def wrapped(self) -> bool:
        """Whether parameters are FSDP's."""
        return self.world_size > 1 or self.config.precision != "fp32" or self.config.cpu_offload

    @property
    def reshards(self) -> bool:
        """Whether blocks free their gathered weights after the forward."""
        d = self.layout
        return (
            self.config.reshard_after_forward
            and not splits_backward(self.config)
            and d.dp_shard * d.cp > 1
        )

    @cached_property
    def trace(self) -> Trace:
        """For one row; made once per shape of a rank."""
        c, d = self.config, self.layout
        key = (d.tp, d.cp, d.tp > 1 and c.sequence_parallel, c.precision, c.cp_exchange)
        dtype = torch.bfloat16 if c.precision == "bf16" else torch.float32
        gather = c.cp_exchange == "all_gather"
        return self.profile.once(
            key, lambda: trace(self.profile, tp=d.tp, cp=d.cp, dtype=dtype, gather_keys=gather,
                               sequence_parallel=c.sequence_parallel)
        )  # fmt: skip

    def load(self, pp_rank: int) -> Load:
        """What a pipeline rank holds."""
        stages = stages_on(self.config, pp_rank) if self.layout.pp > 1 else [0]
        count = self.layout.pp * (self.config.stages_per_rank if self.layout.pp > 1 else 1)
        ranges = self.profile.stage_ranges(count)
        return Load(
            [[self.profile.order[i] for i in ranges[stage]] for stage in stages],
            0 in stages,
            count - 1 in stages,
        )


@dataclass(frozen=True)
class Load:
    """Kinds of the blocks in each stage of a pipeline rank, and whether it has the ends of the model."""

    stages: list[list[int]]
    first: bool
    last: bool

    @property
    def kinds(self) -> list[int]:
        return [kind for stage in self.stages for kind in stage]

    def parts(self, profile: Profile) -> list[Part]:
        """Its blocks and what it has besides."""
        return [*(profile.kinds[k] for k in self.kinds), profile.ends(self.first, self.last)]

    def traced_ends(self, trace: Trace) -> list[Kept]:
        return [trace.first] * self.first + [trace.last] * self.last
