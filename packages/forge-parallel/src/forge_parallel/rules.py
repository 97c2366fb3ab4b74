"""Rules for a configuration, a layout and the facts of a model; a broken rule is a Problem with key, code, value and
fix. `check_model` finds the facts of a module.

    broken = problems(config, config.axes(8), ModelFacts(seq_len=2048, num_layers=12, num_experts=0))

The runner calls `problems` before any process starts, the planner for each layout, `parallelize` and `prove` with
the model; each passes the facts that it has. Code that checks a single tensor or argument calls the function of one
rule, such as `uneven_sequence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from forge_parallel import _torch_compat
from forge_parallel._shared.problems import Problem, Shown
from forge_parallel.config import (
    V_SCHEDULES,
    Layout,
    ParallelConfig,
    next_allowed_count,
    num_stages,
    splits_backward,
)

__all__ = [
    "ModelFacts",
    "ShardedDim",
    "mtp_problem",
    "problems",
    "schedule_problems",
    "tied_on_one_rank",
    "too_few_layers",
    "uneven_sequence",
    "uneven_vocab",
    "uneven_width",
]


class ShardedDim(NamedTuple):
    """A dim that tp shards."""

    key: str
    """Its name, as that of a module or an option."""
    size: int
    unit: int = 1
    """The size on a rank must be a multiple of it: head_dim, for example."""
    shared: bool = False
    """Several ranks may have the same unit, if there are more ranks than units."""
    width: int = 1
    """The other dim, for a table sharded by ids."""
    what: str = ""
    """What `size` counts, for messages: "ids"."""


@dataclass(frozen=True)
class ModelFacts:
    """ModelFacts about a model and its batch. Rules about unknown ones (None, or empty) are skipped.

    seq_len            tokens of a sequence, over all ranks
    micro_batch        sequences of a micro-batch
    num_micro_batches  micro-batches of a data rank in a step
    num_layers         blocks that a pipeline distributes over stages
    num_blocks         blocks that recomputation can use
    num_experts        experts of a layer; 0 for a dense model
    widths, vocab      dims that tp shards evenly (heads, hidden widths), and tables sharded by ids
    tied               names of modules at both ends of the model
    first_blocks       blocks that the first stage of a pipeline needs
    whole_batch        features that need all tokens of a micro-batch: {feature with its value: alternative}
    obstacles          {axis: problems of a model that cannot be parallelized over it}
    model, names       for problems: the model's name, and {key: name in the configuration}, as "data.seq_len"
    """

    seq_len: int | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    num_layers: int | None = None
    num_blocks: int | None = None
    num_experts: int | None = None
    widths: Sequence[ShardedDim] = ()
    vocab: Sequence[ShardedDim] = ()
    tied: Sequence[str] = ()
    first_blocks: int = 1
    whole_batch: Mapping[str, str] = field(default_factory=dict)
    obstacles: Mapping[str, Sequence[Problem]] = field(default_factory=dict)
    model: str = "the model"
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """The user's name of a key."""
        return self.names.get(key, key)


