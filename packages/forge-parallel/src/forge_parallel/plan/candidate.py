"""A candidate: one layout with batch and hardware for a model, and the search space that makes candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from forge_parallel._shared.problems import Problem, raise_problems
from forge_parallel.config import Layout, ParallelConfig
from forge_parallel.legal import problems
from forge_parallel.micro_batches import MicroBatches, divide_batch
from forge_parallel.plan.profile import Part, Profile
from forge_parallel.plan.topology import Hardware, Topology
from forge_parallel.plan.trace import BlockTrace, Trace, trace
from forge_parallel.stages import splits_backward, stages_on

MODES = ("none", "selective", "full")
_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Storage:
    """Bytes of an element, and differences of other trainers from Forge.

    frozen: of weights that are not trained and saved apart; by default they are as the others. moments: of the optimizer, per trained parameter (AdamW 8). loss: per logit beside the logits, by default their
    gradient in the compute dtype; workspace: of the loss, at most. sync_once: gradients stay unsharded until the last
    micro-batch; whole_logits: logits are gathered; compiled_tp: tp does not break compilation. fused_loss: the head makes
    the loss block by block, and keeps the gradients of its input and (in fp32) of its weight instead of logits.
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
    """A job without its layout. The search tries all `micro_batches` and `modes` of recomputation."""

    profile: Profile
    config: ParallelConfig
    world_size: int
    global_batch: int
    hardware: Hardware
    gpus_per_node: int
    micro_batches: Sequence[int | None] = (None,)
    modes: Sequence[str] = MODES
    storage: Storage = field(default_factory=Storage)
    #: Other problems of a layout, of whoever trains in it.
    refuses: Callable[[ParallelConfig], Sequence[Any]] = lambda config: ()

    def candidate(self, config: ParallelConfig, micro_batch: int | None) -> Candidate:
        """One candidate, by default with the micro_batch of `divide_batch`. ValueError, a line for each broken rule."""
        readers = config.axes(self.world_size, self.gpus_per_node).batch_size
        parts = divide_batch(config, self.global_batch, readers, micro_batch)
        candidate = Candidate(self.profile, config, self.world_size, self.global_batch,
                    parts.size, self.hardware, self.gpus_per_node, self.storage)  # fmt: skip
        raise_problems("", [*_problems(candidate), *self.refuses(config)])
        return candidate


@dataclass(frozen=True)
class Candidate:
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
        """Sizes of the mesh axes on these GPUs."""
        return self.config.axes(self.world_size, self.gpus_per_node)

    @cached_property
    def topology(self) -> Topology:
        """Which ranks of each axis are on one node."""
        return Topology(self.layout, self.gpus_per_node)

    @cached_property
    def micro_batches(self) -> MicroBatches:
        """How the data ranks divide the global batch."""
        return divide_batch(
            self.config, self.global_batch, self.layout.batch_size, self.micro_batch
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a data rank in a step, filler included."""
        return self.micro_batches.count

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
        """Whether FSDP2 wraps the model."""
        return self.world_size > 1 or self.config.precision != "fp32" or self.config.cpu_offload

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
        """The trace of one row; computed once per (tp, cp, ...)."""
        c, d = self.config, self.layout
        dtype = torch.bfloat16 if c.precision == "bf16" else torch.float32
        shape = (d.tp, d.cp, c.sequence_parallel, dtype, c.cp_exchange == "all_gather")
        return self.profile.once(shape, lambda: trace(self.profile, *shape))

    def load(self, pp_rank: int) -> Load:
        """The stages and parameters of a pipeline rank."""
        piped = self.layout.pp > 1
        stages = stages_on(self.config, pp_rank) if piped else [0]
        count = self.layout.pp * self.config.stages_per_rank if piped else 1
        ranges = self.profile.stage_ranges(count)
        kinds = [[self.profile.order[i] for i in ranges[stage]] for stage in stages]
        first, last = 0 in stages, count - 1 in stages
        blocks = [self.profile.kinds[kind] for stage in kinds for kind in stage]
        return Load(kinds, first, last, blocks, self.profile.ends(first, last))


@dataclass(frozen=True)
class Load:
    """Kinds of the blocks in each stage of a pipeline rank, whether it has the ends of the model, and the
    parameters of both."""

    stages: list[list[int]]
    first: bool
    last: bool
    blocks: list[Part]
    ends: Part

    @property
    def kinds(self) -> list[int]:
        return [kind for stage in self.stages for kind in stage]

    @property
    def parts(self) -> list[Part]:
        return [*self.blocks, self.ends]

    def traced_ends(self, trace: Trace) -> list[BlockTrace]:
        return [trace.first] * self.first + [trace.last] * self.last


def describe(candidate: Candidate) -> str:
    """`dp_shard 8 x tp 4, micro_batch 2, recompute full`, in words of the configuration."""
    c, d = candidate.config, candidate.layout
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    axes = [f"{name} {getattr(d, name)}" for name in names if getattr(d, name) > 1]
    parts = [" x ".join(axes) or "one rank"]
    parts += [f"ep {d.ep}"] * (d.ep > 1) + [c.pp_schedule] * (d.pp > 1)
    parts += [f"micro_batch {candidate.micro_batch}", f"recompute {c.recompute}"]
    return ", ".join(parts + ([f"memory_budget {c.memory_budget:g}"] if c.memory_budget else []))


def _problems(candidate: Candidate) -> list[Problem]:
    """Every rule that the candidate breaks."""
    d, count = candidate.layout, candidate.num_micro_batches
    facts = candidate.profile.facts(d.tp, d.dp_shard * d.cp)
    known = replace(facts, micro_batch=candidate.micro_batch, num_micro_batches=count)
    return problems(candidate.config, d, known)
