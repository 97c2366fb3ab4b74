"""Device, precision and layout of a job: `ParallelConfig`; `Layout`, its axes on a number of ranks; pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args, get_type_hints

from forge_parallel._shared.fields import field
from forge_parallel._shared.problems import Problem, invalid, raise_problems

__all__ = ["DEVICES", "SCHEDULES", "V_SCHEDULES", "Layout", "ParallelConfig"]

DEVICES = ("auto", "cpu", "cuda")
#: Stages per rank of each schedule; the interleaved ones may have more.
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
    "dualpipev": 2,
}
#: Schedules whose first and last stage are on the same rank.
V_SCHEDULES = ("zbv_zero_bubble", "dualpipev")
#: Schedules that compute gradients of inputs and of weights apart.
_IN_HALVES = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


class Layout(NamedTuple):
    """Sizes of the axes on a given number of ranks, none of them -1."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int

    @property
    def batch_size(self) -> int:
        """Ranks that read different data: dp_replicate x dp_shard."""
        return self.dp_replicate * self.dp_shard

    def axes(self) -> dict[str, tuple[int, int]]:
        """name -> (ranks of a group, distance between neighbors in it), of every way to group the ranks.

        Ranks are numbered in row-major order over (pp, dp_replicate, dp_shard, cp, tp). batch is dp_replicate x dp_shard;
        fsdp, dp_shard x cp, shards dense parameters; efsdp and ep divide the same ranks (of one replica of a stage)
        for experts, ep innermost; the ranks of a stage hold the same layers.
        """
        copy = self.dp_shard * self.cp * self.tp
        return {
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "dp_shard": (self.dp_shard, self.cp * self.tp),
            "fsdp": (self.dp_shard * self.cp, self.tp),
            "batch": (self.batch_size, self.cp * self.tp),
            "ep": (self.ep, 1),
            "efsdp": (copy // self.ep, self.ep),
            "dp_replicate": (self.dp_replicate, copy),
            "stage": (self.dp_replicate * copy, 1),
            "pp": (self.pp, self.dp_replicate * copy),
        }

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank coordinates: position of `rank` in its group along each of `axes`."""
        return {name: rank // step % size for name, (size, step) in self.axes().items()}

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of `axis`, each its ranks in order."""
        size, step = self.axes()[axis]
        ranks = range(self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp)
        return [
            [rank + i * step for i in range(size)] for rank in ranks if rank // step % size == 0
        ]


@dataclass(frozen=True)
class ParallelConfig:
    """Device, precision and layout of a run. Raises ValueError with every broken rule.

    Usage: `ParallelConfig(dp_shard=8, tp=4)`; the launcher sets the number of ranks.
    """

    device: Literal["auto", "cpu", "cuda"] = field(
        "auto", "where tensors live; auto: the GPU if there is one, else the CPU"
    )
    precision: Literal["bf16", "fp32"] = field(
        "bf16",
        "dtype of forward and backward; bf16: of weights in param_dtype, summed gradients in reduce_dtype",
    )
    param_dtype: Literal["fp32", "bf16"] = field(
        "fp32",
        "dtype in which trained weights and their gradients are stored; bf16: no fp32 masters, for an optimizer "
        "that rounds updates stochastically"
    )  # fmt: skip
    reduce_dtype: Literal["fp32", "bf16"] = field(
        "fp32", "dtype in which FSDP2 sums gradients over data ranks; bf16 halves the traffic"
    )
    layout: Literal["manual", "auto"] = field(
        "manual", "auto: the planner chooses the axes for the ranks there are, and says why"
    )
    dp_replicate: int = field(
        1, "copies of the sharded model (HSDP); gradients are summed over them"
    )
    dp_shard: int = field(
        -1, "ranks that share one copy of the model (FSDP2); -1: all that are left"
    )
    tp: int = field(1, "ranks that share each matrix (tensor parallelism)")
    sequence_parallel: bool = field(
        True, "under tp: cut the stream between sublayers along the sequence, too; false: each tp rank "
              "holds all of it"
    )  # fmt: skip
    async_tp: bool = field(
        False, "under tp on CUDA with compile: overlap its communication with the products"
    )
    cp: int = field(1, "ranks that share each sequence (context parallelism)")
    cp_exchange: Literal["all_gather", "ring"] = field(
        "all_gather", "how keys and values travel under cp; ring: less memory, more steps"
    )
    pp: int = field(1, "ranks that share the depth of the model (pipeline)")
    pp_schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ] = field("1f1b", "order of the micro-batches in the pipeline")
    pp_stages_per_rank: int | None = field(
        None, "pieces of the model on each pipeline rank (default: 1, or 2 where the schedule has several)",
        range="those of pp_schedule; interleaved: 2 or more",
    )  # fmt: skip
    ep: int = field(
        1, "ranks that share the experts of a mixture; they also read data of their own"
    )
    gpus_per_node: int | None = field(
        None,
        "ranks with a fast network between them (default: those of a node as the launcher says)",
    )
    across_nodes: bool = field(False, "let tp and ep groups span nodes")
    float8: Literal["none", "tensorwise", "rowwise"] = field(
        "none", "scaling of float8 products in large linear layers (torchao); on a CPU emulated"
    )
    float8_all_gather: bool = field(False, "FSDP2 sends weights in float8; tensorwise on CUDA only")
    recompute: Literal["none", "full", "selective"] = field(
        "none",
        "activations computed again in the backward: none, all of a block, or the cheap ones",
    )
    recompute_every: int = field(1, "recompute in every k-th block")
    memory_budget: float | None = field(
        None, "share of the activations that compiled blocks may keep; the compiler chooses which"
    )
    sdpa: Literal["auto", "flash", "efficient", "cudnn", "math"] = field(
        "auto",
        "kernel of torch's attention; auto: the fastest that fits a call, without cuDNN under torch's deterministic "
        "algorithms (its backward adds in any order); cpu has flash and math; packed rows and windows in 16 bits on CUDA, "
        "soft-caps and sinks have functions of their own",
    )
    compile: bool = field(False, "torch.compile each block")
    reshard_after_forward: bool = field(
        True, "free gathered weights after the forward and gather them again for the backward; "
              "false: more memory, less traffic"
    )  # fmt: skip
    cpu_offload: bool = field(
        False,
        "keep weights, gradients and moments in host memory; the update runs there, and each micro-batch after "
        "the first waits once per parameter",
    )
    timeout_seconds: float = field(600.0, "seconds that a collective may take before the run fails")
    start_timeout_seconds: float = field(
        300.0, "seconds that ranks wait for each other at the start"
    )

    def __post_init__(self) -> None:
        raise_problems("parallel", _problems(self))

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank."""
        return self.pp_stages_per_rank or SCHEDULES[self.pp_schedule]

    def axes(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """The axes on `world_size` ranks. Raises ValueError unless they multiply to it, `ep` divides the ranks it
        borrows, and tp and ep stay inside a node of `ranks_per_node` (or `gpus_per_node`)."""
        fixed, shard = self.dp_replicate * self.tp * self.cp * self.pp, self.dp_shard
        ranks = f"{world_size} ranks of the job"
        if shard == -1:
            if world_size % fixed:
                rule = f"with {self._others()} must divide the {ranks}"
                fix = f"use a product of {_divisors(world_size)}"
                raise invalid("dp_shard", "divides", shard, rule, fix, where="parallel")
            shard = world_size // fixed

        if fixed * shard != world_size:
            others = f" with {self._others()}" if fixed > 1 else ""
            rule = f"{others} = {fixed * shard} must be the {ranks}".strip()
            fix = f"use dp_shard = -1 or start {fixed * shard} processes"
            raise invalid("dp_shard", "world_size", shard, rule, fix, where="parallel")

        lenders = shard * self.cp * self.tp
        if lenders % self.ep:
            rule = f"must divide dp_shard x cp x tp = {lenders}, whose ranks it borrows"
            fix = f"use {_divisors(lenders)}"
            raise invalid("ep", "divides", self.ep, rule, fix, where="parallel")

        layout = Layout(self.pp, self.dp_replicate, shard, self.cp, self.tp, self.ep)
        self._check_nodes(world_size, self.gpus_per_node or ranks_per_node)
        return layout

    def _others(self) -> str:
        """The axes above 1 but dp_shard, as a product: `dp_replicate 2 x tp 4`."""
        sizes = {"dp_replicate": self.dp_replicate, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)

    def _check_nodes(self, world_size: int, per_node: int | None) -> None:
        """tp and ep groups of neighboring ranks must stay inside a node."""
        if per_node is None or per_node >= world_size or self.across_nodes:
            return
        for name, size in (("tp", self.tp), ("ep", self.ep)):
            if per_node % size:
                rule = f"must stay inside a node of {per_node} ranks"
                fix = f"use {_divisors(per_node)}, or across_nodes = true"
                raise invalid(name, "node", size, rule, fix, where="parallel")


_TYPES = get_type_hints(ParallelConfig)
#: Keys with named choices (their Literal), and the fix for another value.
_CHOICES = {
    "device": "use auto",
    "precision": "use bf16 (fp32 weights, bf16 compute) or fp32",
    "param_dtype": "use fp32",
    "reduce_dtype": "use fp32",
    "layout": "use manual and set the axes, or auto",
    "cp_exchange": "use all_gather, or ring for long contexts",
    "pp_schedule": "use 1f1b",
    "float8": "use none",
    "recompute": "use none, or full to save the most memory",
}
_COUNTS = {
    "dp_replicate": "use 1 for plain FSDP",
    "tp": "use 1 for no tensor parallelism",
    "cp": "use 1 for no context parallelism",
    "pp": "use 1 for no pipeline",
    "ep": "use 1 for no expert parallelism",
    "recompute_every": "use 1 for every block",
    "gpus_per_node": "leave it out: the launcher knows",
}
_SECONDS = {"timeout_seconds": "use 600", "start_timeout_seconds": "use 300"}


def _problems(c: ParallelConfig) -> Iterator[Problem]:
    """Every key by itself, then keys that need or exclude one another."""
    for name, fix in _CHOICES.items():
        known = get_args(_TYPES[name])
        if (value := getattr(c, name)) not in known:
            yield Problem(name, "unknown", value, f"must be one of {', '.join(known)}", fix)
    for name, fix in _COUNTS.items():
        if (value := getattr(c, name)) is not None and value < 1:
            yield Problem(name, "range", value, "must be at least 1", fix)

    for name, fix in _SECONDS.items():
        if not 0 < (value := getattr(c, name)) < float("inf"):
            yield Problem(name, "finite", value, "must be finite and above 0", fix)

    if c.dp_shard < 1 and c.dp_shard != -1:
        fix = "use -1 for all ranks that are left"
        yield Problem("dp_shard", "range", c.dp_shard, "must be at least 1, or -1", fix)

    yield from _axes_problems(c)
    yield from _precision_problems(c)
    yield from _recompute_problems(c)


def _axes_problems(c: ParallelConfig) -> Iterator[Problem]:
    """Axes that exclude or need other keys."""
    if c.layout == "auto" and (
        c.dp_shard != -1
        or any(getattr(c, axis) != 1 for axis in ("dp_replicate", "tp", "cp", "pp", "ep"))
    ):
        rule = (
            f"chooses the axes, and one is set (dp_replicate {c.dp_replicate}, dp_shard {c.dp_shard}, "
            f"tp {c.tp}, cp {c.cp}, pp {c.pp}, ep {c.ep})"
        )
        fix = "remove the axes, or use layout = 'manual'"
        yield Problem("layout", "excludes", c.layout, rule, fix)

    compiled = c.compile and c.sequence_parallel
    if c.async_tp and (c.device == "cpu" or not compiled or c.tp == 1):
        rule = (
            f"must have tp above 1, sequence_parallel, compile and CUDA, and tp is {c.tp}, sequence_parallel "
            f"{c.sequence_parallel}, compile {c.compile}, device {c.device}"
        )
        fix = "use async_tp = false, or set the others"
        yield Problem("async_tp", "requires", c.async_tp, rule, fix)

    if c.sdpa != "auto" and c.cp > 1:
        rule = f"must be auto under cp {c.cp}, which has kernels of its own"
        yield Problem("sdpa", "excludes", c.sdpa, rule, "remove it, or use cp = 1")

    stages, usual = c.pp_stages_per_rank, SCHEDULES.get(c.pp_schedule)
    if stages is not None and usual is not None:
        more = c.pp_schedule.startswith("interleaved")
        if stages < usual or (stages > usual and not more):
            fix = "leave it out; interleaved schedules take 2 or more, gpipe and 1f1b have 1, V-schedules 2"
            rule = f"must fit pp_schedule {c.pp_schedule!r}"
            yield Problem("pp_stages_per_rank", "schedule", stages, rule, fix)

    if c.cpu_offload and max(c.tp, c.cp, c.pp, c.ep) > 1:
        rule = (
            f"must go with only data parallelism, and tp is {c.tp}, cp {c.cp}, pp {c.pp}, ep {c.ep}"
        )
        fix = "set them to 1, or cpu_offload = false"
        yield Problem("cpu_offload", "excludes", c.cpu_offload, rule, fix)


def _precision_problems(c: ParallelConfig) -> Iterator[Problem]:
    """Dtypes that need another precision."""
    for name in ("reduce_dtype", "param_dtype"):
        if (getattr(c, name), c.precision) == ("bf16", "fp32"):
            rule = "must go with precision bf16, and precision is fp32"
            fix = f"use {name} = 'fp32' or precision = 'bf16'"
            yield Problem(name, "precision", "bf16", rule, fix)

    if c.float8 != "none" and c.precision == "fp32":
        rule = "must go with precision bf16, and precision is fp32"
        fix = "use precision = 'bf16' or float8 = 'none'"
        yield Problem("float8", "precision", c.float8, rule, fix)

    if c.float8_all_gather and (c.float8 != "tensorwise" or c.device == "cpu" or c.tp > 1):
        rule = f"must go with float8 tensorwise on CUDA and tp 1, and float8 is {c.float8}, device {c.device}, tp {c.tp}"
        fix = "use float8_all_gather = false, or float8 = 'tensorwise' on a GPU"
        yield Problem("float8_all_gather", "requires", c.float8_all_gather, rule, fix)


def _recompute_problems(c: ParallelConfig) -> Iterator[Problem]:
    """Ways of recomputation that exclude one another."""
    if c.recompute_every > 1 and c.recompute == "none":
        fix = "use recompute = 'full', or leave recompute_every out"
        rule = f"must go with recompute full or selective, not {c.recompute}"
        yield Problem("recompute_every", "requires", c.recompute_every, rule, fix)

    if c.compile and c.recompute == "selective":
        rule = "must go without compile, which chooses what to recompute by itself"
        fix = "use recompute = 'none' with memory_budget = 0.7, recompute = 'full', or compile = false"
        yield Problem("recompute", "excludes", c.recompute, rule, fix)

    budget = c.memory_budget
    chooses = c.compile and c.recompute == "none"  # the compiler, under a budget
    if budget is not None and not (0 < budget <= 1 and chooses):
        rule = (
            "must be above 0 and at most 1, with compile and recompute none; compile is "
            f"{c.compile}, recompute {c.recompute}"
        )
        fix = "use compile = true and recompute = 'none', or leave memory_budget out"
        yield Problem("memory_budget", "range", budget, rule, fix)


def splits_backward(config: ParallelConfig) -> bool:
    """Whether gradients of inputs and of weights are computed at different times, to fill the bubble with the latter."""
    return config.pp > 1 and config.pp_schedule in _IN_HALVES


def casts_on_one_rank(config: ParallelConfig) -> bool:
    """Whether one process can train without FSDP2: in fp32, or in bf16 with masters and sums of gradients in fp32."""
    if config.cpu_offload:
        return False
    if config.precision == "fp32":
        return True
    return config.param_dtype == config.reduce_dtype == "fp32" and config.float8 == "none"


def keeps_gathered(config: ParallelConfig) -> bool:
    """Whether FSDP2 must not reshard after the forward: `fully_shard(..., reshard_after_forward=False)`.

    A schedule that splits the backward reads the module's parameters before FSDP2's hooks have gathered them again.
    It gets the shards, which are not in the graph, and gradients are silently missing or wrong (seen in
    torch 2.11 to 2.13; later ones were not checked). Cost: a rank holds the gathered weights of its stages in compute precision throughout the step.
    """
    return splits_backward(config)


def num_stages(config: ParallelConfig) -> int:
    """Stages of the full pipeline."""
    return config.pp * config.stages_per_rank


def rank_of(config: ParallelConfig, stage: int) -> int:
    """The pp rank of a stage: stage modulo pp, or down and up again in a V."""
    if config.pp_schedule in V_SCHEDULES:
        return min(stage, 2 * config.pp - 1 - stage)
    return stage % config.pp


def stages_on(config: ParallelConfig, rank: int) -> list[int]:
    """The stages of a pp rank, in order of depth."""
    return [stage for stage in range(num_stages(config)) if rank_of(config, stage) == rank]


def forward_starts(config: ParallelConfig, count: int) -> list[int]:
    """The tick of each stage's first of `count` forwards without a backward; the others follow at once."""
    # a V comes back over the same ranks, the last one first
    turn = count + config.pp - 1 if config.pp_schedule in V_SCHEDULES else max(count, config.pp)
    return [stage // config.pp * turn + stage % config.pp for stage in range(num_stages(config))]


def next_allowed_count(config: ParallelConfig, num_micro_batches: int) -> int:
    """The least number of micro-batches, from `num_micro_batches` on, that the schedule can run."""
    count, pp = max(1, num_micro_batches), config.pp
    if pp == 1:
        return count
    if config.pp_schedule == "1f1b":
        return max(count, pp)
    if config.pp_schedule == "dualpipev":
        return max(count, num_stages(config))
    if config.pp_schedule.startswith("interleaved"):
        while count % max(1, count // pp):
            count += 1
    return count


def _divisors(number: int) -> str:
    """The divisors of `number`, for messages."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
