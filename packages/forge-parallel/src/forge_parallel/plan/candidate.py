"""Candidate of the planner: one layout of a model with batch and hardware, and the search space that makes candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from forge_parallel._shared.problems import raise_problems
from forge_parallel.compute import MicroBatches, divide_batch
from forge_parallel.config import (
    Layout,
    ParallelConfig,
    casts_on_one_rank,
    splits_backward,
    stages_on,
)
from forge_parallel.plan.profile import ParamGroup, Profile
from forge_parallel.plan.topology import Hardware, Topology
from forge_parallel.plan.trace import Trace, trace
from forge_parallel.rules import problems

MODES = ("none", "selective", "full")
_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Storage:
    """Bytes per element of what a rank stores, and differences of other trainers from Forge.

    weights, gradients   per parameter
    frozen               per parameter that is not trained and is saved apart; None: as `weights`
    moments              of the optimizer, per trained parameter: 8 for AdamW
    loss                 per logit in addition to the logits; None: their gradient in the compute dtype
    workspace            most bytes of the loss's workspace
    sync_once            gradients stay unsharded until the last micro-batch
    whole_logits         logits are gathered over tp
    compiled_tp          blocks can be compiled under tp
    fused_loss           the head computes the loss block by block, and keeps the gradients of its input and (in fp32) of
                         its weight instead of logits
    """

    weights: int = 4
    frozen: int | None = None
    gradients: int = 4
    moments: float = 8
    loss: float | None = None
    workspace: float = 2**30
    sync_once: bool = False
    whole_logits: bool = False
    compiled_tp: bool = True
    fused_loss: bool = False


@dataclass(frozen=True)
class SearchSpace:
    """A job without its layout. The search tries all `micro_batches` and all `modes` of recomputation.

    `refuses(config)` returns further problems of a layout, those of the trainer.
    """

    profile: Profile
    config: ParallelConfig
    world_size: int
    global_batch: int
    hardware: Hardware
    gpus_per_node: int
    micro_batches: Sequence[int | None] = (None,)
    modes: Sequence[str] = MODES
    storage: Storage = field(default_factory=Storage)
    refuses: Callable[[ParallelConfig], Sequence[Any]] = lambda config: ()

    def candidate(self, config: ParallelConfig, micro_batch: int | None) -> Candidate:
        """Return one candidate; `micro_batch` None: that of `divide_batch`. Raises ValueError with every broken rule."""
        readers = config.axes(self.world_size, self.gpus_per_node).batch_size
        size = divide_batch(config, self.global_batch, readers, micro_batch).size
        candidate = Candidate(self.profile, config, self.world_size, self.global_batch,
                    size, self.hardware, self.gpus_per_node, self.storage)  # fmt: skip

        d, profile = candidate.layout, self.profile
        facts = replace(
            profile.facts(d.tp, d.dp_shard * d.cp),
            micro_batch=size,
            num_micro_batches=candidate.num_micro_batches,
        )
        raise_problems("", [*problems(config, d, facts), *self.refuses(config)])
        return candidate


@dataclass(frozen=True)
class Candidate:
    """A model under a ParallelConfig on `world_size` ranks, `micro_batch` sequences at a time."""

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
        """Sizes of the mesh axes on these GPUs."""
        return self.config.axes(self.world_size, self.gpus_per_node)

    @cached_property
    def topology(self) -> Topology:
        """Placement of the ranks on nodes."""
        return Topology(self.layout, self.gpus_per_node)

    @cached_property
    def micro_batches(self) -> MicroBatches:
        """Division of the global batch among the data ranks."""
        return divide_batch(
            self.config, self.global_batch, self.layout.batch_size, self.micro_batch
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a data rank in a step, with padding sequences."""
        return self.micro_batches.count

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.profile.seq_len

    @property
    def compute(self) -> int:
        """Bytes per element in forward and backward."""
        return _BYTES[self.config.precision]

    @property
    def reduce(self) -> int:
        """Bytes per element of a gradient in a reduction."""
        return _BYTES[self.config.reduce_dtype if self.config.precision == "bf16" else "fp32"]

    @property
    def wrapped(self) -> bool:
        """Whether FSDP2 wraps the model."""
        return self.world_size > 1 or self.config.precision != "fp32" or self.config.cpu_offload

    @property
    def casts(self) -> bool:
        """Whether one process casts its parameters for each forward, in place of FSDP2 (`axes.precision`)."""
        ours = not self.storage.sync_once and self.storage.frozen != 2
        return self.wrapped and self.world_size == 1 and ours and casts_on_one_rank(self.config)

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.config.compile and (self.storage.compiled_tp or self.layout.tp == 1)

    @property
    def reshards(self) -> bool:
        """Whether blocks free their gathered weights after the forward."""
        sharded = self.layout.dp_shard * self.layout.cp > 1
        return sharded and self.config.reshard_after_forward and not splits_backward(self.config)

    @cached_property
    def trace(self) -> Trace:
        """Trace of one sequence; computed once per (tp, cp, ...)."""
        c, d = self.config, self.layout
        dtype = torch.bfloat16 if c.precision == "bf16" else torch.float32
        shape = (d.tp, d.cp, c.sequence_parallel, dtype, c.cp_exchange == "all_gather")
        return self.profile.once(shape, lambda: trace(self.profile, *shape))

    def load(self, pp_rank: int) -> Load:
        """Stages and parameters of a pipeline rank."""
        is_piped = self.layout.pp > 1
        stages = stages_on(self.config, pp_rank) if is_piped else [0]
        count = self.layout.pp * self.config.stages_per_rank if is_piped else 1
        ranges = self.profile.stage_ranges(count)
        kinds = [[self.profile.order[i] for i in ranges[stage]] for stage in stages]
        first, last = 0 in stages, count - 1 in stages
        return Load(kinds, first, last, self.profile.kinds, self.profile.ends(first, last))


class Load(NamedTuple):
    """Contents of a pipeline rank: kinds of the blocks in each of its `stages`, whether it has the `first` and the
    `last` modules of the model, the profile's groups by kind, and the group of those modules."""

    stages: list[list[int]]
    first: bool
    last: bool
    by_kind: list[ParamGroup]
    ends: ParamGroup

    @property
    def kinds(self) -> list[int]:
        """Kind of each block, in order."""
        return [kind for stage in self.stages for kind in stage]

    @property
    def blocks(self) -> list[ParamGroup]:
        """Parameters of each block, in order."""
        return [self.by_kind[kind] for kind in self.kinds]

    @property
    def groups(self) -> list[ParamGroup]:
        """All parameters of the rank."""
        return [*self.blocks, self.ends]


def describe(candidate: Candidate) -> str:
    """Describe a candidate in keys of the configuration: `dp_shard 8 x tp 4, micro_batch 2, recompute full`."""
    c, d = candidate.config, candidate.layout
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    axes = [f"{name} {getattr(d, name)}" for name in names if getattr(d, name) > 1]
    parts = [" x ".join(axes) or "one rank"]
    parts += [f"ep {d.ep}"] * (d.ep > 1) + [c.pp_schedule] * (d.pp > 1)
    parts += [f"micro_batch {candidate.micro_batch}", f"recompute {c.recompute}"]
    return ", ".join(parts + ([f"memory_budget {c.memory_budget:g}"] if c.memory_budget else []))