def problems(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> list[Problem]:
    """Every broken rule. Needs no process group and costs microseconds.

    `layout` is `config.axes(world_size)`, which itself raises unless the axes fit the ranks.
    """
    rules = (_sequence, _float8, _experts, _context, _tensor, _pipeline, _recompute)
    return [problem for rule in rules for problem in rule(config, layout, facts)]


def _sequence(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """A mixture of experts shards its tokens over tp, with and without sequence_parallel."""
    sharded = config.sequence_parallel or bool(facts.num_experts)
    if facts.seq_len is not None:
        tp = layout.tp if sharded else 1
        if wrong := uneven_sequence(facts.seq_len, layout.cp, tp, facts.names):
            yield wrong


def _float8(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """Float8 kernels sum weight gradients over 16 tokens at a time; the emulation on the CPU does not."""
    micro, length = facts.micro_batch, facts.seq_len
    if config.float8 == "none" or config.device == "cpu" or micro is None or length is None:
        return
    # under tp, shared experts see only the tokens of this rank, other layers all of them
    ranks = layout.cp * (layout.tp if facts.num_experts else 1)
    tokens = micro * length // ranks
    if tokens % 16:
        rule = (
            "must have a multiple of 16 tokens of a micro-batch on each rank, and they are "
            f"{tokens} ({micro} x {length} over {ranks})"
        )
        fix = f"use a {facts.name('seq_len')} divisible by {16 * ranks}, or float8 = 'none'"
        yield Problem(facts.name("float8"), "tokens", config.float8, rule, fix)


def _experts(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """`ep` divides the number of experts."""
    ep, experts = layout.ep, facts.num_experts
    if ep > 1 and experts is not None and (not experts or experts % ep):
        fix = f"use ep = 1, or {max(ep, experts // ep * ep)} experts"
        rule = f"must divide {facts.name('num_experts')} {experts} of a mixture"
        yield Problem(facts.name("ep"), "divides", ep, rule, fix)


def _context(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """Attention that cp computes, and no feature that needs all tokens under cp or tp."""
    if layout.cp > 1:
        yield from facts.obstacles.get("cp", ())
    if layout.cp * layout.tp == 1:
        return
    for feature, other in facts.whole_batch.items():
        key, _, value = feature.partition(" ")
        axes = f"{facts.name('cp')} and {facts.name('tp')} above 1, which shard them"
        rule = f"decides over all tokens of a micro-batch and must go without {axes}"
        fix = f"use data, expert or pipeline ranks, or {other}"
        yield Problem(key, "whole_batch", Shown(value), rule, fix)


def _tensor(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """Dims that tp shards."""
    tp = layout.tp
    if tp == 1:
        return
    yield from facts.obstacles.get("tp", ())
    for dim in facts.widths:
        if wrong := uneven_width(dim, tp, facts.names):
            yield wrong
    for dim in facts.vocab:
        if wrong := uneven_vocab(dim, tp, layout.dp_shard * layout.cp, facts.names):
            yield wrong


def _pipeline(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """A model in stages, and a schedule that can run it."""
    if layout.pp == 1:
        return
    if found := facts.obstacles.get("pp", ()):
        yield from found
        return
    if wrong := tied_on_one_rank(config, facts.tied, facts.names):
        yield wrong
    yield from schedule_problems(
        config, facts.num_micro_batches, facts.num_layers, facts.names, facts.first_blocks
    )


def _recompute(config: ParallelConfig, layout: Layout, facts: ModelFacts) -> Iterator[Problem]:
    """Blocks whose inputs recomputation keeps."""
    if config.recompute != "none" and facts.num_blocks == 0:
        rule = f"must have blocks to keep the inputs of, and {facts.model} defines none"
        fix = "give it blocks(), name them with blocks=, or use recompute = 'none'"
        yield Problem(facts.name("recompute"), "blocks", config.recompute, rule, fix)


def uneven_sequence(
    seq_len: int, cp: int = 1, tp: int = 1, names: Mapping[str, str] = {}
) -> Problem | None:
    """A Problem if sequences of `seq_len` tokens cannot be sharded over cp and tp, else None.

    Ring attention needs 2 cp equal chunks, two for each cp rank; tp divides the tokens of a cp rank.
    """
    # with cp: the least common multiple of 2 cp and cp tp
    multiple = tp if cp == 1 else cp * (tp if tp % 2 == 0 else 2 * tp)
    if seq_len % multiple == 0:
        return None
    fits = seq_len // multiple * multiple
    near = f"{fits} or {fits + multiple}" if fits else f"{multiple}"
    axes = (
        f"{names.get(axis, axis)} {size}" for axis, size in (("cp", cp), ("tp", tp)) if size > 1
    )
    rule = f"must be divisible by {multiple} with {' and '.join(axes)}"
    return Problem(names.get("seq_len", "seq_len"), "divides", seq_len, rule, f"use {near}")


def uneven_width(dim: ShardedDim, tp: int, names: Mapping[str, str] = {}) -> Problem | None:
    """A Problem if `tp` ranks cannot have equally many units of a dim, else None."""
    units, rest = divmod(dim.size, dim.unit)
    if not rest and (units % tp == 0 or (dim.shared and tp % units == 0)):
        return None
    fits = [str(n) for n in range(1, tp) if dim.size % (dim.unit * n) == 0] or ["1"]
    name = names.get("tp", "tp")
    rule = "or divide it" if dim.shared else "no rank may share one"
    rule = f"{dim.what} must be divisible by {name} {tp}, {rule}".lstrip()
    return Problem(dim.key, "divides", dim.size, rule, f"use tp {', '.join(fits)}")


def uneven_vocab(
    dim: ShardedDim, tp: int, shards: int = 1, names: Mapping[str, str] = {}
) -> Problem | None:
    """A Problem if a table (V, D), V = dim.size and D = dim.width, cannot be sharded by ids over `tp` ranks and then
    over `shards` ranks of FSDP2, else None.

    The tp ranks may have unevenly many ids, but at least one. FSDP2 shards by ids again, or, if torch would compute
    wrong offsets for such shards, by D (`axes.fsdp.shard_of`), which `shards` must then divide.
    """
    name = names.get("tp", "tp")
    if -(-dim.size // tp) * (tp - 1) >= dim.size:
        rule = f"{dim.what} must leave none of {name} {tp} ranks empty".lstrip()
        return Problem(dim.key, "empty", dim.size, rule, "use a smaller tp")
    if offsets_are_right(dim.size, tp, shards) or dim.width % shards == 0:
        return None
    rule = (
        f"{dim.what} of width {dim.width} over {name} {tp} and {shards} shards must be divisible by {tp}, or the width "
        f"by {shards}, as torch misplaces uneven shards of ids"
    )
    fix = f"use {-(-dim.size // tp) * tp} ids"
    return Problem(dim.key, "shards", dim.size, rule.lstrip(), fix)


def offsets_are_right(size: int, tp: int, shards: int) -> bool:
    """Whether torch's DTensor computes right offsets for a dim sharded over tp and then over FSDP2's shards.

    If the sizes on tp ranks, and so their shards, differ it computes wrong ones, also for checkpoints: seen in torch
    2.11 to 2.13; later ones were not checked.
    """
    largest = -(-size // tp)
    on_ranks = {max(0, min(largest, size - rank * largest)) for rank in range(tp)}
    return shards < 3 or len({-(-local // shards) for local in on_ranks}) == 1


def width_of(shape: Sequence[int]) -> int:
    """Size of dim 1, by which FSDP2 may shard a parameter; 1 for one that has none."""
    return shape[1] if len(shape) > 1 else 1


def mtp_problem(config: ParallelConfig, ahead: int, name: str = "ahead") -> Problem | None:
    """A Problem if multi-token prediction of `ahead` depths cannot run under the schedule, else None."""
    if not ahead or config.pp == 1 or not splits_backward(config):
        return None
    rule = f"halves the backward, in which torch loses track of an embedding that {name} {ahead} reads on the last stage"
    fix = "use 1f1b or interleaved_1f1b"
    return Problem("pp_schedule", "ahead", config.pp_schedule, rule, fix)


def tied_on_one_rank(
    config: ParallelConfig, tied: Sequence[str], names: Mapping[str, str] = {}
) -> Problem | None:
    """A Problem if the schedule cannot run a model with `tied` ends, else None."""
    if not tied or config.pp == 1 or config.pp_schedule not in V_SCHEDULES:
        return None
    rule = f"must put the two ends of {', '.join(tied)}, which is tied, on two ranks, and puts them on one"
    fix = "untie it, or use interleaved_zero_bubble"
    return Problem(names.get("pp_schedule", "pp_schedule"), "tied", config.pp_schedule, rule, fix)


def too_few_layers(
    num_layers: int, stages: int, names: Mapping[str, str] = {}, first_blocks: int = 1
) -> Problem | None:
    """A Problem if there are fewer layers than stages need, of which the first needs `first_blocks`, else None."""
    if num_layers >= stages - 1 + first_blocks:
        return None
    rule = f"must be at least one for each of the {stages} stages"
    if first_blocks > 1:
        rule += f", and {first_blocks} for the first, which read an input that only it has"
    most = max(1, num_layers + 1 - first_blocks)
    fix = f"use pp x pp_stages_per_rank up to {most}, or more layers"
    return Problem(names.get("num_layers", "num_layers"), "stages", num_layers, rule, fix)


def schedule_problems(
    config: ParallelConfig,
    num_micro_batches: int | None,
    num_layers: int | None,
    names: Mapping[str, str] = {},
    first_blocks: int = 1,
) -> list[Problem]:
    """Reasons why a pipeline cannot run; empty without pp.

    `num_micro_batches`: of one data rank in a step. None skips the rules about it, as it does for `num_layers`.
    """
    if config.pp == 1:
        return []
    found, stages = [], num_stages(config)
    if num_layers is not None and (
        wrong := too_few_layers(num_layers, stages, names, first_blocks)
    ):
        found.append(wrong)

    if num_micro_batches is not None:
        allowed = next_allowed_count(config, num_micro_batches)
        if num_micro_batches != allowed:
            found.append(_count_problem(config, num_micro_batches, allowed))

    if not splits_backward(config):
        return found
    schedule = config.pp_schedule
    if not _torch_compat.SPLITS_ANY_BACKWARD:
        rule = f"must have torch 2.13 or newer, not {torch.__version__}, whose halves of a backward do not fit every model"
        key = names.get("pp_schedule", "pp_schedule")
        found.append(Problem(key, "requires", schedule, rule, "use interleaved_1f1b"))
    if config.compile:
        rule = f"must be off with {schedule}, which halves the backward: a compiled block would run its own twice"
        fix = "use compile = false, or interleaved_1f1b"
        found.append(Problem(names.get("compile", "compile"), "excludes", True, rule, fix))
    return found


def _count_problem(config: ParallelConfig, count: int, allowed: int) -> Problem:
    """The schedule's rule for the number of micro-batches."""
    key, pp, schedule = "num_micro_batches", config.pp, config.pp_schedule
    if count < 1:
        return Problem(key, "range", count, "must be at least 1", f"use pp {pp} or more of them")
    if schedule == "1f1b":
        fix = f"use {allowed} or more, or gpipe"
        return Problem(key, "pp", count, f"must be at least pp {pp} with 1f1b", fix)
    if schedule == "dualpipev":
        rule = f"must be at least the {num_stages(config)} stages with dualpipev"
        return Problem(key, "stages", count, rule, f"use {allowed} or more, or zbv_zero_bubble")
    rule = f"must be a multiple of their {count // pp} rounds of pp {pp} with {schedule}"
    return Problem(key, "rounds", count, rule, f"use {count - count % pp} or {allowed}")


#: On a CPU torch has these two.
_ON_CPU = ("flash", "math")
#: On CUDA these compute only in 16 bits.
_HALF_ONLY = ("flash", "cudnn")


def sdpa_problem(name: str, device: torch.device, precision: str) -> Problem | None:
    """A problem if the device does not have the kernel, or not in this precision or under deterministic algorithms."""
    if name == "auto":
        return None
    if device.type == "cpu" and name not in _ON_CPU:
        fix = f"use {' or '.join(_ON_CPU)}, or auto"
        return Problem("sdpa", "device", name, "is a kernel of CUDA, and the device is cpu", fix)
    if device.type == "cuda" and name in _HALF_ONLY and precision == "fp32":
        rule, fix = (
            "computes in 16 bits on CUDA, and precision is fp32",
            "use efficient or math, or auto",
        )
        return Problem("sdpa", "precision", name, rule, fix)

    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    if name == "cudnn" and torch.are_deterministic_algorithms_enabled() and strict:
        rule = "adds in any order in its backward, and torch.use_deterministic_algorithms is set"
        return Problem("sdpa", "deterministic", name, rule, "use flash or auto")
    return None
